"""Grades batches of model outputs: `Grader` by rules and math-verify, `ExactGrader` by text.

A grader neither hangs nor fails because of a text. Used for training rewards and for reports.
"""

import collections
import contextlib
from collections.abc import Iterator, Sequence

from bacr_grading.extract import after_thinking, last_tag
from bacr_grading.judge import EXTRACTED_CHARS, LENIENT, STRICT, Reading, Undecided, Verdict, judge
from bacr_grading.pool import Outcome, Poll, Program, Request, WorkerPool
from bacr_grading.pooled import PooledGrader, Texts, check_request

# Texts between two calls of `poll`.
POLL_ROWS = 256


class Grader(PooledGrader[Request, Outcome]):
    """Grades numbers, words and lists by rules, and all else by math-verify in worker processes.

    An answer that cannot be decided within the deadline and the memory limit is incorrect. Only one
    thread may use a grader at a time.

    Attributes:
      counted: names of the counters. "compared_modes" counts texts that were graded in the lenient
        mode, and "mode_disagreements" counts such texts with another strict verdict.
        "internal_errors" counts texts on which the rules of this package failed.
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
        """Checks the settings; processes start with the first answer that needs one.

        Args:
          workers: largest number of worker processes.
          deadline: seconds for one comparison by math-verify.
          memory_mb: limit of a worker's address space in MiB.
          relative_tolerance: largest accepted error of numbers, relative to the reference; 0 for
            mathematics, where answers are exact.

        Raises:
          UserError: a setting is out of range.
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
        """Grades texts against their references.

        Args:
          texts: model outputs with their tags and boxes.
          references: one reference for each text.
          mode: "strict" (rewards: only a closed answer tag or box counts) or "lenient" (reports:
            running text is searched too).
          poll: called regularly. If it raises, the work is dropped and the exception is passed on.
          questions: ignored; `VerifierGrader.grade` needs them.

        Raises:
          UserError: the mode is unknown, a text has no reference, or worker processes cannot be
            started on this machine. The content of a text never raises an error.
        """
        check_request(texts, references, mode)
        results: list[Verdict | Undecided] = []
        requests: list[Request] = []
        for row, (text, reference) in enumerate(zip(texts, references, strict=True), start=1):
            if poll is not None and row % POLL_ROWS == 0:
                poll()
            result = _judge(text, reference, mode, self._tolerance)
            if result is None:
                # No text is known that does this. It must not end a training run, but is counted.
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

    A worker that died may have been ended from outside, so that another try can succeed. A timeout
    is cached, because a run that meets the same text again should not wait again.
    """
    return not outcome.died


# A function, because the iterator must not refer to a grader, which may be deleted before it.
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
    """Calls `judge`; returns None if it raises an error."""
    try:
        return judge(text, reference, mode=mode, relative_tolerance=tolerance)
    except (ArithmeticError, LookupError, RecursionError, ValueError):
        return None


def _settle(undecided: Undecided, outcomes: dict[Request, Outcome]) -> Verdict:
    """Returns the verdict on a text from the outcomes of its requests."""
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
    """Compares texts exactly, for tasks whose answers have one spelling.

    The stripped text of the last closed answer tag must equal the stripped reference. Has the
    interface of `Grader` without processes; both modes are the same.
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
        """Grades texts against their references, as `Grader.grade`; calls `poll` once."""
        check_request(texts, references, mode)
        if poll is not None:
            poll()
        verdicts = [_exact(text, ref) for text, ref in zip(texts, references, strict=True)]
        _count_verdicts(self._counts, verdicts)
        return verdicts

    def counters(self) -> dict[str, int]:
        """Returns the totals since the start: graded, correct, no_answer."""
        return {name: self._counts[name] for name in ("graded", "correct", "no_answer")}

    def close(self) -> None:
        """Does nothing, because there are no processes."""

    def __exit__(self, *error: object) -> None:
        self.close()


def _exact(text: str | None, reference: str | None) -> Verdict:
    """Compares the last answer tag of a text with the reference."""
    response = after_thinking(text) if isinstance(text, str) else None
    tag = None if response is None else last_tag(response)
    if tag is None or not isinstance(reference, str):
        return Verdict(False, None, "none")
    correct = tag.content == reference.strip() and bool(tag.content)
    return Verdict(correct, tag.content, "string", strict=correct)


def _count_verdicts(counts: collections.Counter[str], verdicts: list[Verdict]) -> None:
    counts["graded"] += len(verdicts)
    counts["correct"] += sum(verdict.correct >= 1 for verdict in verdicts)
    counts["no_answer"] += sum(verdict.extracted is None for verdict in verdicts)
