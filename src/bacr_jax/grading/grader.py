"""Grades model outputs against reference answers without ever hanging or failing."""

import collections
import functools
import hashlib
import threading
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from bacr_jax.errors import UserError
from bacr_jax.grading.judge import EXTRACTED_CHARS, Question, judge
from bacr_jax.grading.pool import Job, Outcome, Request, WorkerPool
from bacr_jax.grading.verdict import LENIENT, MODES, STRICT, Verdict

POLL_SECONDS = 0.1
# Seconds; a worker needs some hundredths for an answer that is no trouble at all.
LEAST_DEADLINE = 0.05
POLL_ROWS = 256
# Requests longer than this are remembered by their hash, so that the cache stays small.
_CACHE_KEY_CHARS = 256

_POOL_COUNTERS = (
    "timeouts",
    "worker_deaths",
    "worker_errors",
    "worker_out_of_memory",
    "worker_recycled",
    "worker_starts",
)
_COUNTERS = (
    "graded",
    "correct",
    "no_answer",
    "compared_modes",
    "mode_disagreements",
    "cache_hits",
    "internal_errors",
    *(f"path_{path}" for path in ("number", "string", "list", "symbolic", "guard", "none")),
)


def check_request(texts: Sequence[Any], golds: Sequence[Any], mode: str) -> None:
    """Refuses a request that no verdict could answer.

    Raises:
        UserError: unknown mode, or not one reference for each text.
    """
    if mode not in MODES:
        raise UserError(f"grade: mode={mode!r}; write mode='strict' or mode='lenient'")
    if len(texts) != len(golds):
        raise UserError(
            f"grade: {len(texts)} texts and {len(golds)} golds; give one reference for each text"
        )


class Pending:
    """Verdicts under way. Made by `Grader.submit`."""

    def __init__(self, grader: "Grader", verdicts: list[Verdict | None], mode: str):
        self._grader = grader
        self._verdicts = verdicts
        self._mode = mode
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._open = sum(verdict is None for verdict in verdicts)
        self._jobs: list[Job] = []
        self._counted = False
        if not self._open:
            self._done.set()

    def done(self) -> bool:
        """Whether every verdict is there."""
        return self._done.is_set()

    def result(self, poll: Callable[[], object] | None = None) -> list[Verdict]:
        """Waits for the verdicts.

        Args:
            poll: called every tenth of a second while waiting. When it raises, the rest of the
                work is cancelled and the exception goes on.

        Returns:
            One verdict for each text, in their order.

        Raises:
            UserError: worker processes cannot be started on this machine.
        """
        try:
            while not self._done.wait(POLL_SECONDS):
                if poll is not None:
                    poll()
        except BaseException:
            self.cancel()
            raise
        broken = self._grader.broken
        if broken and self._jobs:
            raise UserError(broken)
        verdicts = [verdict for verdict in self._verdicts if verdict is not None]
        if not self._counted:
            self._counted = True
            self._grader.count(verdicts, self._mode)
        return verdicts

    def cancel(self) -> None:
        """Drops the work that has not started; rows without a verdict become incorrect."""
        for job in self._jobs:
            job.cancelled = True
        with self._lock:
            self._verdicts = [
                Verdict(False, None, "none") if verdict is None else verdict
                for verdict in self._verdicts
            ]
        self._done.set()

    def ask(self, jobs: list[Job]) -> None:
        """Notes the jobs that `cancel` has to stop."""
        self._jobs = jobs

    def settle(self, row: int, verdict: Verdict) -> None:
        """Stores one verdict (also from the pool's thread)."""
        with self._lock:
            if self._verdicts[row] is not None:
                return
            self._verdicts[row] = verdict
            self._open -= 1
            finished = not self._open
        if finished:
            self._done.set()


