"""What a person sees while a run goes on: a live line on a terminal, plain lines elsewhere."""

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

# Seconds between plain lines when the output is not a terminal.
PLAIN_INTERVAL = 10.0


def duration(seconds: float) -> str:
    """12s, 3m04s, 2h05m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def _number(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


class Phase:
    """A stretch of work with a number of steps; made by `Progress.phase`."""

    def __init__(self, progress: "Progress", name: str, total: int):
        """Starts the clock."""
        self._progress, self.name, self._total = progress, name, total
        self._started, self._line = time.perf_counter(), ""
        self._first: tuple[int, float] | None = None

    def update(self, step: int, *, total: int | None = None, **values: float | str) -> None:
        """Reports that `step` of `total` steps are done, with a few numbers worth seeing."""
        self._total = self._total if total is None else total
        now = time.perf_counter()
        # The first step compiles; the pace is taken from the second report on.
        if self._first is None:
            self._first = (step, now)
            since, done = self._started, step
        else:
            since, done = self._first[1], step - self._first[0]
        remaining = (now - since) / max(done, 1) * (self._total - step)
        numbers = "  ".join(
            f"{name.replace('_', ' ')} {_number(value)}" for name, value in values.items()
        )
        self._line = (
            f"{self.name} {step}/{self._total}  {duration(now - self._started)} elapsed, "
            f"{duration(max(remaining, 0.0))} to go  {numbers}"
        ).rstrip()
        self._progress.show(self._line, last=step >= self._total)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._started


class Progress:
    """Progress of a run on one stream; silent when disabled (all processes but the first)."""

    def __init__(self, *, enabled: bool = True, stream: TextIO | None = None):
        """Chooses live or plain output by asking whether the stream is a terminal."""
        self._enabled = enabled
        self._console = Console(file=stream or sys.stdout, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._shown = -float("inf")

    @contextlib.contextmanager
    def phase(self, name: str, total: int) -> Iterator[Phase]:
        """A named stretch of work; its last state stays on the screen."""
        phase = Phase(self, name, total)
        if not (self._enabled and self._console.is_terminal):
            yield phase
            return
        with Live(Text(name), console=self._console, refresh_per_second=4) as live:
            self._live = live
            try:
                yield phase
            finally:
                self._live = None

    def show(self, line: str, *, last: bool) -> None:
        """Replaces the live line; elsewhere prints, at most every `PLAIN_INTERVAL` seconds."""
        if not self._enabled:
            return
        if self._live is not None:
            self._live.update(Text(line))
            return
        now = time.perf_counter()
        if last or now - self._shown >= PLAIN_INTERVAL:
            self._shown = now
            self.say(line)

    def say(self, message: Any) -> None:
        """Prints something that stays: a line, or anything rich can render (a table)."""
        if self._enabled:
            self._console.print(message)
            self._console.file.flush()
