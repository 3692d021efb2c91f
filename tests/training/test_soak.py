"""Tests that a run of hours with repeated failures has the same results, and needs no more memory.

python -m pytest -m soak tests/training/test_soak.py --soak-steps 4000 --soak-out /tmp/soak

The failures are kills, a full disk, a slow file system, a missing verifier and stops by a signal. A
leg is the time from a start of the program to its end. The same command continues an interrupted
test. With more steps, it extends a finished test.
"""

import collections
import concurrent.futures
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from bacr_jax.files import read_lines
from bacr_jax.report import pictures
from bacr_jax.report.charts import Axis, Chart, Series, colour
from whole_runs import assert_same_run

ROOT = Path(__file__).parents[2]
VERIFIER = "def check(question, answer, gold):\n    return float(answer.split() == gold.split())\n"
# Module that delays Python's calls of the file system. The contents of arrays are written without
# such calls, but their files are renamed by them.
SLOW_FILES = """
import os, time
def slow(call):
    def wait(*args, **kwargs):
        time.sleep(float(os.environ.get("SOAK_SLOW", 0)))
        return call(*args, **kwargs)
    return wait
for name in ("fsync", "rename", "replace", "mkdir", "unlink"):
    setattr(os, name, slow(getattr(os, name)))
"""
EVERY = 5
# The learning rate is constant, so that it does not change if the test is extended by more steps.
SETTINGS = (
    *("warmup.steps=300", "warmup.target_accuracy=0", "warmup.short_accuracy=0"),
    *("warmup.hold_accuracy=0", "warmup.max_hold=0", "budget.max=16", "curriculum.mu0=12"),
    *("curriculum.sigma=4", "rollout.questions=8", "train.micro_batch_rows=8", "eval.size=40"),
    *("eval.samples=0", "eval.budgets=[16]", "eval.every=100", f"checkpoint.every={EVERY}"),
    *("output.tensorboard=false", "output.report=false", "optimizer.schedule=constant"),
)
NAMES = ("undisturbed", "disturbed")
KINDS = ("killed", "full disk", "slow files", "dead verifier", "stopped")
# Minimum duration of a leg in seconds to test it for growth. In a shorter leg, the memory of the
# first steps and evaluations would hide the growth.
LONG = 1800
# Temporary needs of a step, an evaluation or a save: bytes, open file handles, and processes.
SLACK_BYTES, SLACK_HANDLES, SLACK_PROCESSES = 64 << 20, 8, 1
# Bytes that the array store does not free after a save: 1 KB for each time that one of 72 arrays is
# written or read, and a margin.
BYTES_OF_A_SAVE = 150 << 10