class _Tally:
    """Collects the outcomes of one row's requests."""

    def __init__(self, pending: Pending, row: int, question: Question):
        self._pending = pending
        self._row = row
        self._question = question
        self._outcomes: list[Outcome] = []
        self._lock = threading.Lock()

    def add(self, outcome: Outcome) -> None:
        with self._lock:
            self._outcomes.append(outcome)
            if len(self._outcomes) < len(self._question.requests):
                return
        correct = any(outcome.correct for outcome in self._outcomes)
        found = next((o.found for o in self._outcomes if o.found), "")
        verdict = Verdict(
            correct,
            self._question.extracted or found[:EXTRACTED_CHARS] or None,
            "symbolic",
            any(outcome.timed_out for outcome in self._outcomes),
            strict=correct and self._question.closed,
        )
        self._pending.settle(self._row, verdict)


class Grader:
    """Grades texts: numbers, words and lists at once, all else by math-verify in worker processes.

    Processes start with the first answer that needs one. Whatever a text holds, `grade` returns a
    verdict for it: what cannot be decided within the deadline and the memory limit is incorrect.

    Args:
        workers: worker processes.
        deadline: seconds that math-verify may take for one answer.
        memory_mb: address space of a worker in MiB.
        recycle_after: answers after which a worker is replaced.
        cache_size: verdicts of math-verify that are remembered.
        relative_tolerance: largest accepted relative error between two numbers; 0 for
            mathematics, where answers are exact.

    Raises:
        UserError: an argument out of range.
    """

    def __init__(
        self,
        *,
        workers: int = 2,
        deadline: int | float = 3.0,
        memory_mb: int = 1024,
        recycle_after: int = 2000,
        cache_size: int = 16384,
        relative_tolerance: int | float = 0.0,
    ):
        for name, value, least in (
            ("workers", workers, 1),
            ("deadline", deadline, LEAST_DEADLINE),
            ("memory_mb", memory_mb, 128),
            ("recycle_after", recycle_after, 1),
            ("cache_size", cache_size, 0),
            ("relative_tolerance", relative_tolerance, 0),
        ):
            if not value >= least:
                raise UserError(f"Grader: {name}={value!r}; write a number of at least {least}")
        self._pool = WorkerPool(
            workers, deadline=deadline, memory_mb=memory_mb, recycle_after=recycle_after
        )
        self._cache: collections.OrderedDict[Any, Outcome] = collections.OrderedDict()
        self._cache_size = cache_size
        self._lock = threading.Lock()
        self._tolerance = float(relative_tolerance)
        self._counts: collections.Counter[str] = collections.Counter()
        self._finalizer = weakref.finalize(self, self._pool.close)

    def grade(
        self,
        texts: Sequence[str | None],
        golds: Sequence[str | None],
        *,
        mode: str = STRICT,
        poll: Callable[[], object] | None = None,
    ) -> list[Verdict]:
        """Grades texts against their references.

        Args:
            texts: model outputs: completions with their tags and boxes.
            golds: one reference for each text: an answer, or a solution that boxes it.
            mode: "strict" (rewards: only a closed answer tag or box counts) or "lenient"
                (reports: running text is searched too).
            poll: called regularly while this waits, to react to signals; may raise.

        Returns:
            One verdict for each text.

        Raises:
            UserError: unknown mode, not one reference for each text, or worker processes cannot be
                started on this machine. Never because of what a text holds.
        """
        return self._begin(texts, golds, mode, poll).result(poll)

    def submit(
        self, texts: Sequence[str | None], golds: Sequence[str | None], *, mode: str = STRICT
    ) -> Pending:
        """Starts grading and returns at once, so that it overlaps other work.

        Args:
            texts: as for `grade`.
            golds: as for `grade`.
            mode: as for `grade`.

        Returns:
            An object whose `result()` waits for the verdicts.

        Raises:
            UserError: as `grade`.
        """
        return self._begin(texts, golds, mode, None)

    def counters(self) -> dict[str, int]:
        """Totals since the start, for metrics.

        Returns:
            graded, correct, no_answer; path_* (verdicts by what decided them);
            compared_modes and mode_disagreements (rows graded in the lenient mode, and those that
            the strict mode would judge otherwise); cache_hits; internal_errors (texts that our
            own rules failed on); timeouts; worker_starts, _deaths, _recycled, _errors,
            _out_of_memory.
        """
        with self._lock:
            mine = {name: self._counts[name] for name in _COUNTERS}
        return mine | {name: self._pool.counts[name] for name in _POOL_COUNTERS}

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the live workers."""
        return self._pool.pids

    @property
    def broken(self) -> str | None:
        """Why workers can't be started, when they can't."""
        return self._pool.broken

    def close(self) -> None:
        """Kills the workers and waits for their end. Further calls do nothing."""
        self._finalizer()

    def __enter__(self) -> "Grader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def count(self, verdicts: list[Verdict], mode: str) -> None:
        """Adds finished verdicts to the totals."""
        paths = collections.Counter(verdict.path for verdict in verdicts)
        with self._lock:
            self._counts["graded"] += len(verdicts)
            self._counts["correct"] += sum(verdict.correct for verdict in verdicts)
            self._counts["no_answer"] += sum(verdict.extracted is None for verdict in verdicts)
            for path, number in paths.items():
                self._counts[f"path_{path}"] += number
            if mode == LENIENT:
                self._counts["compared_modes"] += len(verdicts)
                self._counts["mode_disagreements"] += sum(
                    verdict.correct != verdict.strict for verdict in verdicts
                )

    def _begin(
        self,
        texts: Sequence[str | None],
        golds: Sequence[str | None],
        mode: str,
        poll: Callable[[], object] | None,
    ) -> Pending:
        check_request(texts, golds, mode)
        verdicts: list[Verdict | None] = []
        questions: list[tuple[int, Question]] = []
        for row, (text, gold) in enumerate(zip(texts, golds, strict=True)):
            if poll is not None and row % POLL_ROWS == POLL_ROWS - 1:
                poll()
            answer = self._judge(text, gold, mode)
            if isinstance(answer, Question):
                questions.append((row, answer))
                verdicts.append(None)
            else:
                verdicts.append(answer)
        pending = Pending(self, verdicts, mode)
        if questions:
            self._ask(pending, questions)
        return pending

    def _judge(self, text: str | None, gold: str | None, mode: str) -> Verdict | Question:
        try:
            return judge(text, gold, mode=mode, relative_tolerance=self._tolerance)
        except (ArithmeticError, LookupError, RecursionError, ValueError):
            # None is known. A text that finds one must not end a training run, but is counted.
            with self._lock:
                self._counts["internal_errors"] += 1
            return Verdict(False, None, "none")

    def _ask(self, pending: Pending, questions: list[tuple[int, Question]]) -> None:
        """Sends the requests that are not remembered, each once however many rows need it."""
        waiting: dict[Request, list[_Tally]] = {}
        hits = 0
        for row, question in questions:
            tally = _Tally(pending, row, question)
            for request in question.requests:
                outcome = self._recall(request)
                if outcome is not None:
                    tally.add(outcome)
                else:
                    waiting.setdefault(request, []).append(tally)
                hits += outcome is not None or len(waiting[request]) > 1
        with self._lock:
            self._counts["cache_hits"] += hits
        jobs = [
            Job(request, functools.partial(self._finish, request, tallies))
            for request, tallies in waiting.items()
        ]
        pending.ask(jobs)
        if jobs:
            self._pool.submit(jobs)

    def _finish(self, request: Request, tallies: list[_Tally], outcome: Outcome) -> None:
        # A worker that died may have been ended from outside, so that is worth another try. A
        # timeout is remembered: a run that meets the same text again should not wait again.
        if not outcome.died and self._cache_size:
            key = _cache_key(request)
            with self._lock:
                self._cache[key] = outcome
                while len(self._cache) > self._cache_size:
                    self._cache.popitem(last=False)
        for tally in tallies:
            tally.add(outcome)

    def _recall(self, request: Request) -> Outcome | None:
        key = _cache_key(request)
        with self._lock:
            outcome = self._cache.get(key)
            if outcome is not None:
                self._cache.move_to_end(key)
        return outcome


def _cache_key(request: Request) -> object:
    if len(request.pred) + len(request.gold) <= _CACHE_KEY_CHARS:
        return request
    return hashlib.blake2b(repr(request).encode("utf-8", "replace"), digest_size=16).digest()
