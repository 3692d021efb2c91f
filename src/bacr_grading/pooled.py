"""Base class of the graders with worker processes: cache of outcomes, counters, early grading.

`Grader` and `VerifierGrader` derive from `PooledGrader`. The processes are in `pool`.
"""

import abc
import collections
import contextlib
import hashlib
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

from bacr_grading.errors import UserError
from bacr_grading.judge import MODES, STRICT
from bacr_grading.pool import POLL_SECONDS, Poll, WorkerPool

Texts = Sequence[str | None]
RequestT = TypeVar("RequestT", bound=Hashable)
OutcomeT = TypeVar("OutcomeT")

# Runs different requests and waits for their outcomes. Calls the given function during the wait,
# which may raise.
Run = Callable[[list[RequestT], Poll], Mapping[RequestT, OutcomeT]]
# Number of outcomes in the cache.
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
    """The caller does not want the outcomes of the background work any more."""


class BackgroundGrader(Generic[RequestT, OutcomeT]):
    """Runs requests in background threads, of which one works at a time.

    Only one thread may use this object, and nothing else may use the workers between `begin` and
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
        """Starts a thread that finds requests and runs each new one once; returns at once.

        Args:
          find_requests: called in the thread; returns the requests.
        """
        # A daemon, for which the interpreter does not wait. `drop` ends it before the workers end.
        thread = threading.Thread(
            target=self._work, args=(find_requests,), daemon=True, name="grading"
        )
        self._threads.append(thread)
        thread.start()

    def finish(self, poll: Poll = None) -> dict[RequestT, OutcomeT]:
        """Waits for all threads and returns the outcomes since the last call.

        Args:
          poll: called every tenth of a second.

        Raises:
          BaseException: the first exception of `poll` or of a thread. The other work is dropped.
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
        """Ends the running work and forgets its outcomes."""
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
            # `finish` raises the exception in the caller's thread.
            except BaseException as error:
                self._failures.append(error)


class PooledGrader(contextlib.AbstractContextManager["PooledGrader"], Generic[RequestT, OutcomeT]):
    """A grader with workers, which end with it, and a cache of the latest outcomes.

    Attributes:
      counted: names of the grader's counters, without those of its workers.
    """

    counted: tuple[str, ...] = ()

    def __init__(self, pool: WorkerPool, *, is_lasting: Callable[[OutcomeT], bool]):
        """Takes over a pool.

        Args:
          pool: the workers.
          is_lasting: returns True if an outcome may be cached.
        """
        self._pool = pool
        self._is_lasting = is_lasting
        self._background: BackgroundGrader[RequestT, OutcomeT] = BackgroundGrader(pool.run)
        # Outcomes by the hash of their request, the least recently used first.
        self._cache: dict[bytes, OutcomeT] = {}
        self._counts: collections.Counter[str] = collections.Counter()
        self._finalizer = weakref.finalize(self, _end, self._background, pool)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the live workers."""
        return self._pool.pids

    def close(self) -> None:
        """Kills the workers and waits for their end. Further calls do nothing."""
        self._finalizer()

    @abc.abstractmethod
    def _requests(
        self, texts: Texts, references: Texts, mode: str, questions: Texts | None
    ) -> Iterator[RequestT]:
        """Returns the requests that grading the texts needs, found during the iteration."""

    def ahead(
        self, texts: Texts, references: Texts, *, mode: str = STRICT, questions: Texts | None = None
    ) -> None:
        """Starts to grade texts of the next call of `grade` in the background; returns at once.

        `grade` waits only for the remaining work, and ends the background work of all calls. Its
        verdicts are the same. Only the counters of the workers can differ. Nothing enters the cache
        earlier.

        Args:
          texts: some or all texts of the next call of `grade`.
          references: one reference for each text.
          mode: the mode of the next call of `grade`.
          questions: one question for each text, for `VerifierGrader`.

        Raises:
          UserError: the mode is unknown, or a text has no reference or question.
        """
        check_request(texts, references, mode)
        requests = self._requests(texts, references, mode, questions)
        # A local name, because the thread must not refer to the grader, which it would keep alive.
        cache = self._cache

        def find_requests() -> list[RequestT]:
            return [request for request in requests if _key(request) not in cache]

        self._background.begin(find_requests)

    def _run(self, requests: Sequence[RequestT], poll: Poll) -> dict[RequestT, OutcomeT]:
        """Returns the outcome of every request, from the cache if it contains it."""
        outcomes_ahead = self._background.finish(poll)
        keys = {request: _key(request) for request in requests}
        # Taken out of the cache here and put back as the newest below.
        outcomes = {
            request: self._cache.pop(key) for request, key in keys.items() if key in self._cache
        }
        uncached = [request for request in keys if request not in outcomes]
        self._counts["cache_hits"] += len(requests) - len(uncached)
        remaining = [request for request in uncached if request not in outcomes_ahead]
        if remaining:
            outcomes_ahead |= self._pool.run(remaining, poll)
        # In the order of the requests, so that the order in the cache does not depend on `ahead`.
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
        """Returns the totals since the start, for metrics (docs/grading.md)."""
        grader_counts = {name: self._counts[name] for name in self.counted}
        return grader_counts | {name: self._pool.counts[name] for name in _WORKER_COUNTERS}


def check_request(texts: Texts, references: Texts, mode: str) -> None:
    """Checks the arguments of `grade`.

    Raises:
      UserError: the mode is unknown, or the numbers of texts and references differ.
    """
    if mode not in MODES:
        raise UserError(f"grade: mode={mode!r}; write mode='strict' or mode='lenient'")
    if len(texts) != len(references):
        raise UserError(
            f"grade: {len(texts)} texts and {len(references)} references; give one reference for "
            "each text"
        )


def _key(request: Hashable) -> bytes:
    """Returns a hash of a request; the cache stores it instead of a long text."""
    return hashlib.blake2b(repr(request).encode("utf-8", "replace"), digest_size=16).digest()


def _end(background: BackgroundGrader[Any, Any], pool: WorkerPool) -> None:
    background.drop()
    pool.close()
