"""Progress: a live line on terminals, few plain lines elsewhere, nothing when disabled."""

import errno
import io
import os
import pty
import subprocess
import sys

import pytest
from rich.table import Table

from bacr_jax.runs.progress import Progress, duration


class Clock:
    """A clock that tests set."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


class World:
    """Progress on a stream that is no terminal."""

    def __init__(self, clock, **kwargs):
        self.stream, self.clock = io.StringIO(), clock
        self.progress = Progress(stream=self.stream, clock=clock, **kwargs)

    @property
    def lines(self):
        return self.stream.getvalue().splitlines()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (184, "3m04s"), (7500, "2h05m"), (90000, "25h00m")],
)
def test_durations_read_well(seconds, text):
    assert duration(seconds) == text


class TestPlainLines:
    def test_the_first_and_the_last_step_and_one_line_an_interval_are_printed(self, clock):
        world = World(clock)
        with world.progress.phase("training", 100) as phase:
            for step in range(1, 101):
                clock.now += 1.0
                phase.update(step)
        steps = [line.split()[1] for line in world.lines]
        assert steps == [f"{s}/100" for s in (1, 11, 21, 31, 41, 51, 61, 71, 81, 91, 100)]

    def test_a_phase_that_stops_early_still_shows_its_last_state_once(self, clock):
        world = World(clock)
        with world.progress.phase("training", 100) as phase:
            phase.update(1)
            phase.update(2)
            phase.update(3)
        assert [line.split()[1] for line in world.lines] == ["1/100", "3/100"]

    def test_a_phase_that_fails_shows_how_far_it_came(self, clock):
        world = World(clock)
        with pytest.raises(RuntimeError), world.progress.phase("training", 5) as phase:
            phase.update(1)
            phase.update(2)
            raise RuntimeError
        assert world.lines[-1].startswith("training  2/5")

    def test_numbers_follow_their_names(self, clock):
        world = World(clock)
        with world.progress.phase("training", 2) as phase:
            phase.update(1, reward=0.51234, by_cut="0.10/0.90", tokens_per_s=999.6, kl=-0.5)
        assert world.lines == [
            "training  1/2  0s  reward 0.512  by cut 0.10/0.90  tokens/s 1,000  kl -0.5"
        ]

    def test_the_pace_leaves_out_the_first_step_which_compiles(self, clock):
        world = World(clock)
        with world.progress.phase("training", 10) as phase:
            clock.now += 60.0
            phase.update(1)
            clock.now += 12.0
            phase.update(2)
        # 8 steps at 12 s each; 60 s of compilation do not count.
        assert world.lines == ["training  1/10  1m00s", "training  2/10  1m12s, 1m36s to go"]

    def test_a_resumed_phase_does_not_count_the_steps_of_the_earlier_run(self, clock):
        world = World(clock)
        with world.progress.phase("training", 100) as phase:
            phase.update(91)
            clock.now += 20.0
            phase.update(92)
        assert world.lines[-1] == "training  92/100  20s, 2m40s to go"

    def test_the_total_can_change(self, clock):
        world = World(clock)
        with world.progress.phase("warm-up", 2) as phase:
            phase.update(1, total=3)
            phase.update(3)
        assert [line.split()[1] for line in world.lines] == ["1/3", "3/3"]

    def test_phases_can_be_nested_and_each_has_its_own_interval(self, clock):
        world = World(clock)
        with world.progress.phase("training", 9) as outer:
            outer.update(1)
            with world.progress.phase("evaluation", 2) as inner:
                inner.update(1)
                inner.update(2)
            clock.now += 11.0
            outer.update(2)
        names = [line.split()[0] for line in world.lines]
        assert names == ["training", "evaluation", "evaluation", "training"]

    def test_markup_in_a_message_is_text(self, clock):
        world = World(clock)
        world.progress.print_line("[bold]not bold[/bold] " + "x" * 300)
        assert world.lines == ["[bold]not bold[/bold] " + "x" * 300]

    def test_a_wide_table_is_not_folded_in_a_log(self, clock):
        world = World(clock)
        table = Table("a", "b")
        table.add_row("x" * 80, "y" * 80)
        world.progress.print_line(table)
        assert any("x" * 80 in line and "y" * 80 in line for line in world.lines)

    def test_no_escape_codes_outside_a_terminal(self, clock):
        world = World(clock)
        with world.progress.phase("training", 1) as phase:
            phase.update(1, reward=1.0)
        assert "\x1b" not in world.stream.getvalue()


def test_a_notebook_gets_plain_lines_although_its_stream_claims_to_be_a_terminal(clock):
    class OutStream(io.StringIO):
        def isatty(self):
            return True

    OutStream.__module__ = "ipykernel.iostream"
    stream = OutStream()
    progress = Progress(stream=stream, clock=clock)
    with progress.phase("training", 2) as phase:
        phase.update(1)
        phase.update(2)
    progress.print_line("a line of many short words " * 6)
    progress.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3 and not any("\x1b" in line or "\r" in line for line in lines)


def test_a_disabled_progress_prints_nothing(clock):
    world = World(clock, enabled=False)
    with world.progress.phase("training", 1) as phase:
        phase.update(1)
    world.progress.print_line("hello")
    world.progress.close()
    assert world.lines == []


LIVE = """
import sys, time
from bacr_jax.runs.progress import Phase, Progress
progress = Progress()
training = Phase(progress, "training", 3)
training.update(1, reward=0.25)
with progress.phase("evaluation", 2) as phase:
    phase.update(1)
    progress.print_line("a message that stays")
    phase.update(2, accuracy=0.5)
