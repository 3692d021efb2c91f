"""Builds prompts with a sentence after the question that contains the thinking budget.

    prompt up to the number | number | rest of the sentence, rest of the template, think_open

The first part is tokenized once per question, so that inserting a number does not tokenize the
question again. When the prompts are built, a check ensures that the token ids of the parts are the
same as the token ids of the whole text.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from bacr_jax.config.checks import BUDGET
from bacr_jax.errors import UserError
from bacr_jax.prompts.encoding import encode_prompts, encode_text, frame, with_ids
from bacr_jax.prompts.formats import PromptFormat
from bacr_jax.types import NO_BUDGET, Prompts

# Placeholder for the number while the chat template is rendered: a private-use character.
_NUMBER = "\ue001"


def budget_words(budget_text: str | None, style: PromptFormat) -> str:
    """Returns the sentence that specifies the budget in prompts, with the placeholder `{budget}`.

    The result is empty if prompts contain no budget. The sentence of a prompt format takes
    precedence over the sentence of the run, because some formats have special tokens for it.

    Args:
      budget_text: sentence of the run (`TaskSettings.budget_text`). None if prompts contain no
        budget.
    """
    if budget_text is None:
        return ""
    return style.budget_words or budget_text


@dataclass(frozen=True)
class BudgetPrompts:
    """Tokenized prompts into which a budget (a number of tokens) can be inserted.

    Attributes:
      opened: prompts up to the number.
      closing: token ids after the number, equal for all prompts.
      digits: maximum number of tokens of a number. Batches reserve this many positions, so that
        their width does not depend on the budgets.
      tokenizer: tokenizer of the numbers.
    """

    opened: Prompts
    closing: Int[np.ndarray, "n"]
    digits: int
    tokenizer: Any

    @property
    def rest(self) -> int:
        """Returns the maximum number of tokens in a prompt after `opened`."""
        return self.digits + len(self.closing)

    @property
    def longest(self) -> int:
        """Returns the length of the longest prompt in tokens, with the longest possible number."""
        return int(np.max(self.opened.lengths, initial=0)) + self.rest

    def take(self, index: Int[np.ndarray, "n"]) -> "BudgetPrompts":
        """Returns the prompts of the questions at the given indices."""
        return dataclasses.replace(self, opened=self.opened.take(index))

    def at(
        self, index: Int[np.ndarray, "B"], budgets: Int[np.ndarray, "B"], without_budget: Prompts
    ) -> Prompts:
        """Returns the prompts [B] of the given questions, including the budget of each row.

        The token positions of the question are the same with and without a budget.

        Args:
          index: index of the question in each row of the batch.
          budgets: budget of each row in tokens, or NO_BUDGET for a prompt without the sentence.
          without_budget: prompts of the same rows without a budget.

        Raises:
          ValueError: If the number of a budget has more than `digits` tokens.
        """
        opened = self.opened.take(index)
        prompt_width = np.asarray(self.opened.tokens).shape[1] + self.rest
        width = max(prompt_width, np.asarray(without_budget.tokens).shape[1])
        tokens: Any = np.zeros((len(index), width), np.int32)
        lengths: Any = np.zeros(len(index), np.int32)
        for budget in np.unique(budgets):
            rows = np.flatnonzero(np.asarray(budgets) == budget)
            if budget == NO_BUDGET:
                prompts = without_budget.take(rows)
            else:
                prompts = with_ids(opened.take(rows), self._ending(int(budget)))
            tokens[rows, : prompts.tokens.shape[1]] = prompts.tokens
            lengths[rows] = prompts.lengths
        return Prompts(tokens, lengths, without_budget.question_start, without_budget.question_end)

    def _ending(self, budget: int) -> Int[np.ndarray, "n"]:
        """Returns the token ids after `opened` for one budget: its number and `closing`."""
        number = encode_text(self.tokenizer, str(budget))
        if len(number) > self.digits:
            raise ValueError(
                f"budget {budget} is encoded as more than {self.digits} tokens, the number of "
                "tokens of the largest budget"
            )
        return np.concatenate([number, self.closing])


def budget_frame(tokenizer: Any, style: PromptFormat, words: str) -> tuple[str, str, str]:
    """Returns the text of a prompt around a question and around the number of its budget.

    Args:
      words: sentence with the budget (`budget_words`).

    Returns:
      The text before the question, the text between the question and the number, and the text after
      the number.

    Raises:
      UserError: If the chat template drops the sentence.
    """
    before, placeholder, after = words.partition(BUDGET)
    assert placeholder
    head, tail = frame(tokenizer, style, user_suffix=before + _NUMBER + after)
    opening, number_mark, closing = tail.partition(_NUMBER)
    if not number_mark:
        raise UserError(
            "tokenizer: the chat template removes the end of the user's message, which contains "
            "the budget; set conditioning.budget_input=embedding, which needs no budget in the "
            "prompt"
        )
    return head, opening, closing


def make_budget_prompts(
    tokenizer: Any,
    questions: Sequence[str],
    style: PromptFormat,
    words: str,
    *,
    largest: int,
    max_tokens: int,
) -> tuple[BudgetPrompts, Int[np.ndarray, "dropped"]]:
    """Formats and tokenizes questions as prompts with a gap for the number of the budget.

    Args:
      words: sentence with the budget (`budget_words`).
      largest: largest budget for which space is reserved, in tokens.
      max_tokens: maximum prompt length, including the number of the largest budget.

    Returns:
      The prompts, and the indices of questions that are excluded because their prompts are too
      long.

    Raises:
      UserError: If `encode_prompts` raises it, the chat template drops the sentence, or the
        tokenizer merges a number with adjacent text.
    """
    head, opening, closing = budget_frame(tokenizer, style, words)
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
                f"conditioning.prompt_text: in {words!r}, the tokenizer merges the number "
                f"{budget} and the text next to it into one token; put spaces around {BUDGET}"
            )
    return BudgetPrompts(opened, end, digits, tokenizer), dropped


def _budgets_to_check(largest: int) -> set[int]:
    """Returns the powers of ten up to the largest budget, and the largest budget."""
    num_digits = len(str(largest))
    return {*(10**exponent for exponent in range(num_digits)), largest}
