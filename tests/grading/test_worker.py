"""The worker alone: its protocol, its limits and what it loads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bacr_grading import confinement, worker

QUICK = {"answer": "\\sqrt{12}", "reference": "2\\sqrt{3}"}


@pytest.fixture(scope="module")
def ask():
    """Sends a request to one worker and returns its reply; `ask.pid` is its process."""
    process = subprocess.Popen(
        [sys.executable, "-P", worker.__file__, str(1 << 30), "8"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        text=True,
    )
    assert json.loads(process.stdout.readline()) == {"ready": True}

    def ask(answer, reference, prose=False, reference_is_prose=False):
        request = {
            "answer": answer,
            "reference": reference,
            "prose": prose,
            "reference_is_prose": reference_is_prose,
        }
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    ask.pid = process.pid
    yield ask
    process.stdin.close()
    # It ends with its input.
    assert process.wait(timeout=20) == 0


def test_a_line_in_is_a_line_out(ask):
    assert ask("\\sqrt{12}", "2\\sqrt{3}") == {"correct": True, "whole": True}
    assert ask("\\sqrt{12}", "2\\sqrt{5}") == {"correct": False}


def test_running_text_is_searched_and_what_was_found_comes_back(ask):
    reply = ask("Hence we see that $x+1$ is left.", "1+x", prose=True)
    assert reply["correct"]
    assert "x+1" in reply["found"]
    assert ask("x+1", "Adding, the final answer is $1+x$.", reference_is_prose=True)["correct"]


def test_it_writes_no_file_and_leaves_no_core(ask):
    limits = Path(f"/proc/{ask.pid}/limits").read_text()
    for line in limits.splitlines():
        if line.startswith(("Max file size", "Max core file size")):
            assert line.split()[-3:-1] == ["0", "0"]
        if line.startswith("Max address space"):
            assert str(1 << 30) in line


@pytest.mark.skipif(not confinement.is_available(), reason="no seccomp on this machine")
def test_it_has_given_up_its_rights(ask):
    status = Path(f"/proc/{ask.pid}/status").read_text().splitlines()
    # Mode 2 is a filter.
    assert "Seccomp:\t2" in status and "NoNewPrivs:\t1" in status


def test_it_loads_no_jax(ask):
    maps = Path(f"/proc/{ask.pid}/maps").read_text()
    assert "python" in maps
    assert "jax" not in maps
