"""Grades model outputs against reference answers without ever hanging or failing."""

import collections
import contextlib
from collections.abc import Iterator

from bacr_grading.extract import after_thinking, last_tag
from bacr_grading.judge import EXTRACTED_CHARS, LENIENT, STRICT, Undecided, Verdict, judge
from bacr_grading.pool import Outcome, Poll, Program, Request, WorkerPool
from bacr_grading.pooled import PooledGrader, Texts, check_request

POLL_ROWS = 256


class Grader(PooledGrader[Request, Outcome]):
    """Grades texts: numbers, words and lists at once, all else by math-verify in worker processes.

    What can't be decided within the deadline and the memory limit is incorrect. For one thread at
    a time.

    Args:
      relative_tolerance: largest accepted relative error between two numbers; 0 for mathematics,
        where answers are exact.

    UserError: an argument out of range.
    """

    # Compared modes are rows graded in the lenient one, disagreements those that the strict one
    # would judge otherwise; internal errors are texts that our own rules failed on.
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
        pool = WorkerPool(Program(), workers=workers, deadline=deadline, memory_mb=memory_mb)
        # A worker that died may have been ended from outside, so that is worth another try. A
        # timeout is remembered: a run that meets the same text again should not wait again.
        super().__init__(pool, lasting=lambda outcome: not outcome.died)
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
          texts: model outputs: completions with their tags and boxes.
          mode: "strict" (rewards: only a closed answer tag or box counts) or "lenient" (reports:
            running text is searched too).
          poll: when it raises, the work is dropped and the exception goes on.

        UserError: unknown mode, not one reference for each text, or worker processes cannot be
          started on this machine. Never because of what a text holds.
        """
        check_request(texts, references, mode)
        judged: list[Verdict | Undecided] = []
        asked: list[Request] = []
        for row, (text, reference) in enumerate(zip(texts, references, strict=True), start=1):
            if poll is not None and row % POLL_ROWS == 0:
                poll()
            found = _judge(text, reference, mode, self._tolerance)
            # None is known. A text that finds one must not end a training run, but is counted.
            self._counts["internal_errors"] += found is None
            judged.append(found or Verdict(False, None, "none"))
            if isinstance(judged[-1], Undecided):
                asked += judged[-1].requests
        outcomes = self._ask(asked, poll)
        verdicts = [j if isinstance(j, Verdict) else _settle(j, outcomes) for j in judged]
        _count(self._counts, verdicts)
        self._counts.update(f"path_{verdict.path}" for verdict in verdicts)
        if mode == LENIENT:
            self._counts["compared_modes"] += len(verdicts)
            self._counts["mode_disagreements"] += sum(v.correct != v.strict for v in verdicts)
        return verdicts

    def _asked(
        self, texts: Texts, references: Texts, mode: str, questions: Texts | None
    ) -> Iterator[Request]:
        # What is iterated over later holds no grader, which may be gone by then.
        pairs, tolerance = list(zip(texts, references, strict=True)), self._tolerance
        judged = (_judge(text, reference, mode, tolerance) for text, reference in pairs)
        return (request for j in judged if isinstance(j, Undecided) for request in j.requests)


class ExactGrader(contextlib.AbstractContextManager["ExactGrader"]):
    """Exact match, for tasks whose answers have one spelling: no parsing and no processes.

    Compares the text of the last closed answer tag, stripped, with the stripped reference. Has the
    interface of `Grader`; both modes mean the same.
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
        """As `Grader.grade`; `poll` is called once."""
        check_request(texts, references, mode)
        if poll is not None:
            poll()
        verdicts = [_exact(text, ref) for text, ref in zip(texts, references, strict=True)]
        _count(self._counts, verdicts)
        return verdicts

    def counters(self) -> dict[str, int]:
        """Totals since the start: graded, correct, no_answer."""
        return {name: self._counts[name] for name in ("graded", "correct", "no_answer")}

    def close(self) -> None:
        """Does nothing: there is nothing to release."""

    def __exit__(self, *error: object) -> None:
        self.close()


def _judge(
    text: str | None, reference: str | None, mode: str, tolerance: float
) -> Verdict | Undecided | None:
    """What our own rules say; None: they failed."""
    try:
        return judge(text, reference, mode=mode, relative_tolerance=tolerance)
    except (ArithmeticError, LookupError, RecursionError, ValueError):
        return None


def _settle(undecided: Undecided, outcomes: dict[Request, Outcome]) -> Verdict:
    """The verdict on a text when math-verify has spoken."""
    own = [outcomes[request] for request in undecided.requests]
    found = next((outcome.found for outcome in own if outcome.found), "")
    return Verdict(
        any(all(outcomes[r].correct for r in reading.requests) for reading in undecided.readings),
        undecided.extracted or found[:EXTRACTED_CHARS] or None,
        "symbolic",
        any(outcome.timed_out for outcome in own),
        strict=any(
            reading.strict and all(outcomes[request].whole for request in reading.requests)
            for reading in undecided.readings
        ),
    )


def _exact(text: str | None, reference: str | None) -> Verdict:
    said = after_thinking(text) if isinstance(text, str) else None
    tag = None if said is None else last_tag(said)
    if tag is None or not isinstance(reference, str):
        return Verdict(False, None, "none")
    correct = tag.content == reference.strip() and bool(tag.content)
    return Verdict(correct, tag.content, "string", strict=correct)


def _count(counts: collections.Counter[str], verdicts: list[Verdict]) -> None:
    counts["graded"] += len(verdicts)
    counts["correct"] += sum(verdict.correct >= 1 for verdict in verdicts)
    counts["no_answer"] += sum(verdict.extracted is None for verdict in verdicts)
