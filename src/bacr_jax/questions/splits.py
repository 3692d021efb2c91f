"""Finds near-duplicates of training questions, and chooses held-out questions."""

import dataclasses
import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

from bacr_jax.questions.question_set import QuestionSet

SHINGLE = 3
# Chosen by reading pairs of MATH train and MATH-500: above it, both ask for the same thing.
THRESHOLD = 0.6

_TOKEN = re.compile(r"[^\W\d_]+|\d+|[^\w\s$\\{}(),.;:!?~]")


def normalise(text: str) -> list[str]:
    """Returns the tokens of a text: words in lower case, numbers and operators."""
    return _TOKEN.findall(text.casefold())


def shingles(text: str) -> frozenset[tuple[str, ...]]:
    """Returns all runs of three tokens; a shorter text is one run."""
    tokens = normalise(text)
    if len(tokens) < SHINGLE:
        return frozenset([tuple(tokens)])
    return frozenset(zip(*(tokens[i:] for i in range(SHINGLE)), strict=False))


def near_duplicates(known: Sequence[str], questions: Sequence[str]) -> Bool[np.ndarray, "n"]:
    """Returns True for each question whose resemblance to a known text is `THRESHOLD` or more.

    The result is exact, although not every pair is compared: if the resemblance of A and B is at
    least t, they share t |A| shingles, so B has one of the |A| - ceil(t |A|) + 1 rarest shingles
    of A.
    """
    sets = [shingles(text) for text in known]
    holders: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for place, members in enumerate(sets):
        for shingle in members:
            holders[shingle].append(place)
    found = np.zeros(len(questions), bool)
    for row, text in enumerate(questions):
        mine = shingles(text)
        rarest = sorted(mine, key=lambda shingle: len(holders.get(shingle, ())))
        prefix = rarest[: len(mine) - math.ceil(THRESHOLD * len(mine) - 1e-9) + 1]
        near = {place for shingle in prefix for place in holders.get(shingle, ())}
        found[row] = any(_resemblance(mine, sets[place]) >= THRESHOLD for place in near)
    return found


def _resemblance(one: frozenset[tuple[str, ...]], other: frozenset[tuple[str, ...]]) -> float:
    """Returns the Jaccard index: shared shingles divided by all shingles of both texts."""
    shared = len(one & other)
    return shared / (len(one) + len(other) - shared)


def repeated(questions: Sequence[str]) -> int:
    """Counts repetitions of earlier texts, ignoring case, blanks and punctuation."""
    return len(questions) - len({tuple(normalise(text)) for text in questions})


def mark_duplicates(test: QuestionSet, train: QuestionSet) -> QuestionSet:
    """Returns the test set with its near-duplicates of training questions marked."""
    marked = near_duplicates(train.questions, test.questions)
    return dataclasses.replace(test, duplicates=marked, compared_with=train.name)


# At most one in this many distinct questions is held out, so that nine tenths are trained on.
LARGEST_SHARE = 10
REASON = "held out for validation"


def identity(question: str) -> str:
    """Returns the text that identifies a question: its words joined by single blanks."""
    return " ".join(question.split())


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def held_out(questions: Sequence[str], size: int) -> Bool[np.ndarray, "n"]:
    """Returns True for each held-out question: the `size` distinct texts with the smallest hashes.

    All copies of a text are held out together. At most a tenth of the distinct texts is held out
    (docs/data.md).
    """
    texts = [identity(question) for question in questions]
    distinct = sorted(set(texts), key=_hash)
    chosen = set(distinct[: min(size, len(distinct) // LARGEST_SHARE)])
    return np.array([text in chosen for text in texts], bool)


def first_copies(questions: Sequence[str]) -> Int[np.ndarray, "n"]:
    """Returns the index (int64) of the first copy of each distinct question."""
    first: dict[str, int] = {}
    for place, question in enumerate(questions):
        first.setdefault(identity(question), place)
    return np.array(list(first.values()), np.int64)
