"""Renders thinking texts (traces) of ledger problems in several styles, for supervised examples."""

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int

from bacr_jax.questions.ledger.problems import MAX_LEVEL, Problem
from bacr_jax.questions.ledger.tokenizer import BUDGET_MARK, ID

Style = Literal["steps", "redo", "mixed", "at_once"]

# Number of tokens after a trace: </think> <answer> d </answer>.
TAIL = 4


# A part of a supervised example: its token ids, and True if these tokens are in the loss.
Part = tuple[Sequence[int], bool]


def _trace(problem: Problem, redo: Iterable[bool], at_once: bool) -> str:
    """Renders the thinking (trace) of a problem.

    Args:
      redo: for each addition, True if its line is written twice.
      at_once: True for a single line, False for one line per addition.
    """
    value = int(problem.question[0])
    labels = problem.question[1::2]
    operands = problem.question[2::2]
    if at_once:
        # The operands are copied next to `=`, because a style without the copy does not learn to
        # answer better than by guessing.
        return f"{value}{operands}={problem.answer}"
    trace = ""
    for label, operand, is_redone in zip(labels, operands, redo):
        total = (value + int(operand)) % 10
        line = f"{value}+{operand}={total}"
        trace += label + line
        if is_redone:
            trace += line
        value = total
    return trace


def render(problem: Problem, style: Style, rng: np.random.Generator) -> str:
    """Returns the text of a trace between `<think>` and `</think>`, one token per character.

    Only the result of *mixed* depends on `rng`.
    """
    redo_probability = {"redo": 1.0, "mixed": 0.5}.get(style, 0.0)
    redo: list[bool] = (rng.random(MAX_LEVEL) < redo_probability).tolist()
    return _trace(problem, redo, style == "at_once")


def example(
    problem: Problem,
    redo: Iterable[bool],
    at_once: bool,
    *,
    kept: float | None = None,
    prompt_budget: int | None = None,
) -> list[Part]:
    """Returns the supervised example `<bos>4a2b3c1<think>` trace `</think><answer>0</answer>`.

    The prompt is excluded from the loss. A truncated trace is also followed by the correct digit,
    so the model learns to answer after its thinking was truncated at a budget. The tags
    `</think><answer>` after a truncated trace are excluded from the loss, because the decoder
    forces them.

    Args:
      redo: for each line of the trace, True if it is written twice.
      at_once: True for the style *at_once*, which has all operands in one line.
      kept: share of the trace's tokens to keep, below 1. None for the full trace.
      prompt_budget: budget in the prompt, as in `<bos>4a2b3c1f24<think>`. None for a prompt without
        budget.

    Returns:
      The parts of the example: token ids, and True if they are in the loss.
    """
    trace = _trace(problem, redo, at_once)
    if kept is not None:
        trace = trace[: int(kept * len(trace))]
    budget = "" if prompt_budget is None else f"{BUDGET_MARK}{prompt_budget}"
    parts = (
        (("<bos>", *problem.question, *budget, "<think>"), False),
        (trace, True),
        (("</think>", "<answer>"), kept is None),
        ((problem.answer, "</answer>"), True),
    )
    return [([ID[token] for token in tokens], in_loss) for tokens, in_loss in parts]


def padded(
    rows: Sequence[Sequence[Part]], width: int | None = None
) -> tuple[Int[np.ndarray, "B S"], Bool[np.ndarray, "B S"]]:
    """Builds a batch of supervised examples (rows), padded with 0 on the right.

    Args:
      rows: parts of each example.
      width: number of tokens per row. None for the length of the longest row.

    Returns:
      Token ids (int32), and a mask of the tokens in the loss.

    Raises:
      ValueError: a row is longer than `width`.
    """
    longest = max(sum(len(ids) for ids, _ in row) for row in rows)
    if width is None:
        width = longest
    if longest > width:
        raise ValueError(
            f"the longest example has {longest} tokens, but the batch is only {width} tokens wide"
        )
    tokens = np.zeros((len(rows), width), np.int32)
    loss_mask = np.zeros((len(rows), width), bool)
    for row, parts in enumerate(rows):
        start = 0
        for ids, in_loss in parts:
            end = start + len(ids)
            tokens[row, start:end] = ids
            loss_mask[row, start:end] = in_loss
            start = end
    return tokens, loss_mask