def offspring(pid):
    """Processes that a process has started, and those that they have."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *offspring(child)]
    return found


class Watch:
    """Memory, handles and processes of a run over time, in a file."""

    def __init__(self, path, folder):
        self.folder = folder
        # An interrupted test has already recorded rows.
        self.rows = read_lines(path) if path.exists() else []
        self.began = time.monotonic() - (self.rows[-1]["seconds"] if self.rows else 0.0)
        self.process, self._path = None, path
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self):
        while not self._end.wait(1.0):
            process = self.process
            if process is None or process.poll() is not None:
                continue
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
                row = {
                    "seconds": time.monotonic() - self.began,
                    "pid": process.pid,
                    "bytes": int(status.partition("VmRSS:")[2].split()[0]) << 10,
                    "handles": len(os.listdir(f"/proc/{process.pid}/fd")),
                    "processes": len(offspring(process.pid)),
                    "saved": newest(self.folder),
                }
            except (OSError, IndexError):
                continue  # The process has just ended.
            self.rows.append(row)
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def close(self):
        self._end.set()
        self._thread.join()


def log_of(folder):
    return folder.parent / f"{folder.name}.log"


def keep_log(process, path):
    with path.open("a") as log:
        for line in process.stdout:
            log.write(line)
            log.flush()


def start(folder, shared, steps, watch, *, slow=0.0):
    command = [sys.executable, "-m", "bacr_jax.train", "--config", "quickstart", *SETTINGS]
    # Allow another number of steps, so that a finished test can be extended.
    command += [f"train.steps={steps}", f"output.dir={folder}", "--allow-change", "train.steps"]
    command += [f"warmup.dir={shared.parent / 'warm'}", f"grader={shared / 'verify.py'}:check"]
    path = os.pathsep.join([str(shared.parent / "slow"), str(ROOT / "src")])
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": path, "SOAK_SLOW": str(slow), "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    # Write the log in this process, because the files of the child process may not grow.
    threading.Thread(target=keep_log, args=(process, log_of(folder)), daemon=True).start()
    watch.process = process
    return process


def logged(folder):
    path = folder / "metrics.jsonl"
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def until(condition, process):
    """Waits; False: the process has ended before."""
    while not condition():
        if process.poll() is not None:
            return False
        time.sleep(0.02)
    return True


def newest(folder):
    names = (path.name for path in (folder / "checkpoints").glob("*"))
    return max((int(name) for name in names if name.isdecimal()), default=0)


def last_line(folder):
    time.sleep(0.5)  # Wait until the log is written.
    return log_of(folder).read_text().strip().splitlines()[-1]


def disturb(kind, process, folder, shared):
    """One mishap, and how the process has to end of it."""
    left = offspring(process.pid)
    if kind in ("killed", "slow files"):
        process.kill()
        assert process.wait() == -signal.SIGKILL
    elif kind == "stopped":
        process.terminate()
        assert process.wait(600) in (0, 75), last_line(folder)
    elif kind == "full disk":
        # Limit the size of files, so that appending and saving fail as on a full disk.
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (512, 512))
        assert process.wait(600) == 2, last_line(folder)
        assert "can't be written" in last_line(folder)
    else:
        # Kill the grading workers right after a step, when they are idle. No verdict is lost, and
        # new workers are started.
        before = logged(folder)
        if until(lambda: logged(folder) > before, process):
            for pid in offspring(process.pid):
                os.kill(pid, signal.SIGKILL)
            before = logged(folder)
            until(lambda: logged(folder) > before + 1, process)
        process.kill()
        process.wait()
        away = shared / "verify.py"
        away.rename(shared / "away.py")
        dead = subprocess.run(process.args, capture_output=True, text=True, timeout=600)
        assert dead.returncode == 2 and "no file" in dead.stderr and "Trace" not in dead.stderr
        (shared / "away.py").rename(away)
    ended = time.monotonic() + 10
    while alive := [pid for pid in left if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < ended, f"{kind} left {alive}"
        time.sleep(0.1)


def leg(kind, folder, shared, steps, every, watch):
    """Trains for a while, to a mishap; False: to the end, before it came."""
    at = newest(folder)
    process = start(folder, shared, steps, watch, slow=0.2 * (kind == "slow files"))
    # Wait for a new checkpoint, so that every leg makes progress.
    if until(lambda: newest(folder) > at, process):
        leave = time.monotonic() + every
        if until(lambda: time.monotonic() > leave, process):
            disturb(kind, process, folder, shared)
            return True
    assert process.wait() == 0, last_line(folder)
    return False


def soaked(folder, shared, steps, every, watch):
    """A run to its end, through mishaps; how many of each there were."""
    befell = folder.parent / "mishaps.txt"
    befell.touch()
    kinds = itertools.islice(itertools.cycle(KINDS), len(befell.read_text().splitlines()), None)
    for kind in itertools.takewhile(
        lambda kind: leg(kind, folder, shared, steps, every, watch), kinds
    ):
        with befell.open("a") as file:
            file.write(f"{kind}\n")
    return dict(collections.Counter(befell.read_text().splitlines()))


def assert_no_growth(rows):
    """The second half of a leg needs no more than the first did, but for its start."""
    start, middle = len(rows) // 4, len(rows) // 2
    early, late = (
        {name: np.median([row[name] for row in part]) for name in rows[0]}
        for part in (rows[start:middle], rows[middle:])
    )
    saves = (late["saved"] - early["saved"]) / EVERY
    slack = {"bytes": SLACK_BYTES + BYTES_OF_A_SAVE * saves, "handles": SLACK_HANDLES}
    for name, more in {**slack, "processes": SLACK_PROCESSES}.items():
        assert late[name] <= early[name] + more, (name, early, late)


def draw(path, arms):
    """Memory, handles and processes over time, an arm a column; a leg is a colour."""
    shown = {
        "bytes": ("memory (GiB)", 2.0**-30),
        "handles": ("open handles", 1.0),
        "processes": ("child processes", 1.0),
    }
    charts = []
    for name, (label, scale) in shown.items():
        row = []
        for title, samples in arms.items():
            curves = []
            for index, (_, leg) in enumerate(itertools.groupby(samples, lambda one: one["pid"])):
                leg = list(leg)
                minutes = [one["seconds"] / 60 for one in leg]
                curves.append(
                    Series("", minutes, [scale * one[name] for one in leg], colour(index))
                )
            y_axis = Axis(label, low=0.0, whole=name != "bytes")
            row.append(Chart(title, curves, Axis("minutes"), y_axis))
        charts.append(row)
    pictures.save_both(path, "A colour: from one start of the program to its end", charts)


@pytest.mark.soak
def test_a_run_through_every_mishap_neither_grows_nor_ends_otherwise(tmp_path, request):
    steps = request.config.getoption("soak_steps")
    every = request.config.getoption("soak_every")
    out = Path(request.config.getoption("soak_out") or tmp_path)
    out.mkdir(parents=True, exist_ok=True)
    shared = out / "shared"
    for name in ("slow", *NAMES):
        (shared / name).mkdir(parents=True, exist_ok=True)
    (shared / "slow" / "sitecustomize.py").write_text(SLOW_FILES)
    for name in NAMES:
        (shared / name / "verify.py").write_text(VERIFIER)
    watch = Watch(out / "warm.jsonl", out / "warm")
    assert start(out / "warm", shared / NAMES[0], 1, watch).wait() == 0
    watch.close()
    figures = {"steps": steps, "seconds between mishaps": every}

    def run(name):
        folder, given, watch = out / name, shared / name, Watch(out / f"{name}.jsonl", out / name)
        try:
            if name == "undisturbed":
                process = start(folder, given, steps, watch)
                assert process.wait() == 0, last_line(folder)
            else:
                figures["mishaps"] = soaked(folder, given, steps, every, watch)
        finally:
            watch.close()
        return watch.rows

    legs, arms = [], {}
    # Train both runs at the same time, because each uses about one CPU core.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for name, rows in zip(NAMES, pool.map(run, NAMES)):
            minutes = rows[-1]["seconds"] / 60
            figures[f"minutes {name}"] = round(minutes, 1)
            title = "left alone" if name == "undisturbed" else name
            arms[f"{title}: {steps:,} steps in {minutes:.0f} minutes"] = rows
            legs.extend(list(leg) for _, leg in itertools.groupby(rows, lambda row: row["pid"]))
            for what in ("bytes", "handles", "processes"):
                figures[f"most {what} {name}"] = max(row[what] for row in rows)
    draw(out / "soak.png", arms)
    (out / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures))
    records = read_lines(out / "disturbed" / "metrics.jsonl")
    assert sum(record["process/grader_failed"] for record in records) == 0
    assert sum(figures["mishaps"].values()) > 0
    assert not [name for name in NAMES if "Traceback" in log_of(out / name).read_text()]
    assert_same_run(out / "disturbed", out / "undisturbed", steps)
    for rows in legs:
        if len(rows) >= LONG:
            assert_no_growth(rows)
    names = [path.name for path in (out / "disturbed").rglob("*")]
    assert not [name for name in names if name.endswith(".tmp") or "orbax-checkpoint-tmp" in name]
