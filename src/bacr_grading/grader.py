"""Graders for batches of model outputs.

`Grader` uses rules and math-verify, and `ExactGrader` compares strings. Both are used for training
rewards and for evaluation reports. The content of a text can neither hang a grader nor make it
raise an exception.
"""

import collections
import contextlib
from collections.abc import Iterator, Sequence

from bacr_grading.extract import after_thinking, last_tag
from bacr_grading.judge import EXTRACTED_CHARS, LENIENT, STRICT, Reading, Undecided, Verdict, judge
from bacr_grading.pool import Outcome, Poll, Program, Request, WorkerPool
from bacr_grading.pooled import PooledGrader, Texts, check_request

# Number of texts that are graded by rules between two calls of the `poll` callback.
POLL_ROWS = 256


class Grader(PooledGrader[Request, Outcome]):
    """Grades numbers, words and lists by rules, and other answers by math-verify in workers.

    An answer that cannot be decided within the deadline and the memory limit counts as incorrect. A
    grader is not thread-safe.

    Attributes:
      counted: names of the counters. "compared_modes" counts the texts graded in the lenient mode,
        and "mode_disagreements" counts those whose strict verdict is different. "internal_errors"
        counts texts on which the rules raised an exception.
    """

    counted = (
        *("graded", "correct", "no_answer", "compared_modes", "mode_disagreements"),
        *("cache_hits", "internal_errors"),
        *(f"path_{path}" for path in ("number", "string", "list", "symbolic", "guard", "none")),
    )

    def __init__(
        self,
        *,
        workers: int = 2,
        deadline: int | float = 3.0,
        memory_mb: int = 1024,
        relative_tolerance: int | float = 0.0,
    ):
        """Checks the settings. Workers are started lazily, by the first answer that needs one.

        Args:
          workers: maximum number of worker processes.
          deadline: timeout in seconds of a comparison by math-verify.
          memory_mb: maximum size of a worker's address space in MiB.
          relative_tolerance: maximum error of a number, relative to the reference. Use 0 for
            mathematics, where answers are exact.

        Raises:
          UserError: if a setting is out of range.
        """
        pool = WorkerPool(Program(), workers=workers, deadline=deadline, memory_mb=memory_mb)
        super().__init__(pool, is_lasting=_is_lasting)
        self._tolerance = float(relative_tolerance)

    def grade(
        self,
        texts: Texts,
        references: Texts,
        *,
        mode: str = STRICT,
        poll: Poll = None,
        questions: Texts | None = None,
    ) -> list[Verdict]:
        r"""Grades texts against their references.

        Args:
          texts: model outputs, including `<answer>` tags and boxes (`\boxed{...}`). None is a
            missing output.
          references: one reference for each text.
          mode: "strict" or "lenient". In the strict mode, used for rewards, only a closed answer
            tag or box counts. In the lenient mode, used for reports, prose is searched too.
          poll: called regularly. If it raises, grading is abandoned and the exception is re-raised.
          questions: ignored. Only `VerifierGrader.grade` needs questions.

        Returns:
          One verdict for each text.

        Raises:
          UserError: if the mode is unknown, the numbers of texts and references differ, or worker
            processes cannot be started on this machine. The content of a text never causes an
            exception.
        """
        check_request(texts, references, mode)
        results: list[Verdict | Undecided] = []
        requests: list[Request] = []
        for row, (text, reference) in enumerate(zip(texts, references, strict=True), start=1):
            if poll is not None and row % POLL_ROWS == 0:
                poll()
            result = _judge(text, reference, mode, self._tolerance)
            if result is None:
                # No text is known to raise an exception here. If one does, the exception is only
                # counted, because it must not end a training run.
                self._counts["internal_errors"] += 1
                result = Verdict(False, None, "none")
            elif isinstance(result, Undecided):
                requests += result.requests
            results.append(result)
        outcomes = self._run(requests, poll)
        verdicts = [
            result if isinstance(result, Verdict) else _settle(result, outcomes)
            for result in results
        ]
        self._count(verdicts, mode)
        return verdicts

    def _count(self, verdicts: list[Verdict], mode: str) -> None:
        _count_verdicts(self._counts, verdicts)
        self._counts.update(f"path_{verdict.path}" for verdict in verdicts)
        if mode == LENIENT:
            self._counts["compared_modes"] += len(verdicts)
            self._counts["mode_disagreements"] += sum(
                verdict.correct != verdict.strict for verdict in verdicts
            )

    def _requests(
        self, texts: Texts, references: Texts, mode: str, questions: Texts | None
    ) -> Iterator[Request]:
        pairs = list(zip(texts, references, strict=True))
        return _requests_of_pairs(pairs, mode, self._tolerance)


