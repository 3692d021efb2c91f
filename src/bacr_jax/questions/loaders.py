"""Sets of questions by name: what can stand in data.train and data.eval."""

import difflib
import functools
from collections.abc import Callable

import numpy as np

from bacr_jax.config import DataConfig
from bacr_jax.errors import UserError
from bacr_jax.questions import ledger, math_sets
from bacr_jax.questions.groups import groups_from_levels
from bacr_jax.questions.question_set import QuestionSet

# Held-out problems of the ledger: 400 a level, so that the error of an accuracy is about a point.
LEDGER_TEST_SIZE = 2000

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
    every = tuple(range(1, ledger.MAX_LEVEL + 1))
    problems = ledger.make_problems(
        seed,
        size,
        max_operand=settings.max_operand,
        levels=settings.train_levels if split == "train" else every,
        split=split,
    )
    levels = np.array([problem.level for problem in problems], np.int32)
    return QuestionSet(
        name="ledger",
        questions=[problem.question for problem in problems],
        answers=[problem.answer for problem in problems],
        levels=levels,
        groups=groups_from_levels(levels, num_groups=config.num_groups),
        ids=[f"ledger-{split}-{index}" for index in range(size)],
    )


def _load_table(
    name: str, path: str, config: DataConfig, seed: int, split: ledger.Split
) -> QuestionSet:
    return math_sets.load_table(name, path, config, split)


# What can stand before the colon of data.train and data.eval.
LOADERS: dict[str, Loader] = {
    "ledger": _load_ledger,
    **{
        name: functools.partial(_load_table, name)
        for name in (*math_sets.LAYOUTS, *math_sets.TABLES)
    },
}


def load_questions(spec: str, config: DataConfig, seed: int, split: ledger.Split) -> QuestionSet:
    """Reads or makes the set NAME or NAME:PATH; the seed is that of sets that are made.

    UserError: an unknown name, or whatever the loader finds wrong.
    """
    name, _, path = spec.partition(":")
    if name not in LOADERS:
        near = difflib.get_close_matches(name, LOADERS, n=1, cutoff=0.0)
        key = "data.train" if split == "train" else "data.eval"
        raise UserError(f"{key}: found {spec!r}; the nearest known name is {near[0]!r}")
    return LOADERS[name](path, config, seed, split)
