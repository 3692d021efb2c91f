"""Questions apart from the others: near-duplicates of test questions, and the held-out ones."""

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
# By reading the pairs of MATH train and MATH-500: from here on they ask for the same thing.
THRESHOLD = 0.6

_TOKEN = re.compile(r"[^\W\d_]+|\d+|[^\w\s$\\{}(),.;:!?~]")


def normalise(text: str) -> list[str]:
    """Words in lower case, numbers and operators."""
    return _TOKEN.findall(text.casefold())


def shingles(text: str) -> frozenset[tuple[str, ...]]:
    """Runs of three tokens; a shorter text is one run."""
    tokens = normalise(text)
    if len(tokens) < SHINGLE:
        return frozenset([tuple(tokens)])
    return frozenset(zip(*(tokens[i:] for i in range(SHINGLE)), strict=False))


def near_duplicates(known: Sequence[str], questions: Sequence[str]) -> Bool[np.ndarray, "n"]:
    """Which questions resemble a known text by `THRESHOLD` or more.

    Exact, though not every pair is looked at: A and B can only resemble by t if they share t |A|
    shingles, so B holds one of the |A| - ceil(t |A|) + 1 rarest shingles of A.
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
    """Jaccard's: the share of their shingles that both hold."""
    shared = len(one & other)
    return shared / (len(one) + len(other) - shared)


def repeated(questions: Sequence[str]) -> int:
    """How many texts were there before, letter for letter but for case, blanks and punctuation."""
    return len(questions) - len({tuple(normalise(text)) for text in questions})


def mark_duplicates(test: QuestionSet, train: QuestionSet) -> QuestionSet:
    """The test set with its near-duplicates of training questions marked."""
    marked = near_duplicates(train.questions, test.questions)
    return dataclasses.replace(test, duplicates=marked, compared_with=train.name)


# Nine tenths of the different questions are trained on, however few there are.
LARGEST_SHARE = 10
REASON = "held out for validation"


def identity(question: str) -> str:
    """What makes two questions the same: their text without differences of blanks."""
    return " ".join(question.split())


def held_out(questions: Sequence[str], size: int) -> Bool[np.ndarray, "n"]:
    """Which questions are held out: those of the `size` different texts whose hash comes first.

    Copies of a text go together; at most a tenth of the different texts is taken (docs/data.md).
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
