"""What graders with worker processes share: the workers' life, what they said, and early work."""

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
Asked = TypeVar("Asked", bound=Hashable)
Said = TypeVar("Said")

# Runs requests, all different, and waits for them; the function is called meanwhile and may raise.
Run = Callable[[list[Asked], Poll], Mapping[Asked, Said]]
# What is remembered of what was said.
CACHE_SIZE = 16384

_COUNTERS = (
    "timeouts",
    "worker_deaths",
    "worker_errors",
    "worker_out_of_memory",
    "worker_recycled",
    "worker_starts",
)


class _Dropped(Exception):
    """The work is not wanted any more."""


class Ahead(Generic[Asked, Said]):
    """Requests that are run in threads beside the caller's, one thread at a time.

    For one caller, who lets nothing else use the workers between `begin` and `finish`.
    """

    def __init__(self, run: Run[Asked, Said]):
        self._run = run
        self._turn = threading.Lock()
        self._dropped = threading.Event()
        self._threads: list[threading.Thread] = []
        self._said: dict[Asked, Said] = {}
        self._failures: list[BaseException] = []

    def begin(self, find: Callable[[], Iterable[Asked]]) -> None:
        """Has a thread run what `find`, called there, gives, but nothing twice; returns at once."""
        # The interpreter does not wait for it: `drop` is for whoever ends the workers.
        thread = threading.Thread(target=self._work, args=(find,), daemon=True, name="grading")
        self._threads.append(thread)
        thread.start()

    def finish(self, poll: Poll = None) -> dict[Asked, Said]:
        """Waits for all that was begun; what was said since the last call.

        `poll` is called every tenth of a second. What it raises, or what running raised first, goes
        on; the rest is dropped.
        """
        try:
            for thread in self._threads:
                while thread.is_alive():
                    thread.join(POLL_SECONDS)
                    if poll is not None:
                        poll()
            if self._failures:
                raise self._failures[0]
            return dict(self._said)
        finally:
            self.drop()

    def drop(self) -> None:
        """Ends the work under way and forgets what was said."""
        self._dropped.set()
        for thread in self._threads:
            thread.join()
        self._dropped.clear()
        self._threads.clear()
        self._said.clear()
        self._failures.clear()

    def _check(self) -> None:
        if self._dropped.is_set():
            raise _Dropped

    def _work(self, find: Callable[[], Iterable[Asked]]) -> None:
        with self._turn:
            try:
                self._check()
                fresh = [one for one in dict.fromkeys(find()) if one not in self._said]
                if fresh and not self._failures:
                    self._said |= self._run(fresh, self._check)
            # `finish` raises it, `drop` forgets it.
            except BaseException as error:
                self._failures.append(error)


class PooledGrader(contextlib.AbstractContextManager["PooledGrader"], Generic[Asked, Said]):
    """Workers that end with the grader, and the newest things that they said.

    Args:
      lasting: whether what was said of a thing may be remembered.

    Attributes:
      counted: what a grader counts, beside the lives of its workers.
    """

    counted: tuple[str, ...] = ()

    def __init__(self, pool: WorkerPool, *, lasting: Callable[[Said], bool]):
        self._pool, self._lasting = pool, lasting
        self._ahead: Ahead[Asked, Said] = Ahead(pool.run)
        # From the least recently used to the newest.
        self._cache: dict[bytes, Said] = {}
        self._counts: collections.Counter[str] = collections.Counter()
        self._finalizer = weakref.finalize(self, _end, self._ahead, pool)

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
    def _asked(
        self, texts: Texts, references: Texts, mode: str, questions: Texts | None
    ) -> Iterator[Asked]:
        """All that the workers will be asked of texts, found out when it is iterated over."""

    def ahead(
        self, texts: Texts, references: Texts, *, mode: str = STRICT, questions: Texts | None = None
    ) -> None:
        """Starts on texts that `grade` is called with next, or some of them, and returns at once.

        `grade` then waits only for what is left. It says the same; of the counters only the
        workers' own can differ. Calls may follow one another; the next `grade` ends them all. A
        request that makes no sense is refused as by `grade`. Nothing is remembered sooner.
        """
        check_request(texts, references, mode)
        asked, cache = self._asked(texts, references, mode, questions), self._cache
        self._ahead.begin(lambda: [one for one in asked if _key(one) not in cache])

    def _ask(self, asked: Sequence[Asked], poll: Poll) -> dict[Asked, Said]:
        """What is said of everything asked; what is not remembered is looked at once."""
        early = self._ahead.finish(poll)
        keys = {one: _key(one) for one in asked}
        # What is remembered of them, until it is remembered anew.
        known = {one: self._cache.pop(key) for one, key in keys.items() if key in self._cache}
        new = [one for one in keys if one not in known]
        self._counts["cache_hits"] += len(asked) - len(new)
        fresh = [one for one in new if one not in early]
        if fresh:
            early |= self._pool.run(fresh, poll)
        # In the order in which they were asked about.
        known |= {one: early[one] for one in new}
        # The newest last; the oldest beyond the size are forgotten.
        self._cache |= {keys[one]: told for one, told in known.items() if self._lasting(told)}
        for key in list(self._cache)[: max(len(self._cache) - CACHE_SIZE, 0)]:
            del self._cache[key]
        return known

    def counters(self) -> dict[str, int]:
        """Totals since the start, for metrics (docs/grading.md)."""
        own = {name: self._counts[name] for name in self.counted}
        return own | {name: self._pool.counts[name] for name in _COUNTERS}


def check_request(texts: Texts, references: Texts, mode: str) -> None:
    """Refuses an unknown mode, and texts without a reference each, by a UserError."""
    if mode not in MODES:
        raise UserError(f"grade: mode={mode!r}; write mode='strict' or mode='lenient'")
    if len(texts) != len(references):
        raise UserError(
            f"grade: {len(texts)} texts and {len(references)} references; give one reference for "
            "each text"
        )


def _key(asked: Any) -> bytes:
    """A hash: what is asked may be long, and the memory should stay small."""
    return hashlib.blake2b(repr(asked).encode("utf-8", "replace"), digest_size=16).digest()


def _end(ahead: Ahead[Any, Any], pool: WorkerPool) -> None:
    ahead.drop()
    pool.close()
