"""Traces in their styles, and supervised examples made of them."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Int

from bacr_jax.questions.ledger.problems import MAX_LEVEL, LedgerArrays, Problem, problem_arrays
from bacr_jax.questions.ledger.tokenizer import BUDGET_MARK, ID, VOCABULARY

Style = Literal["steps", "redo", "mixed", "at_once"]

# tags and answer digit after a trace: </think> <answer> d </answer>
TAIL = 4
# <bos>, start digit and <think>, five labelled operands, five lines written twice, and the tail
LONGEST = 3 + 2 * MAX_LEVEL + 11 * MAX_LEVEL + TAIL
_ZERO, _FIRST_LABEL = ID["0"], ID["a"]


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


def _put(tokens: np.ndarray, row: np.ndarray, at: np.ndarray, values: tuple[Any, ...]) -> None:
    """Writes a sequence into each of the rows, from column `at` on."""
    for offset, value in enumerate(values):
        tokens[row, at + offset] = value


def _tell(
    tokens: np.ndarray, at: Int[np.ndarray, "B"], budgets: Int[np.ndarray, "B"]
) -> Int[np.ndarray, "B"]:
    """Writes each row's budget, its mark and its digits, from `at` on; returns where it ends."""
    tokens[np.arange(len(at)), at] = ID[BUDGET_MARK]
    end = at + 1 + np.array([len(str(budget)) for budget in budgets])
    rest, place = np.asarray(budgets), end - 1
    while (place > at).any():
        row = np.flatnonzero(place > at)
        tokens[row, place[row]] = rest[row] % 10 + _ZERO
        rest, place = rest // 10, place - 1
    return end


def _write_traces(
    rows: LedgerArrays,
    redo: Bool[np.ndarray, "B n"],
    at_once: Bool[np.ndarray, "B"],
    tokens: Int[np.ndarray, "B S"],
    position: Int[np.ndarray, "B"],
) -> Int[np.ndarray, "B"]:
    """Writes a trace into every row from `position` on; returns where each trace ends."""
    plus, equals = ID["+"], ID["="]
    position = position.copy()
    for line in range(MAX_LEVEL):
        row = np.flatnonzero((rows.levels > line) & ~at_once)
        at = position[row]
        before, after = rows.values[row, line] + _ZERO, rows.values[row, line + 1] + _ZERO
        operand = rows.operands[row, line] + _ZERO
        _put(tokens, row, at, (_FIRST_LABEL + line, before, plus, operand, equals, after))
        position[row] += 6
        again = redo[row, line]
        row, at = row[again], at[again] + 6
        _put(tokens, row, at, (before[again], plus, operand[again], equals, after[again]))
        position[row] += 5
    # The operands are copied next to `=`: a style that skips the copying stays at chance.
    row = np.flatnonzero(at_once)
    at, level = position[row], rows.levels[row]
    tokens[row, at] = rows.values[row, 0] + _ZERO
    for line in range(MAX_LEVEL):
        used = level > line
        tokens[row[used], at[used] + 1 + line] = rows.operands[row[used], line] + _ZERO
    tokens[row, at + level + 1] = equals
    tokens[row, at + level + 2] = rows.answers[row] + _ZERO
    position[row] += level + 3
    return position


def render(problem: Problem, style: Style, rng: np.random.Generator) -> str:
    """The trace of a problem, between `<think>` and `</think>`; every character is a token.

    Only *mixed* draws from `rng`.
    """
    chance = {"redo": 1.0, "mixed": 0.5}.get(style, 0.0)
    redo, at_once = rng.random((1, MAX_LEVEL)) < chance, np.array([style == "at_once"])
    tokens = np.zeros((1, LONGEST), np.int32)
    end = _write_traces(problem_arrays(problem), redo, at_once, tokens, np.array([0]))
    return "".join(VOCABULARY[token] for token in tokens[0, : end[0]])


def supervised_batch(
    rows: LedgerArrays,
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
    count = len(rows.levels)
    everyone = np.arange(count)
    # A trace that is cut is written whole first, so it needs the room.
    room = max(width, LONGEST + told_width(told))
    tokens = np.full((count, room), ID["<pad>"], np.int32)
    tokens[:, 0] = ID["<bos>"]
    tokens[:, 1] = rows.values[:, 0] + _ZERO
    for line in range(MAX_LEVEL):
        row = np.flatnonzero(rows.levels > line)
        tokens[row, 2 + 2 * line] = _FIRST_LABEL + line
        tokens[row, 3 + 2 * line] = rows.operands[row, line] + _ZERO
    prompt = 3 + 2 * rows.levels
    if told is not None:
        prompt = _tell(tokens, prompt - 1, told) + 1
    tokens[everyone, prompt - 1] = ID["<think>"]
    end = _write_traces(rows, redo, at_once, tokens, prompt)
    end = np.where(cut, prompt + (rng.random(count) * (end - prompt)).astype(end.dtype), end)
    closing = (ID["</think>"], ID["<answer>"], rows.answers + _ZERO, ID["</answer>"])
    _put(tokens, everyone, end, closing)
    lengths = end + TAIL
    where = np.arange(room)
    inside = where < lengths[:, None]
    tokens[~inside] = ID["<pad>"]
    forced = cut[:, None] & (where >= end[:, None]) & (where < end[:, None] + 2)
    mask = inside & (where >= prompt[:, None]) & ~forced
    if lengths.max(initial=0) > width:
        raise ValueError(f"an example of {lengths.max()} tokens does not fit in {width}")
    return SupervisedBatch(tokens[:, :width], mask[:, :width], lengths.astype(np.int32))
