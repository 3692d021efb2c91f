"""Prompts with the budget in a sentence after the question, which contains each row's number.

    prompt up to the number | number | rest of the sentence, rest of the template, think_open

The first part is tokenised once, with its question, so that inserting a number does not tokenise
the question again. When the prompts are made, the ids are checked to equal the whole text's.
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

# Replaces the number while the chat template is rendered: a private-use character.
_NUMBER = "\ue001"


def budget_words(config: Config, style: PromptFormat) -> str:
    """Returns the sentence with the budget in prompts, in which `{budget}` is the number.

    A format's sentence has precedence over `conditioning.words` (the ledger has tokens for it). The
    result is empty if `conditioning.told` puts no budget into prompts.
    """
    if not config.conditioning.in_words:
        return ""
    return style.budget_words or config.conditioning.words.strip()


def largest_told(config: Config) -> int:
    """Returns the largest budget of training and evaluation, whose number must fit in prompts."""
    return max(config.budget.max, *config.eval.budgets)


@dataclass(frozen=True)
class ToldPrompts:
    """Prompts into which the number of a budget can be inserted.

    Attributes:
      opened: prompts up to the number.
      closing: ids after the number.
      digits: tokens of the longest supported number, so that all budgets have the same width.
    """

    opened: Prompts
    closing: Int[np.ndarray, "n"]
    digits: int
    tokenizer: Any

    @property
    def rest(self) -> int:
        """Returns the largest number of tokens after `opened`."""
        return self.digits + len(self.closing)

    @property
    def longest(self) -> int:
        """Returns the tokens of the longest prompt with the longest number."""
        return int(np.max(self.opened.lengths, initial=0)) + self.rest

    def take(self, index: Int[np.ndarray, "n"]) -> "ToldPrompts":
        """Returns the prompts of the questions at these indices."""
        return dataclasses.replace(self, opened=self.opened.take(index))

    def at(
        self, index: Int[np.ndarray, "B"], budgets: Int[np.ndarray, "B"], untold: Prompts
    ) -> Prompts:
        """Returns prompts [B] of some questions, each with the number of its row's budget.

        The positions of the question's tokens do not change.

        Args:
          index: question of each row.
          budgets: budget of each row in tokens. With NO_BUDGET, the row's prompt has no sentence.
          untold: prompts of the same rows without a budget.

        Raises:
          ValueError: a budget's number has more than `digits` tokens.
        """
        opened = self.opened.take(index)
        told_width = np.asarray(self.opened.tokens).shape[1] + self.rest
        width = max(told_width, np.asarray(untold.tokens).shape[1])
        tokens: Any = np.zeros((len(index), width), np.int32)
        lengths: Any = np.zeros(len(index), np.int32)
        # Rows with the same budget are filled at once.
        for budget in np.unique(budgets):
            rows = np.flatnonzero(np.asarray(budgets) == budget)
            if budget == NO_BUDGET:
                prompts = untold.take(rows)
            else:
                prompts = with_ids(opened.take(rows), self._ending(int(budget)))
            tokens[rows, : prompts.tokens.shape[1]] = prompts.tokens
            lengths[rows] = prompts.lengths
        return Prompts(tokens, lengths, untold.question_start, untold.question_end)

    def _ending(self, budget: int) -> Int[np.ndarray, "n"]:
        """Returns the ids after `opened` for one budget: its number, and `closing`."""
        number = encode_text(self.tokenizer, str(budget))
        if len(number) > self.digits:
            raise ValueError(f"budget {budget}: its number has over {self.digits} tokens")
        return np.concatenate([number, self.closing])


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
      words: the sentence with the budget (`budget_words`).
      largest: largest budget to leave room for, in tokens.
      max_tokens: longest prompt that is kept, including the number of the largest budget.

    Returns:
      The prompts that are kept, and the indices of questions that are left out.

    Raises:
      UserError: as `encode_prompts`; or the chat template drops the sentence; or the tokenizer
        joins a number with the text next to it.
    """
    before, placeholder, after = words.partition(BUDGET)
    assert placeholder
    head, tail = frame(tokenizer, style, said=before + _NUMBER + after)
    opening, number_mark, closing = tail.partition(_NUMBER)
    if not number_mark:
        raise UserError(
            "tokenizer: its chat template takes the end of the user's message away, which contains "
            "the budget; write conditioning.told=embedding"
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
    dropped_rows = set(dropped.tolist())
    first_kept = next(row for row in range(len(questions)) if row not in dropped_rows)
    up_to_number = head + questions[first_kept].strip() + opening
    for budget in _budgets_to_check(largest):
        parts = [
            encode_text(tokenizer, up_to_number),
            encode_text(tokenizer, str(budget)),
            end,
        ]
        whole_ids = encode_text(tokenizer, f"{up_to_number}{budget}{closing}")
        if whole_ids.tolist() != np.concatenate(parts).tolist():
            raise UserError(
                f"conditioning.words: the tokenizer joins the number {budget} with the text beside "
                f"it in {words!r}; write blanks round {BUDGET}"
            )
    return ToldPrompts(opened, end, digits, tokenizer), dropped


def _budgets_to_check(largest: int) -> set[int]:
    """Returns one budget per number of digits up to the largest budget, and the largest."""
    num_digits = len(str(largest))
    return {*(10**exponent for exponent in range(num_digits)), largest}
