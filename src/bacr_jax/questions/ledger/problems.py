"""Problems of the ledger, and which of them are held out."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from bacr_jax.questions.source import Split

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


def problem_of(code: int, level: int, max_operand: int) -> Problem:
    """The problem of a code (`split_codes`)."""
    rest, value = divmod(code, 10)
    question = str(value)
    for label in _LABELS[:level]:
        rest, digit = divmod(rest, max_operand)
        question += f"{label}{digit + 1}"
        value += digit + 1
    return Problem(question, str(value % 10), level)


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
    drawn = zip(np.concatenate(codes)[order].tolist(), np.concatenate(drawn_levels)[order].tolist())
    return [problem_of(code, level, max_operand) for code, level in drawn]
