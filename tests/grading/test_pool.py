"""Workers are killed, replaced and never left behind."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from bacr_grading import Grader, VerifierGrader, load_verifier
from bacr_grading import pool as pool_module
from bacr_grading.pool import Program, Request, WorkerPool
from bacr_jax.errors import UserError

# Passes the guards and keeps sympy busy for much longer than the tests' deadlines.
SLOW = "\\boxed{\\int_0^1 \\frac{\\sin(\\tan x) e^{x^3} \\log(1+x^5)}{\\arctan(\\sin x)+x^7} dx}"
QUICK = ("\\boxed{\\sqrt{x}+2}", "2+\\sqrt{x}")


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_gone(pids, seconds=10.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def test_no_process_starts_before_one_is_needed():
    with Grader(workers=2) as grader:
        grader.grade(["<answer>1</answer>", "none", "\\boxed{9^{9^9}}"], ["1", "1", "1"])
        assert grader.worker_pids == []
        assert grader.counters()["worker_starts"] == 0


@pytest.mark.usefixtures("ready")
def test_a_late_worker_is_killed_and_replaced():
    with Grader(workers=1, deadline=0.5) as grader:
        assert grader.grade([QUICK[0]], [QUICK[1]])[0].correct
        before = grader.worker_pids
        start = time.monotonic()
        verdict = grader.grade([SLOW], ["1+x"])[0]
        assert time.monotonic() - start < 3
        assert verdict.timed_out
        assert not verdict.correct
        assert wait_gone(before)
        assert grader.grade(["\\boxed{x+1}"], ["1+x"])[0].correct
        assert grader.counters()["timeouts"] == 1
        assert grader.counters()["worker_starts"] == 2


@pytest.mark.usefixtures("ready")
def test_a_timeout_is_remembered():
    with Grader(workers=1, deadline=0.3) as grader:
        first = grader.grade([SLOW, SLOW], ["1+x", "1+x"])
        again = grader.grade([SLOW], ["1+x"])
        assert all(verdict.timed_out for verdict in first + again)
        assert grader.counters()["timeouts"] == 1
        assert grader.counters()["cache_hits"] == 2


@pytest.mark.usefixtures("ready")
def test_a_worker_that_dies_twice_of_an_answer_costs_one_verdict(tmp_path, monkeypatch):
    monkeypatch.setenv("BUSY_WORKERS", str(tmp_path))
    with Grader(workers=1, deadline=20) as grader:
        grader.grade([QUICK[0]], [QUICK[1]])
        killed = set()

        def kill_two():
            for pid in grader.worker_pids:
                has_begun = (tmp_path / str(pid)).exists()
                if has_begun and len(killed) < 2 and pid not in killed:
                    killed.add(pid)
                    os.kill(pid, signal.SIGKILL)

        verdicts = grader.grade([SLOW, "\\boxed{x+1}"], ["2+x", "1+x"], poll=kill_two)
        assert [verdict.correct for verdict in verdicts] == [False, True]
        assert not verdicts[0].timed_out
        assert grader.counters()["worker_deaths"] == 2


@pytest.mark.usefixtures("ready")
def test_equal_answers_are_right_whatever_becomes_of_the_worker_that_was_asked_first():
    texts = [f"\\boxed{{x+{n % 4 + 1}}}" for n in range(10_000)]
    golds = [f"{n % 4 + 1}+x" for n in range(10_000)]
    with Grader(workers=1, deadline=20) as grader:
        grader.grade([QUICK[0]], [QUICK[1]])
        (pid,) = grader.worker_pids
        # It reads nothing until it is killed, with the first question in its pipe.
        os.kill(pid, signal.SIGSTOP)
        calls = []

        def kill():
            calls.append(1)
            # The first calls come while texts are read, a call for 256 of them.
            if len(calls) > 10_000 // 256 + 1 and grader.worker_pids == [pid]:
                os.kill(pid, signal.SIGKILL)

        verdicts = grader.grade(texts, golds, poll=kill)
        assert sum(verdict.correct for verdict in verdicts) == 10_000
        assert grader.counters()["worker_deaths"] == 1


def dying_starts(folder, count):
    """A Python whose first `count` processes are killed at their start."""
    python = folder / "python"
    python.write_text(
        f"#!/bin/sh\nn=$(ls {folder} | wc -l)\ntouch {folder}/$$\n"
        f'[ "$n" -le {count} ] && kill -9 $$\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    return str(python)


@pytest.mark.usefixtures("ready")
def test_workers_that_are_killed_at_their_start_are_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr(pool_module, "START_PAUSE", 0.01)
    monkeypatch.setattr(pool_module.sys, "executable", dying_starts(tmp_path, 4))
    with Grader(workers=2) as grader:
        assert grader.grade([QUICK[0]], [QUICK[1]])[0].correct
        assert grader.counters()["worker_deaths"] == 4


def test_a_verifier_whose_workers_are_killed_at_their_start_is_loaded_all_the_same(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(pool_module, "START_PAUSE", 0.01)
    (tmp_path / "v.py").write_text("def f(question, answer, gold): return 1.0\n")
    folder = tmp_path / "starts"
    folder.mkdir()
    monkeypatch.setattr(pool_module.sys, "executable", dying_starts(folder, 4))
    with VerifierGrader(load_verifier(f"{tmp_path / 'v.py'}:f")) as grader:
        grader.check()
        assert grader.counters()["worker_deaths"] == 4
    # Those that are killed each time are an error after some tries.
    monkeypatch.setattr(pool_module.sys, "executable", dying_starts(folder, 10**6))
    with VerifierGrader(load_verifier(f"{tmp_path / 'v.py'}:f")) as grader:
        with pytest.raises(UserError, match=r"do not start \(it exited with status -9\)"):
            grader.check()
        assert grader.counters()["worker_starts"] == pool_module.PATIENT_ATTEMPTS


@pytest.mark.usefixtures("ready")
def test_answers_are_lost_and_not_the_run_while_no_worker_starts_again(monkeypatch):
    monkeypatch.setattr(pool_module, "START_PAUSE", 0.01)
    monkeypatch.setattr(pool_module, "LONGEST_PAUSE", 0.02)
    with Grader(workers=1) as grader:
        assert grader.grade([QUICK[0]], [QUICK[1]])[0].correct
        os.kill(grader.worker_pids[0], signal.SIGKILL)
        python = sys.executable
        monkeypatch.setattr(pool_module.sys, "executable", "/bin/false")
        starts = []
        for _ in range(2):
            before = grader.counters()["worker_starts"]
            assert not grader.grade(["\\boxed{x+1}"], ["1+x"])[0].correct
            starts.append(grader.counters()["worker_starts"] - before)
        # All attempts of the first call, and one of each that follows.
        assert starts == [pool_module.PATIENT_ATTEMPTS, 1]
        monkeypatch.setattr(pool_module.sys, "executable", python)
        assert grader.grade(["\\boxed{x+1}"], ["1+x"])[0].correct


@pytest.mark.usefixtures("ready")
def test_a_worker_that_died_idle_costs_nothing():
    with Grader(workers=1) as grader:
        grader.grade([QUICK[0]], [QUICK[1]])
        pids = grader.worker_pids
        os.kill(pids[0], signal.SIGKILL)
        assert wait_gone(pids)
        assert grader.grade(["\\boxed{x+1}"], ["1+x"])[0].correct


@pytest.mark.usefixtures("ready")
def test_workers_ignore_signals_meant_for_the_parent():
    with Grader(workers=1) as grader:
        grader.grade([QUICK[0]], [QUICK[1]])
        pids = grader.worker_pids
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(pids[0], number)
        assert grader.grade(["\\boxed{x+1}"], ["1+x"])[0].correct
        assert grader.worker_pids == pids


@pytest.mark.usefixtures("ready")
def test_workers_are_replaced_after_their_share_of_answers(monkeypatch):
    monkeypatch.setattr(pool_module, "RECYCLE_AFTER", 2)
    with Grader(workers=1) as grader:
        verdicts = grader.grade(
            [QUICK[0], "\\boxed{x+1}", "\\boxed{y+2}"], [QUICK[1], "1+x", "2+y"]
        )
        assert all(verdict.correct for verdict in verdicts)
        assert grader.counters()["worker_recycled"] == 1
        assert grader.counters()["worker_starts"] == 2


@pytest.mark.usefixtures("ready")
def test_close_leaves_no_process_behind():
    grader = Grader(workers=2, deadline=30)
    grader.grade([QUICK[0], "\\boxed{x+1}"], [QUICK[1], "1+x"])
    pids = grader.worker_pids
    grader.close()
    grader.close()
    assert pids
    assert not any(alive(pid) for pid in pids)
    with pytest.raises(RuntimeError, match="closed"):
        grader.grade(["\\boxed{x+2}"], ["2+x"])


@pytest.mark.usefixtures("ready")
def test_an_interruption_ends_the_work_under_way():
    class Stop(Exception):
        pass

    def stop():
        raise Stop

    with Grader(workers=1, deadline=20) as grader:
        grader.grade([QUICK[0]], [QUICK[1]])
        pids = grader.worker_pids
        with pytest.raises(Stop):
            grader.grade([SLOW], ["1+x"], poll=stop)
        assert not any(alive(pid) for pid in pids)
        assert grader.grade(["\\boxed{x+1}"], ["1+x"])[0].correct


@pytest.mark.slow
def test_workers_end_when_their_parent_is_killed():
    program = """
        import os, signal
        from bacr_grading import Grader
        grader = Grader(workers=1)
        grader.grade(["\\\\boxed{x+1}"], ["1+x"])
        print(grader.worker_pids[0], flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        timeout=60,
    )
    assert run.returncode == -signal.SIGKILL, run.stderr
    assert wait_gone([int(run.stdout)])


