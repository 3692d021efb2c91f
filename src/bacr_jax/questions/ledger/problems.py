"""Problems of the ledger, and which of them are held out."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Int

Split = Literal["train", "test"]

MAX_LEVEL = 5
_LABELS = "abcde"
# Number of the random stream, so that problems and warm-up share no draws of one seed.
_STREAM = 1


@dataclass(frozen=True)
class Problem:
    """One question.

    Attributes:
      question: `4a2b3c1`; every character is a token.
      level: number of operations, 1..5.
    """

    question: str
    answer: str
    level: int


@dataclass(frozen=True)
class LedgerArrays:
    """Problems as arrays, one row each.

    Attributes:
      operands: columns from n on are not used.
      values: start digit, then the value after each operation, modulo 10.
    """

    levels: Int[np.ndarray, "B"]
    operands: Int[np.ndarray, "B n"]
    values: Int[np.ndarray, "B n_plus_1"]

    @property
    def answers(self) -> Int[np.ndarray, "B"]:
        """Final values."""
        return self.values[np.arange(len(self.levels)), self.levels]


def _scramble(codes: np.ndarray) -> np.ndarray:
    """A 64-bit mix of each code (the finaliser of splitmix64): the same on every machine."""
    x = codes.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@functools.cache
def split_codes(level: int, max_operand: int, split: Split) -> Int[np.ndarray, "n"]:
    """Codes of the problems of one level (1..5) that belong to a split, in the order of a hash.

    The code of a problem counts its start digit and operands, 1..max_operand, in mixed radix: it is
    in [0, 10 max_operand^level). The first fifth by the hash is the test split.
    """
    total = 10 * max_operand**level
    # The level is part of what is hashed, or small codes would be held out on every level alike.
    order = np.argsort(_scramble(np.arange(total) + (level << 32)), kind="stable")
    held_out = total // 5
    return order[:held_out] if split == "test" else order[held_out:]


def decode_problems(
    codes: Int[np.ndarray, "B"], levels: Int[np.ndarray, "B"], *, max_operand: int
) -> LedgerArrays:
    """Problems from their codes (`split_codes`) and the level of each."""
    rest, start = np.divmod(codes, 10)
    operands = np.zeros((len(codes), MAX_LEVEL), np.int64)
    for line in range(MAX_LEVEL):
        rest, digit = np.divmod(rest, max_operand)
        operands[:, line] = np.where(line < levels, digit + 1, 0)
    sums = np.cumsum(np.concatenate([start[:, None], operands], axis=1), axis=1)
    return LedgerArrays(np.asarray(levels), operands, sums % 10)


def make_problems(
    seed: int,
    size: int,
    *,
    max_operand: int,
    levels: Sequence[int] = (1, 2, 3, 4, 5),
    split: Split = "train",
) -> list[Problem]:
    """Problems spread evenly over levels, in random order.

    A level's share goes round and round its problems of the split in a shuffled order, so counts of
    equal problems differ by at most one. Train and test share no question, whatever the seeds.
    """
    rng = np.random.default_rng([seed, _STREAM, int(split == "test")])
    codes, drawn_levels = [], []
    for index, level in enumerate(levels):
        share = size // len(levels) + (index < size % len(levels))
        pool = rng.permutation(split_codes(level, max_operand, split))
        codes.append(np.resize(pool, share))
        drawn_levels.append(np.full(share, level))
    order = rng.permutation(size)
    rows = decode_problems(
        np.concatenate(codes)[order], np.concatenate(drawn_levels)[order], max_operand=max_operand
    )
    return [_problem(rows, row) for row in range(size)]


def _problem(rows: LedgerArrays, row: int) -> Problem:
    level = int(rows.levels[row])
    lines = zip(_LABELS, rows.operands[row, :level])
    question = f"{rows.values[row, 0]}" + "".join(f"{label}{n}" for label, n in lines)
    return Problem(question, str(rows.answers[row]), level)


def problem_arrays(problem: Problem) -> LedgerArrays:
    """The problem as a batch of one."""
    operands = np.zeros((1, MAX_LEVEL), np.int64)
    operands[0, : problem.level] = [int(digit) for digit in problem.question[2::2]]
    start = np.array([[int(problem.question[0])]])
    sums = np.cumsum(np.concatenate([start, operands], axis=1), axis=1)
    return LedgerArrays(np.array([problem.level]), operands, sums % 10)
