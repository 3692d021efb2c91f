"""What a person sees while a run goes on: a live line on a terminal, plain lines elsewhere."""

import atexit
import contextlib
import io
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

# Seconds between plain lines of a phase, whose first and last always appear.
PLAIN_INTERVAL = 10.0
_BAR_WIDTH = 16
_LOG_WIDTH = 200


def duration(seconds: float | int) -> str:
    """12s, 3m04s, 2h05m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def _number(value: Any) -> str:
    if isinstance(value, str):
        return value
    # Small numbers are rates and losses, large ones counts.
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


class Phase:
    """A stretch of work with a number of steps; made by `Progress.phase`."""

    def __init__(self, progress: "Progress", name: str, total: int, first: str = ""):
        """Starts the clock; `first` is what is done before the first `update`."""
        self._progress, self.name, self._total, self._before = progress, name, total, first
        self._started = progress.clock()
        self._step: int | None = None
        self._first = self._latest = (0, self._started)
        self._values: dict[str, float | int | str] = {}
        # When a plain line was last printed, and whether something came since.
        self.printed, self.unprinted = -float("inf"), False

    def update(self, step: int, *, total: int | None = None, **values: float | int | str) -> None:
        """Reports that `step` of `total` steps are done, with a few numbers worth seeing.

        The step that completes the total ends the phase; its line stays. `total`: if it changed.
        Values show as `name value`; `tokens_per_s` reads tokens/s.
        """
        self._total = self._total if total is None else total
        now = self._progress.clock()
        if self._step is None:
            self._first = (step, now)
        self._step, self._latest, self._values = step, (step, now), values
        self._progress.show(self, ended=step >= self._total)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return self._progress.clock() - self._started

    def _remaining(self) -> float | None:
        """Seconds to go, by the pace since the first report: the first step compiles."""
        done = self._latest[0] - self._first[0]
        if done <= 0:
            return None
        pace = (self._latest[1] - self._first[1]) / done
        since = self._progress.clock() - self._latest[1]
        return max(pace * (self._total - self._latest[0]) - since, 0.0)

    def line(self, *, bar: bool = False) -> str:
        """The phase in one line: name, steps, time, numbers."""
        parts = [self.name]
        if self._step is not None:
            if bar:
                filled = round(_BAR_WIDTH * min(self._step / max(self._total, 1), 1.0))
                parts.append("━" * filled + "╺" * (_BAR_WIDTH - filled))
            remaining = self._remaining() if self._step < self._total else None
            to_go = "" if remaining is None else f", {duration(remaining)} to go"
            elapsed = self.seconds if self._step < self._total else self._latest[1] - self._started
            parts.append(f"{self._step}/{self._total}  {duration(elapsed)}{to_go}")
        else:
            parts += [duration(self.seconds), *filter(None, [self._before])]
        label = lambda name: name.replace("_per_", "/").replace("_", " ")
        parts += [f"{label(name)} {_number(value)}" for name, value in self._values.items()]
        return "  ".join(parts)


class Progress(contextlib.AbstractContextManager["Progress"]):
    """Progress of a run on one stream; silent when disabled (all processes but the first)."""

    def __init__(
        self,
        *,
        enabled: bool = True,
        stream: io.TextIOBase | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Chooses live or plain output by asking whether the stream is a terminal."""
        self.clock = clock
        self._enabled = enabled
        file: Any = stream or sys.stdout
        # A notebook gets the lines of a log, too: each line apart would be a table of HTML.
        self._console = Console(file=file, highlight=False, force_jupyter=False)
        terminal = self._console.is_terminal and not self._console.is_dumb_terminal
        if not self._console.is_terminal:
            # A log has no width to fold tables to.
            self._console.width = _LOG_WIDTH
        self._live: Live | None = None
        self._uses_live = enabled and terminal
        self._open: list[Phase] = []
        if self._uses_live:
            # A run that dies with its line still live would leave the cursor hidden.
            atexit.register(self.close)

    def __exit__(self, *error: Any) -> None:
        self.close()

    @contextlib.contextmanager
    def phase(self, name: str, total: int, first: str = "") -> Iterator[Phase]:
        """A named stretch of work, perhaps inside another; its last line stays on the screen.

        `first`: what is done before the first step, if that takes long enough to be said.
        """
        phase = Phase(self, name, total, first)
        if self._uses_live:
            self._open.append(phase)
            self._refresh()
        elif first and self._enabled:
            self._print(phase)
        try:
            yield phase
        finally:
            self._end(phase)

    def show(self, phase: Phase, *, ended: bool) -> None:
        """Refreshes the live line of a phase; elsewhere prints it, unless one just was."""
        if not self._enabled:
            return
        phase.unprinted = True
        due = not self._uses_live and self.clock() - phase.printed >= PLAIN_INTERVAL
        if ended or due:
            self._end(phase)
        elif self._uses_live:
            if phase not in self._open:
                self._open.append(phase)
            self._refresh()

    def say(self, message: Any) -> None:
        """Prints something that stays: a line, or anything rich can render (a table)."""
        if self._enabled:
            is_text = isinstance(message, str)
            # A long line is left to the terminal to fold; a table folds its own cells.
            self._console.print(Text(message) if is_text else message, soft_wrap=is_text)
            self._console.file.flush()

    def close(self) -> None:
        """Prints the last line of phases that did not end, and gives the terminal back."""
        for phase in list(self._open):
            self._end(phase)

    def _print(self, phase: Phase) -> None:
        phase.printed, phase.unprinted = self.clock(), False
        self.say(phase.line())

    def _end(self, phase: Phase) -> None:
        """Leaves the line of a phase on the screen, once."""
        if phase in self._open:
            self._open.remove(phase)
            self._print(phase)
            self._refresh()
        elif phase.unprinted:
            self._print(phase)

    def _refresh(self) -> None:
        if self._open and self._live is None:
            self._live = Live(
                get_renderable=self._render,
                console=self._console,
                refresh_per_second=4,
                transient=True,
            )
            self._live.start()
        elif self._live is not None and not self._open:
            self._live.stop()
            self._live = None
        elif self._live is not None:
            self._live.refresh()

    def _render(self) -> Group:
        lines = [phase.line(bar=True) for phase in list(self._open)]
        return Group(*(Text(line, no_wrap=True, overflow="ellipsis") for line in lines))
