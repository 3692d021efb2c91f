"""The budget told in words: a sentence after the question, with the number of each row's budget.

    prompt up to the number | number | rest of the sentence, of the template, and think_open

The first part is tokenised with its question, once, so that telling a row its budget tokenises no
question again. The ids are those of the whole text, which is checked when the prompts are made.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from bacr_jax.config import Config
from bacr_jax.config.checks import BUDGET
from bacr_jax.errors import UserError
from bacr_jax.prompts.encoding import encode_prompts, encode_text, frame, with_ids
from bacr_jax.prompts.formats import PromptFormat
from bacr_jax.types import NO_BUDGET, Prompts

# Stands for the number while the chat template is rendered: a private-use character.
_NUMBER = "\ue001"


def budget_words(config: Config, style: PromptFormat) -> str:
    """The sentence that tells the policy its budget, `{budget}` being the number; "": none does.

    `conditioning.told` says whether there is one; the format's own (the ledger's has tokens for it)
    goes before `conditioning.words`.
    """
    if not config.conditioning.in_words:
        return ""
    return style.budget_words or config.conditioning.words.strip()


def largest_told(config: Config) -> int:
    """The largest budget of training and evaluation: prompts leave room for its number."""
    return max(config.budget.max, *config.eval.budgets)


@dataclass(frozen=True)
class ToldPrompts:
    """Prompts that wait for the number of a budget.

    Attributes:
      closing: ids after the number.
      digits: tokens of the longest number planned for, so that all budgets have one width.
    """

    opened: Prompts
    closing: Int[np.ndarray, "n"]
    digits: int
    tokenizer: Any

    @property
    def rest(self) -> int:
        """Most tokens after `opened`."""
        return self.digits + len(self.closing)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with the longest number."""
        return int(np.max(self.opened.lengths, initial=0)) + self.rest

    def take(self, index: Int[np.ndarray, "n"]) -> "ToldPrompts":
        """Those of some questions alone."""
        return dataclasses.replace(self, opened=self.opened.take(index))

    def at(
        self, index: Int[np.ndarray, "B"], budgets: Int[np.ndarray, "B"], untold: Prompts
    ) -> Prompts:
        """The prompts [B] of some questions, each with the number of its row's budget.

        The question's own tokens stand where they stood.

        Args:
          budgets: tokens, or NO_BUDGET: the row's prompt has no sentence.
          untold: the same rows without a budget.
        """
        opened = self.opened.take(index)
        none = np.asarray(untold.tokens)
        width = max(np.asarray(self.opened.tokens).shape[1] + self.rest, none.shape[1])
        tokens: Any = np.zeros((len(index), width), np.int32)
        lengths: Any = np.zeros(len(index), np.int32)
        for budget in np.unique(budgets):
            rows = np.flatnonzero(np.asarray(budgets) == budget)
            told = (untold if budget == NO_BUDGET else opened).take(rows)
            if budget != NO_BUDGET:
                number = encode_text(self.tokenizer, str(budget))
                if len(number) > self.digits:
                    raise ValueError(f"budget {budget}: its number has over {self.digits} tokens")
                told = with_ids(told, np.concatenate([number, self.closing]))
            tokens[rows, : told.tokens.shape[1]] = told.tokens
            lengths[rows] = told.lengths
        return Prompts(tokens, lengths, untold.question_start, untold.question_end)


def told_prompts(
    tokenizer: Any,
    questions: Sequence[str],
    style: PromptFormat,
    words: str,
    *,
    largest: int,
    max_tokens: int,
) -> tuple[ToldPrompts, Int[np.ndarray, "dropped"]]:
    """Tokenises questions in their format, up to the number of a budget.

    Args:
      max_tokens: longest prompt kept, with the number of the largest budget in it.

    Raises:
      UserError: as `encode_prompts`, or the number can't be told apart from the text beside it.
    """
    before, number, after = words.partition(BUDGET)
    assert number
    head, tail = frame(tokenizer, style, said=before + _NUMBER + after)
    opening, found, closing = tail.partition(_NUMBER)
    if not found:
        raise UserError(
            "tokenizer: its chat template takes the end of the user's message away, where the "
            "budget is told; write conditioning.told=embedding"
        )
    end = encode_text(tokenizer, closing)
    digits = len(encode_text(tokenizer, str(largest)))
    opened, dropped = encode_prompts(
        tokenizer,
        questions,
        style,
        max_tokens=max_tokens,
        around=(head, opening),
        more=digits + len(end),
    )
    first = next(q for i, q in enumerate(questions) if i not in set(dropped.tolist())).strip()
    for budget in {*(10**n for n in range(len(str(largest)))), largest}:
        ids = [encode_text(tokenizer, text) for text in (head + first + opening, str(budget))]
        whole = encode_text(tokenizer, f"{head}{first}{opening}{budget}{closing}")
        if whole.tolist() != np.concatenate([*ids, end]).tolist():
            raise UserError(
                f"conditioning.words: the tokenizer joins the number {budget} with the text beside "
                f"it in {words!r}; write blanks round {BUDGET}"
            )
    return ToldPrompts(opened, end, digits, tokenizer), dropped
