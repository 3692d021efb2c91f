"""Base class of the graders that use worker processes.

`Grader` and `VerifierGrader` derive from `PooledGrader`, which adds a cache of outcomes, counters
and background grading to `pool.WorkerPool`.
"""

import abc
import collections
import contextlib
import hashlib
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

from bacr_grading.judge import MODES, STRICT
from bacr_grading.pool import POLL_SECONDS, Poll, WorkerPool
from bacr_io.errors import UserError

Texts = Sequence[str | None]
RequestT = TypeVar("RequestT", bound=Hashable)
OutcomeT = TypeVar("OutcomeT")

# Type of a function that runs distinct requests and returns their outcomes. It calls the `Poll`
# callback while it waits.
Run = Callable[[list[RequestT], Poll], Mapping[RequestT, OutcomeT]]
# Maximum number of outcomes in the cache.
CACHE_SIZE = 16384

_WORKER_COUNTERS = (
    "timeouts",
    "worker_deaths",
    "worker_errors",
    "worker_out_of_memory",
    "worker_recycled",
    "worker_starts",
)


class _Dropped(Exception):
    """Raised in a background thread to cancel its work when the outcomes are no longer needed."""


class BackgroundGrader(Generic[RequestT, OutcomeT]):
    """Runs requests in background threads, of which only one is active at a time.

    This class is not thread-safe. No other code may use the worker pool between `begin` and
    `finish`.
    """

    def __init__(self, run: Run[RequestT, OutcomeT]):
        self._run = run
        self._turn = threading.Lock()
        self._dropped = threading.Event()
        self._threads: list[threading.Thread] = []
        self._outcomes: dict[RequestT, OutcomeT] = {}
        self._failures: list[BaseException] = []

    def begin(self, find_requests: Callable[[], Iterable[RequestT]]) -> None:
        """Starts a background thread that runs requests, and returns immediately.

        Requests that an earlier thread has already run are skipped.

        Args:
          find_requests: returns the requests. It is called in the background thread.
        """
        # A daemon thread, so that the interpreter can exit without waiting for it. `drop` ends the
        # thread before the workers are killed.
        thread = threading.Thread(
            target=self._work, args=(find_requests,), daemon=True, name="grading"
        )
        self._threads.append(thread)
        thread.start()

    def finish(self, poll: Poll = None) -> dict[RequestT, OutcomeT]:
        """Waits for all background threads and returns the outcomes since the last call.

        Args:
          poll: called every tenth of a second.

        Raises:
          BaseException: the first exception raised by `poll` or in a thread. The remaining work is
            canceled.
        """
        try:
            for thread in self._threads:
                while thread.is_alive():
                    thread.join(POLL_SECONDS)
                    if poll is not None:
                        poll()
            if self._failures:
                raise self._failures[0]
            return dict(self._outcomes)
        finally:
            self.drop()

    def drop(self) -> None:
        """Cancels the background work and discards its outcomes."""
        self._dropped.set()
        for thread in self._threads:
            thread.join()
        self._dropped.clear()
        self._threads.clear()
        self._outcomes.clear()
        self._failures.clear()

    def _check_dropped(self) -> None:
        if self._dropped.is_set():
            raise _Dropped

    def _work(self, find_requests: Callable[[], Iterable[RequestT]]) -> None:
        with self._turn:
            try:
                self._check_dropped()
                unique_requests = dict.fromkeys(find_requests())
                new_requests = [one for one in unique_requests if one not in self._outcomes]
                if new_requests and not self._failures:
                    self._outcomes |= self._run(new_requests, self._check_dropped)
            # `finish` re-raises the exception in the caller's thread.
            except BaseException as error:
                self._failures.append(error)


