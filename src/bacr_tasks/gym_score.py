"""The script that grades answers to reasoning-gym's questions; it runs in a worker process.

`gym` names it as SCORE. The grader calls `prepare`, then `score`.
"""

import json
from typing import Any

from reasoning_gym.factory import create_dataset

from bacr_tasks.gym_safe import score_answer

# Items of a data set that only scores. A few generators make all items at the start.
_SIZE = 20
_DATASETS: dict[str, Any] = {}


def prepare(row: Any) -> None:
    """Makes the data set of a row's generator."""
    name, fields = row.metadata["reasoning_gym"]
    _dataset(name, fields)


def score(answer: str, row: Any) -> float:
    """Returns reasoning-gym's score of an answer in [0, 1], without evaluating it as code."""
    name, fields = row.metadata["reasoning_gym"]
    entry = {"question": row.question, "answer": row.answer, "metadata": row.metadata}
    return score_answer(name, _dataset(name, fields), answer, entry)


def _dataset(name: str, fields: dict[str, Any]) -> Any:
    """Returns a generator's data set; it is made once for each combination of fields."""
    key = json.dumps([name, fields], default=str)
    if key not in _DATASETS:
        _DATASETS[key] = create_dataset(name, **{"seed": 0, **fields, "size": _SIZE})
    return _DATASETS[key]
