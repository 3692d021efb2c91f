"""Scores an answer by the scorer of the generator that made its question; run in a worker."""

import json
from typing import Any

from reasoning_gym.factory import create_dataset

from bacr_tasks.gym_safe import score_answer

_DATASETS: dict[str, Any] = {}


def prepare(row: Any) -> None:
    """Makes the data set of a row's generator."""
    _dataset(*row.metadata["reasoning_gym"])


def score(answer: str, row: Any) -> float:
    """What reasoning-gym gives an answer, in [0, 1]; the answer is never evaluated."""
    name, fields = row.metadata["reasoning_gym"]
    entry = {"question": row.question, "answer": row.answer, "metadata": row.metadata}
    return score_answer(name, _dataset(name, fields), answer, entry)


def _dataset(name: str, fields: dict[str, Any]) -> Any:
    key = json.dumps([name, fields], default=str)
    if key not in _DATASETS:
        # A few make all of their items at the start.
        _DATASETS[key] = create_dataset(name, **{"seed": 0, **fields, "size": 20})
    return _DATASETS[key]
