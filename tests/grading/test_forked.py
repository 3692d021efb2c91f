"""Rows are scored in forks: each has a score or a fault, whatever an earlier row has done."""

import os
import signal
import time

import pytest

from bacr_grading import confinement, forked

DIED = (None, "died", "the process of the scorer died")
LATE = (None, "late", "it took longer than grading.deadline")
STATE = {"patched": False}


def score(row):
    """Scores a row, or does to its process what the row is called."""
    if row == "hangs":
        time.sleep(100)
    if row == "exits":
        os._exit(0)
    if row == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if row == "crashes":
        os.abort()
    if row == "writes a reply":
        os.write(3, b'["0123", 1.0, "", ""]\n')
    if row == "writes without end":
        os.write(3, b"x" * (1 << 17))
        time.sleep(100)
    if row == "patches":
        STATE["patched"] = True
    return (1.0 if STATE["patched"] else 0.5, "", "")


def scores(*rows, seconds=20.0, confined=False):
    return forked.scores_of_forks(score, rows, seconds=seconds, confined=confined)


def test_a_row_that_its_process_does_not_survive_costs_itself():
    assert scores("a", "exits", "b") == [(0.5, "", ""), DIED, (0.5, "", "")]
    assert scores("is killed", "a") == [DIED, (0.5, "", "")]
    assert scores("a", "crashes") == [(0.5, "", ""), DIED]


def test_a_late_row_costs_itself():
    began = time.monotonic()
    assert scores("a", "hangs", "b", seconds=0.5) == [(0.5, "", ""), LATE, (0.5, "", "")]
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("row", ["writes a reply", "writes without end"])
def test_what_a_scorer_writes_into_the_pipe_is_no_score(row):
    first, second, *_ = scores(row, "b", seconds=2.0)
    assert first == DIED
    assert second == (0.5, "", "")


def test_the_state_of_a_batch_ends_with_it():
    assert scores("patches", "a") == [(1.0, "", ""), (1.0, "", "")]
    assert scores("a") == [(0.5, "", "")]
    assert STATE == {"patched": False}


@pytest.mark.skipif(not confinement.is_available(), reason="no seccomp on this machine")
def test_forks_are_confined(tmp_path):
    def write(row):
        try:
            (tmp_path / "file").write_text(row)
        except PermissionError:
            return (0.0, "", "")
        return (1.0, "", "")

    assert forked.scores_of_forks(write, ["a"], seconds=20.0, confined=True) == [(0.0, "", "")]
    forked.check_confinement()


def test_a_machine_that_does_not_confine_is_noticed(monkeypatch):
    monkeypatch.setattr(confinement, "confine", lambda: None)
    with pytest.raises(OSError, match="can't be confined"):
        forked.check_confinement()


def test_forks_leave_no_process_and_no_descriptor():
    before = os.listdir("/proc/self/fd")
    scores("a", "exits", "hangs", seconds=0.2)
    assert os.listdir("/proc/self/fd") == before
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
