"""One grader of several processes: each grades a share of the answers, and all hear everything."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from bacr_jax.grading import STRICT, Verdict
from bacr_jax.grading.grader import Texts, check_request
from bacr_jax.parallel import processes


def own_share(places: Int[np.ndarray, "n"]) -> Bool[np.ndarray, "n"]:
    """Which texts of a call of `SharedGrader.grade` this process grades, by their places in it."""
    index, count = processes.place_among_all()
    return places % count == index


class SharedGrader:
    """Has the interface of a grader; all processes must call it at the same places.

    Text i of a call is graded by process i modulo their number, by nobody else, since deadlines
    make two graders differ.

    Args:
      own: this process's grader.
    """

    def __init__(self, own: Any):
        self._own = own

    def grade(
        self,
        texts: Texts,
        references: Texts,
        *,
        mode: str = STRICT,
        poll: Callable[[], object] | None = None,
        questions: Texts | None = None,
    ) -> list[Verdict]:
        """As `Grader.grade`, but `poll` is not called: processes wait for different times."""
        check_request(texts, references, mode)
        index, count = processes.place_among_all()
        share = slice(index, None, count)
        asked = None if questions is None else questions[share]
        mine = self._own.grade(texts[share], references[share], mode=mode, questions=asked)
        heard = processes.texts_of_all(json.dumps([dataclasses.astuple(v) for v in mine]))
        verdicts: list[Any] = [None] * len(texts)
        for start, text in enumerate(heard):
            verdicts[start::count] = [Verdict(*fields) for fields in json.loads(text)]
        return verdicts

    def counters(self) -> Mapping[str, int]:
        """The processes' counters, added up."""
        mine = self._own.counters()
        total = processes.summed(np.array(list(mine.values()), np.int32))
        return dict(zip(mine, total.tolist(), strict=True))

    @property
    def last_failure(self) -> str:
        """What a process's verifier said last when it gave no score; of several, the first's."""
        return next(filter(None, processes.texts_of_all(self._own.last_failure)), "")
