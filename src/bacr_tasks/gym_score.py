"""Scores answers to reasoning-gym questions. The grader runs this script in a worker process.

`gym` exports the path of this script as SCORE. The grader first calls `prepare`, then `score`.
"""

import json
from typing import Any

from reasoning_gym.factory import create_dataset

from bacr_tasks.gym_safe import score_answer

# Number of items in a data set that is used only for scoring. It is small because a few generators
# create all items in advance.
_SIZE = 20
# Cache of the data sets that were created in this process, keyed by generator and fields.
_DATASETS: dict[str, Any] = {}


def prepare(row: Any) -> None:
    """Creates and caches the data set of the row's generator, which `score` needs."""
    name, fields = row.metadata["reasoning_gym"]
    _dataset(name, fields)


def score(answer: str, row: Any) -> float:
    """Returns reasoning-gym's score in [0, 1] without evaluating the answer as code."""
    name, fields = row.metadata["reasoning_gym"]
    entry = {"question": row.question, "answer": row.answer, "metadata": row.metadata}
    return score_answer(name, _dataset(name, fields), answer, entry)


def _dataset(name: str, fields: dict[str, Any]) -> Any:
    """Returns the data set of a generator. Data sets are cached by generator and fields."""
    key = json.dumps([name, fields], default=str)
    if key not in _DATASETS:
        _DATASETS[key] = create_dataset(name, **{"seed": 0, **fields, "size": _SIZE})
    return _DATASETS[key]