training.update(2, reward=0.5)
if sys.argv[1:] == ["fail"]:
    raise SystemExit(3)
training.update(3, reward=0.75)
print("after")
"""


LONG_LINES = """
from bacr_jax.runs.progress import Progress
progress = Progress()
path = "runs/" + "x" * 120
progress.print_line("  a sentence of many short words " * 5 + "ends in " + path)
progress.print_line("bacr train --config " + "many keys " * 12, wrap=False)
progress.print_line("one\\n\\nthree")
"""


def on_terminal(*arguments, script=LIVE):
    """Runs a script on a terminal of 100 columns; returns what it wrote and its exit code."""
    controller, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdout=terminal,
        stderr=terminal,
        stdin=terminal,
        env=environment,
    )
    os.close(terminal)
    output = b""
    while True:
        try:
            chunk = os.read(controller, 65536)
        except OSError:  # the other side is closed
            break
        if not chunk:
            break
        output += chunk
    os.close(controller)
    return output.decode(), process.wait()


def screen(output):
    """What is left on the screen: carriage returns, cursor up and line erasure carried out."""
    rows, row, column, at = [""], 0, 0, 0
    while at < len(output):
        if output.startswith("\x1b[", at):
            end = at + 2
            while not output[end].isalpha():
                end += 1
            code, argument = output[end], output[at + 2 : end]
            if code == "A":
                row -= int(argument or 1)
            elif code == "K":
                rows[row] = ""
            at = end + 1
            continue
        character = output[at]
        if character == "\r":
            column = 0
        elif character == "\n":
            row += 1
            while len(rows) <= row:
                rows.append("")
        else:
            rows[row] = rows[row].ljust(column)[:column] + character + rows[row][column + 1 :]
            column += 1
        at += 1
    return [line.rstrip() for line in rows if line.strip()]


# Displays more than a pipe or a terminal buffers, once the file `go` exists.
AFTER_THE_READER = """
import pathlib, sys, time
from bacr_io.command import entry_point
from bacr_jax.runs.progress import PLAIN_INTERVAL, Progress
folder = pathlib.Path(sys.argv[1])
def main(argv):
    times = iter(range(10**9))
    progress = Progress(clock=lambda: PLAIN_INTERVAL * next(times))
    with progress.phase("training", 300) as phase:
        phase.update(1)
        while not (folder / "go").exists():
            time.sleep(0.01)
        for step in range(2, 301):
            phase.update(step)
            progress.print_line("words " * 100)
            if step % 100 == 0:
                time.sleep(0.3)  # A live display is refreshed by a thread.
    print("printed")
    (folder / "done").touch()
sys.exit(entry_point(main)([]))
"""


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_without_a_reader_the_work_goes_on_and_ends_with_its_own_code(tmp_path, kind):
    reader, output = os.pipe() if kind == "pipe" else pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", AFTER_THE_READER, str(tmp_path)],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm-256color"},
    )
    os.close(output)
    shown = b""
    while b"1/300" not in shown:
        shown += os.read(reader, 4096)
    os.close(reader)
    (tmp_path / "go").touch()
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, b"")
    assert (tmp_path / "done").exists()


def test_a_full_disk_is_reported_and_not_taken_for_a_lost_reader():
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        Progress(stream=Full()).print_line("hello")


def test_a_stream_without_isatty_gets_plain_lines():
    """Scripts replace sys.stdout by objects that only write and flush."""

    class Log:
        text = ""

        def write(self, text):
            self.text += text

        def flush(self):
            pass

    log = Log()
    Progress(stream=log).print_line("hello")
    assert log.text == "hello\n"


def test_a_process_without_stdout_prints_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    Progress().print_line("hello")


class TestTerminal:
    def test_each_phase_leaves_one_line_and_messages_stay(self):
        output, code = on_terminal()
        left = screen(output)
        assert code == 0
        assert left[0] == "a message that stays"
        assert left[1].startswith("evaluation  2/2") and left[1].endswith("accuracy 0.5")
        assert left[2].startswith("training  3/3") and left[2].endswith("reward 0.75")
        assert left[3:] == ["after"]

    def test_the_live_line_shows_a_bar_while_it_runs(self):
        output, _ = on_terminal()
        assert "━━━━━╺╺" in output and "1/3" in output

    def test_the_cursor_comes_back_even_if_the_run_ends_midway(self):
        output, code = on_terminal("fail")
        assert code == 3
        assert output.rfind("\x1b[?25h") > output.rfind("\x1b[?25l") >= 0
        assert screen(output)[-1].startswith("training  2/3")

    def test_long_lines_are_broken_at_spaces_and_only_there(self):
        output, code = on_terminal(script=LONG_LINES)
        *sentence, path, command, first, empty, third = output.replace("\r", "").split("\n")[:-1]
        assert code == 0
        assert len(sentence) == 2 and all(len(line) <= 100 for line in sentence)
        assert sentence[0].startswith("  a sentence of") and sentence[1].startswith("  ")
        # A path and a command can be copied as one line.
        assert path.strip() == "runs/" + "x" * 120
        assert command.rstrip() == "bacr train --config " + ("many keys " * 12).rstrip()
        assert (first, empty, third) == ("one", "", "three")
