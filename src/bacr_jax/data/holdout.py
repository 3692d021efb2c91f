"""Training questions that are held out of training, to select a checkpoint on."""

import hashlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

# Nine tenths of the different questions are trained on, however few there are.
LARGEST_SHARE = 10
REASON = "held out for validation"


def identity(question: str) -> str:
    """What makes two questions the same: their text without differences of blanks."""
    return " ".join(question.split())


def held_out(questions: Sequence[str], size: int) -> Bool[np.ndarray, "n"]:
    """Which questions are held out: those of the `size` different texts whose hash comes first.

    A question's place depends on its text alone, not on a seed, the order or the model, so that
    all runs on a set hold out the same. Copies of a text go together.

    Args:
      questions: texts.
      size: different texts wanted; at most a tenth of those that there are is taken.
    """
    texts = [identity(question) for question in questions]
    rank = lambda text: hashlib.sha256(text.encode()).digest()
    different = sorted(set(texts), key=rank)
    chosen = set(different[: min(size, len(different) // LARGEST_SHARE)])
    return np.array([text in chosen for text in texts], bool)


def first_copies(questions: Sequence[str]) -> Int[np.ndarray, "n"]:
    """Places of the different questions, each where it comes first."""
    first: dict[str, int] = {}
    for place, question in enumerate(questions):
        first.setdefault(identity(question), place)
    return np.array(list(first.values()), np.int64)
