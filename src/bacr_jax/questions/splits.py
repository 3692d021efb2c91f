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
# Minimum resemblance (Jaccard index of shingles) of near-duplicates. It was chosen by reading pairs
# of questions from MATH train and MATH-500. Above it, both questions of a pair ask for the same
# thing.
THRESHOLD = 0.6

_TOKEN = re.compile(r"[^\W\d_]+|\d+|[^\w\s$\\{}(),.;:!?~]")


def normalise(text: str) -> list[str]:
    """Returns the tokens of a text: words in lower case, numbers and operators."""
    return _TOKEN.findall(text.casefold())


def shingles(text: str) -> frozenset[tuple[str, ...]]:
    """Returns all sequences of three consecutive tokens (shingles) of a text.

    A text with fewer than three tokens is a single shingle.
    """
    tokens = normalise(text)
    if len(tokens) < SHINGLE:
        return frozenset([tuple(tokens)])
    starts = range(len(tokens) - SHINGLE + 1)
    return frozenset(tuple(tokens[start : start + SHINGLE]) for start in starts)


def near_duplicates(known: Sequence[str], questions: Sequence[str]) -> Bool[np.ndarray, "n"]:
    """Returns a mask of the questions whose resemblance to a known text is `THRESHOLD` or more.

    The resemblance is the Jaccard index of the texts' shingles (three consecutive tokens).

    Only pairs that share a rare shingle are compared, but the result is exact: if the resemblance
    of A and B is at least t, B contains at least ceil(t |A|) of the |A| shingles of A. It therefore
    contains one of the |A| - ceil(t |A|) + 1 rarest shingles of A.
    """
    known_shingles = [shingles(text) for text in known]
    # Maps each shingle (a sequence of words) to the indices of the known texts that contain it.
    texts_with: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for index, text_shingles in enumerate(known_shingles):
        for shingle in text_shingles:
            texts_with[shingle].append(index)

    def num_texts(shingle: tuple[str, ...]) -> int:
        return len(texts_with.get(shingle, ()))

    is_duplicate = np.zeros(len(questions), bool)
    for row, question in enumerate(questions):
        question_shingles = shingles(question)
        size = len(question_shingles)
        # The small number prevents a rounding error from raising the result.
        min_shared = math.ceil(THRESHOLD * size - 1e-9)
        rarest = sorted(question_shingles, key=num_texts)[: size - min_shared + 1]
        candidates = set[int]()
        for shingle in rarest:
            candidates.update(texts_with.get(shingle, ()))
        for index in candidates:
            if _resemblance(question_shingles, known_shingles[index]) >= THRESHOLD:
                is_duplicate[row] = True
                break
    return is_duplicate


def _resemblance(first: frozenset[tuple[str, ...]], second: frozenset[tuple[str, ...]]) -> float:
    """Returns the Jaccard index: shared shingles divided by the distinct shingles of both texts."""
    num_shared = len(first & second)
    num_all = len(first) + len(second) - num_shared
    return num_shared / num_all


def repeated(questions: Sequence[str]) -> int:
    """Counts repetitions of earlier texts, ignoring case, blanks and punctuation."""
    return len(questions) - len({tuple(normalise(text)) for text in questions})


def mark_duplicates(test: QuestionSet, train: QuestionSet) -> QuestionSet:
    """Returns the test set with its near-duplicates of training questions marked."""
    marked = near_duplicates(train.questions, test.questions)
    return dataclasses.replace(test, duplicates=marked, compared_with=train.name)


# Divisor of the number of distinct questions. At most a tenth of them is held out, so nine tenths
# remain for training.
LARGEST_SHARE = 10
REASON = "held out for validation"


def identity(question: str) -> str:
    """Returns the text that identifies a question: its words joined by single blanks."""
    return " ".join(question.split())


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def held_out(questions: Sequence[str], size: int) -> Bool[np.ndarray, "n"]:
    """Returns a mask of the held-out questions: the `size` distinct texts with the smallest hashes.

    All copies of a text are held out together. `size` is limited to a tenth of the distinct texts
    (docs/data.md).
    """
    texts = [identity(question) for question in questions]
    distinct = sorted(set(texts), key=_hash)
    num_held_out = min(size, len(distinct) // LARGEST_SHARE)
    held_out_texts = set(distinct[:num_held_out])
    return np.array([text in held_out_texts for text in texts], bool)


def first_copies(questions: Sequence[str]) -> Int[np.ndarray, "n"]:
    """Returns the index (int64) of the first copy of each distinct question."""
    first: dict[str, int] = {}
    for index, question in enumerate(questions):
        first.setdefault(identity(question), index)
    return np.array(list(first.values()), np.int64)
