"""Scores an answer by the scorer of the generator that made its question; run in a worker."""

import json
from typing import Any

from reasoning_gym.factory import create_dataset

_DATASETS: dict[str, Any] = {}


def score(answer: str, row: Any) -> float:
    """What reasoning-gym gives an answer, in [0, 1]."""
    name, fields = row.metadata["reasoning_gym"]
    key = json.dumps([name, fields], default=str)
    if key not in _DATASETS:
        # A few make all of their items at the start.
        _DATASETS[key] = create_dataset(name, **{"seed": 0, **fields, "size": 20})
    entry = {"question": row.question, "answer": row.answer, "metadata": row.metadata}
    return _DATASETS[key].score_answer(answer, entry)
