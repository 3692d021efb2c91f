"""What graders with worker processes share: the workers' life, and a memory of what they said."""

import collections
import contextlib
import weakref
from collections.abc import Hashable, Mapping
from typing import Generic, Self, TypeVar

from bacr_jax.grading.pool import WorkerPool

Asked = TypeVar("Asked", bound=Hashable)
Said = TypeVar("Said")

_COUNTERS = (
    "timeouts",
    "worker_deaths",
    "worker_errors",
    "worker_out_of_memory",
    "worker_recycled",
    "worker_starts",
)


class PooledGrader(contextlib.AbstractContextManager["PooledGrader"], Generic[Said]):
    """Workers that end with the grader, and the newest things that they said.

    Args:
      pool: the workers, none of them started yet.
      cache_size: things remembered.
    """

    def __init__(self, pool: WorkerPool, *, cache_size: int):
        self._pool = pool
        # From the least recently used to the newest.
        self._cache: dict[bytes, Said] = {}
        self._cache_size = cache_size
        self._counts: collections.Counter[str] = collections.Counter()
        self._finalizer = weakref.finalize(self, pool.close)

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