def _is_lasting(outcome: Outcome) -> bool:
    """True if an outcome may be cached.

    If the worker died, the outcome is not cached, because the worker may have been killed by the
    system and a retry may succeed. A timeout is cached, so that the same text does not cause
    another wait.
    """
    return not outcome.died


# This is a function and not a method, because the returned iterator must not keep the grader alive.
def _requests_of_pairs(
    pairs: Sequence[tuple[str | None, str | None]], mode: str, tolerance: float
) -> Iterator[Request]:
    for text, reference in pairs:
        result = _judge(text, reference, mode, tolerance)
        if isinstance(result, Undecided):
            yield from result.requests


def _judge(
    text: str | None, reference: str | None, mode: str, tolerance: float
) -> Verdict | Undecided | None:
    """Calls `judge` and returns None if it raises an exception."""
    try:
        return judge(text, reference, mode=mode, relative_tolerance=tolerance)
    except (ArithmeticError, LookupError, RecursionError, ValueError):
        return None


def _settle(undecided: Undecided, outcomes: dict[Request, Outcome]) -> Verdict:
    """Builds the verdict on an answer from the outcomes of the requests that it needed."""
    text_outcomes = [outcomes[request] for request in undecided.requests]
    compared_text = next((o.compared_text for o in text_outcomes if o.compared_text), "")
    return Verdict(
        correct=any(_is_right(reading, outcomes) for reading in undecided.readings),
        extracted=undecided.extracted or compared_text[:EXTRACTED_CHARS] or None,
        path="symbolic",
        timed_out=any(outcome.timed_out for outcome in text_outcomes),
        strict=any(_is_strictly_right(reading, outcomes) for reading in undecided.readings),
    )


def _is_right(reading: Reading, outcomes: dict[Request, Outcome]) -> bool:
    return all(outcomes[request].correct for request in reading.requests)


def _is_strictly_right(reading: Reading, outcomes: dict[Request, Outcome]) -> bool:
    return reading.strict and all(outcomes[request].whole_answer for request in reading.requests)


class ExactGrader(contextlib.AbstractContextManager["ExactGrader"]):
    """Compares answers as strings, for tasks whose answers have only one spelling.

    The stripped content of the last closed answer tag must be equal to the stripped reference. This
    class has the same interface as `Grader` but uses no processes. Both modes give the same result.
    """

    def __init__(self) -> None:
        self._counts: collections.Counter[str] = collections.Counter()

    def grade(
        self,
        texts: Texts,
        references: Texts,
        *,
        mode: str = STRICT,
        poll: Poll = None,
        questions: Texts | None = None,
    ) -> list[Verdict]:
        """Grades texts against their references like `Grader.grade`. Calls `poll` once."""
        check_request(texts, references, mode)
        if poll is not None:
            poll()
        verdicts = [_exact(text, ref) for text, ref in zip(texts, references, strict=True)]
        _count_verdicts(self._counts, verdicts)
        return verdicts

    def counters(self) -> dict[str, int]:
        """Returns the counters graded, correct and no_answer since the grader was created."""
        return {name: self._counts[name] for name in ("graded", "correct", "no_answer")}

    def close(self) -> None:
        """Does nothing. Exists for compatibility with `Grader.close`."""

    def __exit__(self, *error: object) -> None:
        self.close()


def _exact(text: str | None, reference: str | None) -> Verdict:
    """Compares the content of the last answer tag in a text with the reference."""
    no_answer = Verdict(False, None, "none")
    if not isinstance(text, str) or not isinstance(reference, str):
        return no_answer
    response = after_thinking(text)
    if response is None:
        return no_answer
    tag = last_tag(response)
    if tag is None:
        return no_answer
    correct = tag.content == reference.strip() and bool(tag.content)
    return Verdict(correct, tag.content, "string", strict=correct)


def _count_verdicts(counts: collections.Counter[str], verdicts: list[Verdict]) -> None:
    counts["graded"] += len(verdicts)
    for verdict in verdicts:
        if verdict.correct >= 1:
            counts["correct"] += 1
        if verdict.extracted is None:
            counts["no_answer"] += 1
