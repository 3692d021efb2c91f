"""Near-duplicates between questions, in close to linear time.

A question is read as its words, numbers and operators, without LaTeX's brackets and dollars or
punctuation, and then as the set A of its runs of three such tokens (shingles). Two questions are
near-duplicates if their resemblance (Broder 1997) is 0.6 or more:

    resemblance(A, B) = |A & B| / |A | B|

That catches copies, rewordings of a word or two and, in short or formulaic questions, the same
question with other numbers. The paper trains and tests on sets where the last kind is common, so a
report should give its figure with and without them.
"""

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from bacr_jax.data.question_set import QuestionSet

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


def nearest(
    known: Sequence[str], questions: Sequence[str], *, threshold: float = THRESHOLD
) -> tuple[Float[np.ndarray, "n"], Int[np.ndarray, "n"]]:
    """The most similar known text of each question, where there is one over the threshold.

    Exact, though not every pair is looked at: A and B can only resemble by t if they share t |A|
    shingles, so B holds one of the |A| - ceil(t |A|) + 1 rarest shingles of A.

    Args:
      known: texts to compare with (training questions).
      questions: texts to look for.
      threshold: least resemblance t, in (0, 1].

    Returns:
      Resemblance in [t, 1], 0 where no known text comes near; and that text's place in `known`,
      -1 where there is none.
    """
    sets = [shingles(text) for text in known]
    holders: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for place, members in enumerate(sets):
        for shingle in members:
            holders[shingle].append(place)
    best = np.zeros(len(questions))
    which = np.full(len(questions), -1, np.int64)
    for row, text in enumerate(questions):
        mine = shingles(text)
        # The text breaks ties, so that no result hangs on the order of a set.
        rarest = sorted(mine, key=lambda shingle: (len(holders.get(shingle, ())), shingle))
        prefix = rarest[: len(mine) - math.ceil(threshold * len(mine) - 1e-9) + 1]
        for place in sorted({p for shingle in prefix for p in holders.get(shingle, ())}):
            shared = len(mine & sets[place])
            resemblance = shared / (len(mine) + len(sets[place]) - shared)
            if resemblance >= threshold and resemblance > best[row]:
                best[row], which[row] = resemblance, place
    return best, which


def repeated(questions: Sequence[str]) -> int:
    """How many texts were there before, letter for letter but for case, blanks and punctuation."""
    return len(questions) - len({tuple(normalise(text)) for text in questions})


def mark_duplicates(test: QuestionSet, train: QuestionSet) -> QuestionSet:
    """The test set with its near-duplicates of training questions marked."""
    resemblance, _ = nearest(train.questions, test.questions)
    return dataclasses.replace(test, duplicates=resemblance > 0, compared_with=train.name)
