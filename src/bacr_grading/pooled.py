"""What graders with worker processes share: the workers' life, what they said, and early work."""

import abc
import collections
import contextlib
import hashlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Self

from bacr_grading.ahead import Ahead, Asked, Run, Said
from bacr_grading.judge import STRICT
from bacr_grading.pool import WorkerPool

Texts = Sequence[str | None]

_COUNTERS = (
    "timeouts",
    "worker_deaths",
    "worker_errors",
    "worker_out_of_memory",
    "worker_recycled",
    "worker_starts",
)


class PooledGrader(contextlib.AbstractContextManager["PooledGrader"], Generic[Asked, Said]):
    """Workers that end with the grader, and the newest things that they said.

    Args:
      run: has them look at things, all different. It may not hold the grader.
      lasting: whether what was said of a thing may be remembered.
    """

    def __init__(
        self,
        pool: WorkerPool,
        run: Run[Asked, Said],
        *,
        lasting: Callable[[Said], bool],
        cache_size: int,
    ):
        self._pool, self._run, self._lasting = pool, run, lasting
        self._ahead = Ahead(run)
        # From the least recently used to the newest.
        self._cache: dict[bytes, Said] = {}
        self._cache_size = cache_size
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
    def ahead(
        self,
        texts: Texts,
        references: Texts,
        *,
        mode: str = STRICT,
        questions: Texts | None = None,
    ) -> None:
        """Starts on texts that `grade` is called with next, or some of them, and returns at once.

        `grade` then waits only for what is left. It says the same; of the counters only the
        workers' own can differ. Calls may follow one another; the next `grade` ends them all. A
        request that makes no sense is refused as by `grade`.
        """

    def _begin(self, find: Callable[[], Iterable[Asked]]) -> None:
        """Has the workers start on what `_ask` is asked next; nothing is remembered sooner."""
        cache = self._cache
        self._ahead.begin(lambda: [one for one in find() if _key(one) not in cache])

    def _ask(self, asked: Sequence[Asked], poll: Callable[[], object] | None) -> dict[Asked, Said]:
        """What is said of everything asked; what is not remembered is looked at once."""
        early = self._ahead.finish(poll)
        keys = {one: _key(one) for one in asked}
        known = self._recall(keys)
        new = [one for one in keys if one not in known]
        self._counts["cache_hits"] += len(asked) - len(new)
        fresh = [one for one in new if one not in early]
        looked = self._run(fresh, poll) if fresh else {}
        # In the order in which they were asked about.
        said = {one: early[one] if one in early else looked[one] for one in new}
        known |= said
        self._remember({keys[one]: told for one, told in known.items() if self._lasting(told)})
        return known

    def _recall(self, keys: Mapping[Asked, bytes]) -> dict[Asked, Said]:
        """What is remembered of the things asked, until it is remembered anew."""
        return {one: self._cache.pop(key) for one, key in keys.items() if key in self._cache}

    def _remember(self, said: Mapping[bytes, Said]) -> None:
        """Keeps what was said as the newest, and forgets the oldest beyond the size."""
        self._cache |= said
        for key in list(self._cache)[: max(len(self._cache) - self._cache_size, 0)]:
            del self._cache[key]

    def _pool_counters(self) -> dict[str, int]:
        """timeouts; worker_starts, _deaths, _recycled, _errors, _out_of_memory."""
        return {name: self._pool.counts[name] for name in _COUNTERS}


def _key(asked: Any) -> bytes:
    """A hash: what is asked may be long, and the memory should stay small."""
    return hashlib.blake2b(repr(asked).encode("utf-8", "replace"), digest_size=16).digest()


def _end(ahead: Ahead[Any, Any], pool: WorkerPool) -> None:
    ahead.drop()
    pool.close()
