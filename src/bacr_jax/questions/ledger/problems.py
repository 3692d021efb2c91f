"""Generates problems of the ledger and splits them into training and test problems."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from bacr_jax.questions.source import Split

MAX_LEVEL = 5
_LABELS = "abcde"
# Number of the random stream. Problems and the supervised warm-up use different streams of the
# same seed.
_STREAM = 1


@dataclass(frozen=True)
class Problem:
    """A problem of the ledger task: a chain of additions modulo 10.

    Attributes:
      question: text such as `4a2b3c1`, in which every character is a token.
      answer: the sum modulo 10, as a digit.
      level: number of additions, 1 to 5.
    """

    question: str
    answer: str
    level: int


def _scramble(codes: np.ndarray) -> np.ndarray:
    """Returns a 64-bit hash of each code that is the same on every machine (splitmix64)."""
    x = codes.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@functools.cache
def split_codes(level: int, max_operand: int, split: Split) -> Int[np.ndarray, "n"]:
    """Returns the codes of all problems of a difficulty level in a split, sorted by their hash.

    The code of a problem is an integer in [0, 10 max_operand^level) that encodes the start digit
    and the operands as digits in mixed radix. The fifth of the codes with the smallest hashes is
    the test split.

    Args:
      level: difficulty level of the problems (number of additions), 1 to 5.
      max_operand: largest operand.
      split: "train" or "test".
    """
    num_codes = 10 * max_operand**level
    # The difficulty level is hashed too. Otherwise, the same small problem codes would be in the
    # test split of every level.
    hashes = _scramble(np.arange(num_codes) + (level << 32))
    order = np.argsort(hashes, kind="stable")
    num_held_out = num_codes // 5
    if split == "test":
        return order[:num_held_out]
    return order[num_held_out:]


def problem_of(code: int, level: int, max_operand: int) -> Problem:
    """Converts the code of a problem to the problem (see `split_codes`)."""
    rest, value = divmod(code, 10)
    question = str(value)
    for label in _LABELS[:level]:
        rest, digit = divmod(rest, max_operand)
        operand = digit + 1
        question += f"{label}{operand}"
        value += operand
    return Problem(question, str(value % 10), level)


def make_problems(
    seed: int,
    size: int,
    *,
    max_operand: int,
    levels: Sequence[int] = (1, 2, 3, 4, 5),
    split: Split = "train",
) -> list[Problem]:
    """Samples problems, evenly from all difficulty levels and in random order.

    The problems of a level in the split are shuffled and then repeated as often as needed, so the
    numbers of copies of two problems of a level differ by at most one. Training and test problems
    are disjoint for all seeds.

    Args:
      size: number of problems.
      max_operand: largest operand.
    """
    rng = np.random.default_rng([seed, _STREAM, int(split == "test")])
    codes_of_levels = []
    levels_of_codes = []
    for index, level in enumerate(levels):
        # If `size` is not divisible by the number of levels, the first levels get one problem more.
        count = size // len(levels) + (index < size % len(levels))
        pool = rng.permutation(split_codes(level, max_operand, split))
        codes_of_levels.append(np.resize(pool, count))
        levels_of_codes.append(np.full(count, level))
    order = rng.permutation(size)
    shuffled_codes = np.concatenate(codes_of_levels)[order].tolist()
    shuffled_levels = np.concatenate(levels_of_codes)[order].tolist()
    return [
        problem_of(code, level, max_operand) for code, level in zip(shuffled_codes, shuffled_levels)
    ]
