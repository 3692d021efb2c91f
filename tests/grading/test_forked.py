"""Rows are scored in forks: each has a score or a fault, whatever an earlier row has done."""

import json
import os
import subprocess
import sys

import pytest

from bacr_grading import confinement

DIED = [None, "died", "the process of the scorer died"]
LATE = [None, "late", "it took longer than grading.deadline"]
HALF, ONE = [0.5, "", ""], [1.0, "", ""]
# A process of its own, since this one may have threads, which forks don't go with.
PROGRAM = """
import json, os, signal, sys, time
from bacr_grading import confinement, forked

STATE = {"patched": False}

def score(row):
    if row == "hangs":
        time.sleep(100)
    if row == "exits":
        os._exit(0)
    if row == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if row == "crashes":
        os.abort()
    if row == "writes a reply":
        os.write(3, b'["0123", 1.0, "", ""]\\n')
    if row == "writes without end":
        os.write(3, b"x" * (1 << 17))
        time.sleep(100)
    if row == "patches":
        STATE["patched"] = True
    if row == "writes a file":
        try:
            open(sys.argv[2], "w")
        except PermissionError:
            return (0.0, "", "")
    return (1.0 if STATE["patched"] else 0.5, "", "")

def scores(*rows, seconds=20.0, confined=False):
    return forked.scores_of_forks(score, rows, seconds=seconds, confined=confined)

print(json.dumps(eval(sys.argv[1])))
"""


def of(expression, file=""):
    """The value of an expression in that process."""
    command = [sys.executable, "-c", PROGRAM, expression, str(file)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_a_row_that_its_process_does_not_survive_costs_itself():
    assert of("scores('a', 'exits', 'b')") == [HALF, DIED, HALF]
    assert of("scores('is killed', 'a')") == [DIED, HALF]
    assert of("scores('a', 'crashes')") == [HALF, DIED]


def test_a_late_row_costs_itself():
    # The process that hangs would end after 100 s, and the test after 60.
    assert of("scores('a', 'hangs', 'b', seconds=0.5)") == [HALF, LATE, HALF]


@pytest.mark.parametrize("row", ["writes a reply", "writes without end"])
def test_what_a_scorer_writes_into_the_pipe_is_no_score(row):
    assert of(f"scores({row!r}, 'b', seconds=2.0)") == [DIED, HALF]


def test_the_state_of_a_batch_ends_with_it():
    assert of("[scores('patches', 'a'), scores('a')]") == [[ONE, ONE], [HALF]]


@pytest.mark.skipif(not confinement.is_available(), reason="no seccomp on this machine")
def test_forks_are_confined(tmp_path):
    file = tmp_path / "file"
    assert of("scores('writes a file', confined=True)", file) == [[0.0, "", ""]]
    assert not file.exists()
    assert of("scores('writes a file', confined=False)", file) == [HALF]
    assert file.exists()
    assert of("forked.check_confinement()") is None


def test_a_machine_that_does_not_confine_is_noticed():
    with pytest.raises(AssertionError, match="can't be sandboxed on this machine"):
        of("[setattr(confinement, 'confine', lambda: None), forked.check_confinement()]")


def test_forks_leave_no_process_and_no_descriptor():
    files = "len(os.listdir('/proc/self/fd'))"
    before, scores, after = of(f"[{files}, scores('a', 'exits', 'hangs', seconds=0.2), {files}]")
    assert scores == [HALF, DIED, LATE]
    assert before == after
    with pytest.raises(AssertionError, match="ChildProcessError"):
        of("[scores('a', 'hangs', seconds=0.2), os.waitpid(-1, os.WNOHANG)]")
