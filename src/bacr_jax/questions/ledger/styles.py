"""Traces in their styles, and supervised examples made of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int

from bacr_jax.questions.ledger.problems import MAX_LEVEL, Problem
from bacr_jax.questions.ledger.tokenizer import BUDGET_MARK, ID

Style = Literal["steps", "redo", "mixed", "at_once"]

# tags and answer digit after a trace: </think> <answer> d </answer>
TAIL = 4


@dataclass(frozen=True)
class SupervisedBatch:
    """Supervised examples, padded on the right with `<pad>`.

    `loss_mask` is true where a token is to be predicted: never the prompt, padding or forced tags.
    """

    tokens: Int[np.ndarray, "B S"]
    loss_mask: Bool[np.ndarray, "B S"]
    lengths: Int[np.ndarray, "B"]


def told_width(budgets: Int[np.ndarray, "n"] | None) -> int:
    """Most tokens that a budget takes in a prompt: its mark and its digits."""
    return 0 if budgets is None else 1 + len(str(np.max(budgets)))


def _trace(problem: Problem, redo: Iterable[bool], at_once: bool) -> str:
    """A trace in the short style, or line by line, of which some are written twice."""
    value, operands = int(problem.question[0]), problem.question[2::2]
    if at_once:
        # The operands are copied next to `=`: a style that skips the copying stays at chance.
        return f"{value}{operands}={problem.answer}"
    trace = ""
    for label, operand, again in zip(problem.question[1::2], operands, redo):
        total = (value + int(operand)) % 10
        line = f"{value}+{operand}={total}"
        trace += label + line + line * again
        value = total
    return trace


def render(problem: Problem, style: Style, rng: np.random.Generator) -> str:
    """The trace of a problem, between `<think>` and `</think>`; every character is a token.

    Only *mixed* draws from `rng`.
    """
    chance = {"redo": 1.0, "mixed": 0.5}.get(style, 0.0)
    redo: list[bool] = (rng.random(MAX_LEVEL) < chance).tolist()
    return _trace(problem, redo, style == "at_once")


def padded(
    rows: Sequence[Sequence[tuple[Sequence[int], bool]]], width: int
) -> tuple[Int[np.ndarray, "B S"], Bool[np.ndarray, "B S"]]:
    """Tokens of rows, padded on the right with 0, and which are learned: a row is (ids, learned)s.

    ValueError: one of them does not fit.
    """
    tokens, learned = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), bool)
    for row, parts in enumerate(rows):
        end = 0
        for ids, learn in parts:
            begin, end = end, end + len(ids)
            if end > width:
                raise ValueError(f"an example of {end} tokens or more does not fit in {width}")
            tokens[row, begin:end], learned[row, begin:end] = ids, learn
    return tokens, learned


def supervised_batch(
    problems: Sequence[Problem],
    redo: Bool[np.ndarray, "B n"],
    at_once: Bool[np.ndarray, "B"],
    cut: Bool[np.ndarray, "B"],
    rng: np.random.Generator,
    *,
    width: int,
    told: Int[np.ndarray, "B"] | None = None,
) -> SupervisedBatch:
    """Examples `<bos>4a2b3c1<think>` trace `</think><answer>0</answer>` with their loss masks.

    A cut example keeps a random number of its trace's tokens, from none to all but one, and the
    right digit follows all the same: the model learns to answer when its thinking is ended for it.
    The tags are forced on it there, so they are not in the loss.

    Args:
      redo: lines written twice.
      at_once: rows in that style.
      width: tokens per row; ValueError if an example does not fit.
      told: budget in each row's prompt, `<bos>4a2b3c1f24<think>`; None: prompts tell none.
    """
    rows, share = [], rng.random(len(problems))
    for row, problem in enumerate(problems):
        trace = _trace(problem, redo[row].tolist(), bool(at_once[row]))
        if cut[row]:
            trace = trace[: int(share[row] * len(trace))]
        budget = "" if told is None else f"{BUDGET_MARK}{told[row]}"
        parts = (
            (("<bos>", *problem.question, *budget, "<think>"), False),
            (trace, True),
            (("</think>", "<answer>"), not cut[row]),
            ((problem.answer, "</answer>"), True),
        )
        rows.append([([ID[token] for token in tokens], learned) for tokens, learned in parts])
    lengths = np.array([sum(len(ids) for ids, _ in row) for row in rows], np.int32)
    return SupervisedBatch(*padded(rows, width), lengths)
