"""Displays the progress of a command: a live line in a terminal, and plain lines elsewhere."""

import atexit
import contextlib
import io
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import IO, Any, cast

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from bacr_jax.config.cli import drop_unread_output

# Minimum interval between two plain lines of a phase, in seconds. The first and the last line are
# always printed.
PLAIN_INTERVAL = 10.0
# Width of the progress bar and of log lines, in characters.
_BAR_WIDTH = 16
_LOG_WIDTH = 200


def duration(seconds: float | int) -> str:
    """Formats a duration in seconds, such as 12s, 3m04s or 2h05m."""
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded}s"
    if rounded < 3600:
        return f"{rounded // 60}m{rounded % 60:02d}s"
    return f"{rounded // 3600}h{rounded % 3600 // 60:02d}m"


def _format_value(value: Any) -> str:
    """Formats a text or a number. Numbers below 1000 have three significant digits."""
    if isinstance(value, str):
        return value
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


class Phase:
    """A phase of a command's work with a known number of steps.

    `Progress.phase` creates instances.

    Attributes:
      name: name of the phase in the output.
      printed: time of the last plain line, in seconds of the progress clock.
      unprinted: True if the phase was updated after its last printed line.
    """

    def __init__(self, progress: "Progress", name: str, total: int, first: str = ""):
        """Starts the phase and its timer.

        Args:
          progress: progress display that shows the phase.
          name: name of the phase.
          total: number of steps.
          first: description of the work before the first call of `update`.
        """
        self.name = name
        self._progress = progress
        self._total = total
        self._initial_work = first
        self._started = progress.clock()
        self._step: int | None = None
        # Step and time of the first and of the latest update.
        self._first = (0, self._started)
        self._latest = self._first
        self._values: dict[str, float | int | str] = {}
        self.printed = -float("inf")
        self.unprinted = False

    def update(self, step: int, *, total: int | None = None, **values: float | int | str) -> None:
        """Reports that `step` of `total` steps are done.

        The last step ends the phase, and its line stays on the screen.

        Args:
          step: number of finished steps.
          total: new number of steps, or None if it has not changed.
          **values: values to display as `name value`. In names, `_per_` is displayed as a slash, so
            that `tokens_per_s` becomes tokens/s.
        """
        if total is not None:
            self._total = total
        now = self._progress.clock()
        if self._step is None:
            self._first = (step, now)
        self._step = step
        self._latest = (step, now)
        self._values = values
        self._progress.show(self, ended=step >= self._total)

    @property
    def seconds(self) -> float:
        """Returns the elapsed time in seconds."""
        return self._progress.clock() - self._started

    def _remaining(self) -> float | None:
        """Estimates the remaining time in seconds from the time per step since the first update.

        The time before the first update is excluded, because the first step includes compilation.
        Returns None before the second update.
        """
        first_step, first_time = self._first
        latest_step, latest_time = self._latest
        done = latest_step - first_step
        if done <= 0:
            return None
        pace = (latest_time - first_time) / done
        since_latest = self._progress.clock() - latest_time
        return max(pace * (self._total - latest_step) - since_latest, 0.0)

    def line(self, *, bar: bool = False) -> str:
        """Returns the progress as one line with the name, steps, times and values.

        Args:
          bar: True to include a progress bar.
        """
        parts = [self.name]
        if self._step is None:
            parts.append(duration(self.seconds))
            if self._initial_work:
                parts.append(self._initial_work)
        else:
            if bar:
                share = min(self._step / max(self._total, 1), 1.0)
                filled = round(_BAR_WIDTH * share)
                parts.append("━" * filled + "╺" * (_BAR_WIDTH - filled))
            parts.append(f"{self._step}/{self._total}  {self._times()}")
        for name, value in self._values.items():
            label = name.replace("_per_", "/").replace("_", " ")
            parts.append(f"{label} {_format_value(value)}")
        return "  ".join(parts)

    def _times(self) -> str:
        """Returns the elapsed time, and the remaining time if it can be estimated."""
        latest_step, latest_time = self._latest
        if latest_step >= self._total:
            return duration(latest_time - self._started)
        remaining = self._remaining()
        elapsed = duration(self.seconds)
        return elapsed if remaining is None else f"{elapsed}, {duration(remaining)} to go"


