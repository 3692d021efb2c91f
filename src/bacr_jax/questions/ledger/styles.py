"""Traces in their styles, and supervised examples made of them."""

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int

from bacr_jax.questions.ledger.problems import MAX_LEVEL, Problem
from bacr_jax.questions.ledger.tokenizer import BUDGET_MARK, ID

Style = Literal["steps", "redo", "mixed", "at_once"]

# tags and answer digit after a trace: </think> <answer> d </answer>
TAIL = 4


# Token ids of a stretch of a row, and whether they are learned.
Part = tuple[Sequence[int], bool]


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


def example(
    problem: Problem,
    redo: Iterable[bool],
    at_once: bool,
    *,
    kept: float | None = None,
    told: int | None = None,
) -> list[Part]:
    """`<bos>4a2b3c1<think>` trace `</think><answer>0</answer>`, of which the prompt is not learned.

    One that is cut keeps a share of its trace's tokens, and the right digit follows all the same:
    the model learns to answer when its thinking is ended for it. The tags are forced on it there,
    so they are not learned either.

    Args:
      redo: lines written twice.
      kept: below 1; None: it is not cut.
      told: budget in the prompt, `<bos>4a2b3c1f24<think>`; None: it tells none.
    """
    trace = _trace(problem, redo, at_once)
    if kept is not None:
        trace = trace[: int(kept * len(trace))]
    budget = "" if told is None else f"{BUDGET_MARK}{told}"
    parts = (
        (("<bos>", *problem.question, *budget, "<think>"), False),
        (trace, True),
        (("</think>", "<answer>"), kept is None),
        ((problem.answer, "</answer>"), True),
    )
    return [([ID[token] for token in tokens], learned) for tokens, learned in parts]


def padded(
    rows: Sequence[Sequence[Part]], width: int | None = None
) -> tuple[Int[np.ndarray, "B S"], Bool[np.ndarray, "B S"]]:
    """Tokens of rows, padded on the right with 0, and which of them are learned.

    `width`: the widest row's by default. ValueError: one of them does not fit.
    """
    widest = max(sum(len(ids) for ids, _ in row) for row in rows)
    width = widest if width is None else width
    if widest > width:
        raise ValueError(f"an example of {widest} tokens does not fit in {width}")
    tokens, learned = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), bool)
    for row, parts in enumerate(rows):
        end = 0
        for ids, learn in parts:
            begin, end = end, end + len(ids)
            tokens[row, begin:end], learned[row, begin:end] = ids, learn
    return tokens, learned
