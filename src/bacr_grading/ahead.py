"""Work that worker processes do while whoever waits for it does something else."""

import threading
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Generic, TypeVar

Asked = TypeVar("Asked", bound=Hashable)
Said = TypeVar("Said")

# Runs requests, all different, and waits for them; the function is called meanwhile and may raise.
Run = Callable[[list[Asked], Callable[[], object] | None], Mapping[Asked, Said]]
POLL_SECONDS = 0.1


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

    def finish(self, poll: Callable[[], object] | None = None) -> dict[Asked, Said]:
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
            except _Dropped:
                pass
            except BaseException as error:  # noqa: BLE001 - `finish` raises it
                self._failures.append(error)