class _Output:
    """Stream that drops its text once the pipe was closed or the terminal was disconnected.

    The command continues without a display, because its results are in files. A plain stream would
    raise an error, at which rich ends the process.
    """

    def __init__(self, stream: Any):
        self._stream = stream
        self.encoding = getattr(stream, "encoding", None)

    def isatty(self) -> bool:
        """True if the stream is a terminal. A stream without this method is none."""
        isatty = getattr(self._stream, "isatty", None)
        return isatty is not None and isatty()

    def write(self, text: str) -> None:
        """Writes a text."""
        try:
            self._stream.write(text)
        except OSError as error:
            drop_unread_output(error)

    def flush(self) -> None:
        """Flushes the stream."""
        try:
            self._stream.flush()
        except OSError as error:
            drop_unread_output(error)


class Progress(contextlib.AbstractContextManager["Progress"]):
    """Displays the progress of a command on an output stream.

    A disabled display prints nothing. Displays are disabled in all processes except process 0. If
    the stream loses its reader, such as `head`, the display prints nothing from then on.
    """

    def __init__(
        self,
        *,
        enabled: bool = True,
        stream: io.TextIOBase | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Selects live output if the stream is a terminal, and plain output otherwise.

        Args:
          enabled: False to print nothing.
          stream: output stream, or None for stdout.
          clock: returns the current time in seconds.
        """
        self.clock = clock
        self._enabled = enabled
        file: Any = stream or sys.stdout
        # Notebooks also get plain lines. Jupyter would show each line as a separate HTML table, and
        # its output stream reports that it is a terminal, although it does not move a cursor.
        is_notebook = type(file).__module__.partition(".")[0] == "ipykernel"
        self._console = Console(
            # A process without stdout prints nothing.
            file=None if file is None else cast(IO[str], _Output(file)),
            highlight=False,
            force_jupyter=False,
            force_terminal=False if is_notebook else None,
        )
        terminal = self._console.is_terminal and not self._console.is_dumb_terminal
        if not self._console.is_terminal:
            # A log file has no width, so use a large width, which keeps tables from being wrapped.
            self._console.width = _LOG_WIDTH
        self._live: Live | None = None
        self._uses_live = enabled and terminal
        self._open: list[Phase] = []
        if self._uses_live:
            # The live display hides the cursor, which must be restored however the
            # process ends.
            atexit.register(self.close)

    @property
    def width(self) -> int:
        """Returns the width of the terminal in characters, or the width of lines in a log file."""
        return self._console.width

    def __exit__(self, *error: Any) -> None:
        """Ends all open phases."""
        self.close()

    @contextlib.contextmanager
    def phase(self, name: str, total: int, first: str = "") -> Iterator[Phase]:
        """Context manager that yields a new phase. Phases can be nested.

        The last line of the phase stays on the screen.

        Args:
          name: name of the phase.
          total: number of steps.
          first: description of the work before the first step, displayed until that step.
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
        """Updates the live line of a phase, or prints a plain line every `PLAIN_INTERVAL` seconds.

        Args:
          phase: phase that was updated.
          ended: True for the last line of the phase, which is always printed.
        """
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

    def print_line(self, message: Any, *, wrap: bool = True) -> None:
        """Prints a line of text, or any object that rich can render, such as a table.

        Args:
          message: text or object. In a terminal, long text continues on further lines. Tables wrap
            their own cells.
          wrap: False to print text with its own line breaks, such as commands that users copy.
        """
        if not self._enabled:
            return
        if isinstance(message, str):
            text = self._wrapped(message) if wrap else message
            self._console.print(Text(text), soft_wrap=True)
        else:
            self._console.print(message)
        self._console.file.flush()

    def _wrapped(self, text: str) -> str:
        """Breaks a text at spaces, so that its lines fit the terminal.

        Words such as paths are not broken. Text for a log file is unchanged.
        """
        if not self._console.is_terminal:
            return text
        lines = []
        for line in text.splitlines():
            pieces = textwrap.wrap(
                line,
                self.width,
                subsequent_indent="  ",
                break_long_words=False,
                break_on_hyphens=False,
            )
            lines.extend(pieces or [""])
        return "\n".join(lines)

    def close(self) -> None:
        """Prints the last line of all open phases and restores the terminal."""
        for phase in list(self._open):
            self._end(phase)

    def _print(self, phase: Phase) -> None:
        """Prints the line of a phase."""
        phase.printed = self.clock()
        phase.unprinted = False
        self.print_line(phase.line())

    def _end(self, phase: Phase) -> None:
        """Prints the last line of a phase, unless the line was already printed."""
        if phase in self._open:
            self._open.remove(phase)
            self._print(phase)
            self._refresh()
        elif phase.unprinted:
            self._print(phase)

    def _refresh(self) -> None:
        """Starts, updates or stops the live display, depending on the open phases."""
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
        """Returns the live lines of all open phases."""
        lines = [phase.line(bar=True) for phase in list(self._open)]
        return Group(*(Text(line, no_wrap=True, overflow="ellipsis") for line in lines))