def test_the_package_loads_neither_the_library_nor_anything_heavy():
    program = (
        "import sys, bacr_grading.__main__; from bacr_grading import *;"
        "heavy = {'bacr_jax', 'jax', 'numpy', 'sympy', 'math_verify', 'transformers'};"
        "heavy &= set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        timeout=60,
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.slow  # three workers of math-verify are killed
def test_memory_and_time_limits_hold_without_the_guards():
    """The pool alone, fed what the guards would refuse, always answers."""
    requests = [
        Request("9^{9^{9^{9}}}", "1"),
        Request("99999999!", "1"),
        Request("(a+b+c+d+e+f+g)^{60}", "(a+b+c+d+e+f+g)^{60}+1"),
        Request("\\sqrt{12}", "2\\sqrt{3}"),
    ]
    pool = WorkerPool(Program(), workers=1, deadline=1.0, memory_mb=256)
    try:
        outcomes = pool.run(requests)
    finally:
        pool.close()
    assert [outcomes[request].correct for request in requests] == [False, False, False, True]


def test_a_machine_on_which_no_worker_starts_is_told_so(monkeypatch):
    monkeypatch.setattr(pool_module.sys, "executable", "/bin/false")
    with Grader(workers=2) as grader:
        with pytest.raises(UserError, match="worker processes do not start"):
            grader.grade([QUICK[0]], [QUICK[1]])
        with pytest.raises(UserError, match="worker processes do not start"):
            grader.grade(["\\boxed{x+1}"], ["1+x"])
        assert grader.grade(["\\boxed{1}"], ["1"])[0].correct


def test_the_newest_failed_starts_are_kept_from_call_to_call():
    pool = WorkerPool(Program(), workers=1, deadline=1.0, memory_mb=256)
    pool._started = True
    reasons = [str(index) for index in range(pool_module.PATIENT_ATTEMPTS)]
    for reason in reasons:
        pool._note_failed_start(reason)
    assert pool.run([]) == {}
    # One failure less than the maximum, so that the next call may start a worker.
    assert [failure.reason for failure in pool._failures] == reasons[1:]
    pool.close()
