"""Sets of questions with gold answers, levels and difficulty groups."""

import dataclasses
import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from bacr_jax.config import DataConfig
from bacr_jax.data import ledger
from bacr_jax.errors import UserError

# Held-out problems of the ledger: 400 a level, so that the error of an accuracy is about a point.
LEDGER_TEST_SIZE = 2000
NUM_LEVELS = 5


@dataclass(frozen=True)
class QuestionSet:
    """Questions with verifiable answers; entry i of every field belongs together.

    Attributes:
      name: where they are from, for tables and logs.
      questions: texts.
      answers: gold answers.
      levels: 1 (easy) .. 5, or 0 where the source gives none.
      groups: difficulty group, 0 (easy) .. K - 1.
      ids: identifiers, unique in the set.
    """

    name: str
    questions: list[str]
    answers: list[str]
    levels: Int[np.ndarray, "n"]
    groups: Int[np.ndarray, "n"]
    ids: list[str]

    def __post_init__(self) -> None:
        sizes = {len(getattr(self, field.name)) for field in dataclasses.fields(self)[1:]}
        if len(sizes) != 1:
            raise ValueError(f"fields of different lengths: {sorted(sizes)}")

    def __len__(self) -> int:
        """Number of questions."""
        return len(self.questions)

    def take(self, index: Sequence[int] | np.ndarray) -> "QuestionSet":
        """The questions at these places, in this order."""
        index = np.asarray(index, np.int64)
        pick = lambda values: [values[i] for i in index]
        return QuestionSet(
            name=self.name,
            questions=pick(self.questions),
            answers=pick(self.answers),
            levels=self.levels[index],
            groups=self.groups[index],
            ids=pick(self.ids),
        )

    def without(self, index: Sequence[int] | np.ndarray) -> "QuestionSet":
        """All but the questions at these places."""
        keep = np.ones(len(self), bool)
        keep[np.asarray(index, np.int64)] = False
        return self.take(np.flatnonzero(keep))


def groups_from_levels(
    levels: Int[np.ndarray, "n"], *, num_groups: int = 4
) -> Int[np.ndarray, "n"]:
    """Difficulty groups from levels 1..5 (paper appendix: levels 1-2, 3, 4, 5).

        group = floor((level - 1) K / 5)

    which for K = 4 is the paper's grouping.

    Args:
      levels: 1..5; anything else counts as unknown and goes to the hardest group.
      num_groups: K, 1..5.

    Returns:
      Groups 0..K-1, int32.

    Raises:
      UserError: more groups than levels.
    """
    if not 1 <= num_groups <= NUM_LEVELS:
        raise UserError(
            f"data.num_groups: found {num_groups} for {NUM_LEVELS} levels; write 1..{NUM_LEVELS}"
        )
    levels = np.asarray(levels)
    known = (levels >= 1) & (levels <= NUM_LEVELS)
    groups = np.where(known, (levels - 1) * num_groups // NUM_LEVELS, num_groups - 1)
    return groups.astype(np.int32)


def groups_from_solve_rate(
    rate: Float[np.ndarray, "n"], *, num_groups: int = 4
) -> Int[np.ndarray, "n"]:
    """Difficulty groups from measured solve rates, the easiest first.

    With K = 4 the thresholds are .25, .5 and .75 (paper appendix), a rate above .75 being group 0.
    The rate is the mean over several samples of a problem: pass@k would be 0 or 1 for one problem.

    Args:
      rate: share of samples that are correct, in [0, 1].
      num_groups: K; thresholds are the multiples of 1/K.

    Returns:
      Groups 0..K-1, int32.

    Raises:
      UserError: a rate outside [0, 1] (by its row), or no group.
    """
    if num_groups < 1:
        raise UserError(f"data.num_groups: found {num_groups}; write 1 or more")
    rate = np.asarray(rate, np.float64)
    wrong = np.flatnonzero(~((rate >= 0) & (rate <= 1)))
    if len(wrong):
        raise UserError(
            f"solve rate {wrong[0]}: found {rate[wrong[0]]}; write the share of correct samples, "
            "a number in [0, 1]"
        )
    thresholds = np.arange(1, num_groups) / num_groups
    below = np.searchsorted(thresholds, rate, side="left")
    return (num_groups - 1 - below).astype(np.int32)


Loader = Callable[[str, DataConfig, int, ledger.Split], QuestionSet]


def _load_ledger(path: str, config: DataConfig, seed: int, split: ledger.Split) -> QuestionSet:
    if path:
        raise UserError(f"data: found 'ledger:{path}'; write ledger (it is made, not read)")
    if config.groups != "level":
        raise UserError(
            f"data.groups: found {config.groups} for the ledger, whose problems have no measured "
            "solve rates; write level"
        )
    settings = config.ledger
    size = settings.train_size if split == "train" else LEDGER_TEST_SIZE
    if size < 1:
        raise UserError(f"data.ledger.train_size: found {size}; write 1 or more")
    problems = ledger.make_problems(seed, size, max_operand=settings.max_operand, split=split)
    levels = np.array([problem.level for problem in problems], np.int32)
    return QuestionSet(
        name="ledger",
        questions=[problem.question for problem in problems],
        answers=[problem.answer for problem in problems],
        levels=levels,
        groups=groups_from_levels(levels, num_groups=config.num_groups),
        ids=[f"ledger-{split}-{index}" for index in range(size)],
    )


# What can stand before the colon of data.train and data.eval.
LOADERS: dict[str, Loader] = {"ledger": _load_ledger}


def load_questions(spec: str, config: DataConfig, seed: int, split: ledger.Split) -> QuestionSet:
    """Reads or makes a set.

    Args:
      spec: NAME or NAME:PATH.
      config: the run's data settings.
      seed: of sets that are made.
      split: "train" or "test".

    Raises:
      UserError: an unknown name, or whatever the loader finds wrong.
    """
    name, _, path = spec.partition(":")
    if name not in LOADERS:
        near = difflib.get_close_matches(name, LOADERS, n=1, cutoff=0.0)
        key = "data.train" if split == "train" else "data.eval"
        raise UserError(f"{key}: found {spec!r}; the nearest known name is {near[0]!r}")
    return LOADERS[name](path, config, seed, split)