class PooledGrader(contextlib.AbstractContextManager["PooledGrader"], Generic[RequestT, OutcomeT]):
    """A grader with a pool of workers and an LRU cache of outcomes.

    The workers are killed when the grader is closed or garbage-collected.

    Attributes:
      counted: names of the grader's counters, excluding the counters of the worker pool.
    """

    counted: tuple[str, ...] = ()

    def __init__(self, pool: WorkerPool, *, is_lasting: Callable[[OutcomeT], bool]):
        """Initializes the grader, which takes ownership of the pool.

        Args:
          pool: the worker pool.
          is_lasting: returns True if an outcome may be cached.
        """
        self._pool = pool
        self._is_lasting = is_lasting
        self._background: BackgroundGrader[RequestT, OutcomeT] = BackgroundGrader(pool.run)
        # Outcomes by the hash of their request, beginning with the least recently used one.
        self._cache: dict[bytes, OutcomeT] = {}
        self._counts: collections.Counter[str] = collections.Counter()
        self._finalizer = weakref.finalize(self, _end, self._background, pool)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the running workers."""
        return self._pool.pids

    def close(self) -> None:
        """Kills the workers and waits until they have exited. Further calls do nothing."""
        self._finalizer()

    @abc.abstractmethod
    def _requests(
        self, texts: Texts, references: Texts, mode: str, questions: Texts | None
    ) -> Iterator[RequestT]:
        """Returns an iterator over the requests that are needed to grade the texts.

        The requests are computed lazily, because the iteration runs in a background thread.
        """

    def ahead(
        self, texts: Texts, references: Texts, *, mode: str = STRICT, questions: Texts | None = None
    ) -> None:
        """Starts grading texts in the background and returns immediately.

        Call this method with texts that will be passed to the next call of `grade`, which then only
        waits for the remaining work. The verdicts do not depend on this method, but the counters of
        the worker pool can. The outcomes are added to the cache only by `grade`.

        Args:
          texts: some or all texts of the next call of `grade`.
          references: one reference for each text.
          mode: the mode of the next call of `grade`.
          questions: one question for each text, required by `VerifierGrader`.

        Raises:
          UserError: if the mode is unknown, or if references or questions are missing.
        """
        check_request(texts, references, mode)
        requests = self._requests(texts, references, mode, questions)
        # The thread must not hold a reference to the grader, because it would then never be
        # garbage-collected.
        cache = self._cache

        def find_requests() -> list[RequestT]:
            return [request for request in requests if _key(request) not in cache]

        self._background.begin(find_requests)

    def _run(self, requests: Sequence[RequestT], poll: Poll) -> dict[RequestT, OutcomeT]:
        """Returns the outcome of every request, using the cache and the background results."""
        outcomes_ahead = self._background.finish(poll)
        keys = {request: _key(request) for request in requests}
        # Remove the cached outcomes of these requests. They are inserted again below, so that they
        # become the most recently used.
        outcomes = {
            request: self._cache.pop(key) for request, key in keys.items() if key in self._cache
        }
        uncached = [request for request in keys if request not in outcomes]
        self._counts["cache_hits"] += len(requests) - len(uncached)
        remaining = [request for request in uncached if request not in outcomes_ahead]
        if remaining:
            outcomes_ahead |= self._pool.run(remaining, poll)
        # Insert in the order of the requests, so that calls of `ahead` do not change the cache.
        for request in uncached:
            outcomes[request] = outcomes_ahead[request]
        for request, outcome in outcomes.items():
            if self._is_lasting(outcome):
                self._cache[keys[request]] = outcome
        excess = max(len(self._cache) - CACHE_SIZE, 0)
        for key in list(self._cache)[:excess]:
            del self._cache[key]
        return outcomes

    def counters(self) -> dict[str, int]:
        """Returns all counters since the grader was created, for metrics (docs/grading.md)."""
        grader_counts = {name: self._counts[name] for name in self.counted}
        return grader_counts | {name: self._pool.counts[name] for name in _WORKER_COUNTERS}


def check_request(texts: Texts, references: Texts, mode: str) -> None:
    """Checks the arguments of `grade`.

    Raises:
      UserError: if the mode is unknown, or if the numbers of texts and references differ.
    """
    if mode not in MODES:
        raise UserError(
            f"grade: mode={mode!r} is not a grading mode; use mode='strict' or mode='lenient'"
        )
    if len(texts) != len(references):
        raise UserError(
            f"grade: found {len(texts)} texts and {len(references)} references; pass one "
            "reference for each text"
        )


def _key(request: Hashable) -> bytes:
    """Returns a hash of a request, so that the cache does not have to store long texts."""
    return hashlib.blake2b(repr(request).encode("utf-8", "replace"), digest_size=16).digest()


def _end(background: BackgroundGrader[Any, Any], pool: WorkerPool) -> None:
    background.drop()
    pool.close()
