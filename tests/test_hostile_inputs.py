"""Hostile inputs of every command: refused in one line, exit code 2, in ten seconds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hostile_tables
import hostile_world


def test_the_tables_name_every_command_and_are_long():
    found = list(hostile_tables.cases())
    assert len(found) >= 300
    commands = {line.split(" ")[0] for _, line, _ in found}
    assert commands >= {
        "train",
        "data",
        "evaluate",
        "generate",
        "plan",
        "grade",
        "export",
        "report",
    }


def counted(*options):
    """What became of each input of a probe; others than those it expects are printed."""
    script = Path(hostile_world.__file__)
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([*sys.path, str(script.parent)]),
    }
    done = subprocess.run(
        [sys.executable, str(script), *options], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    *others, counts = done.stdout.splitlines()
    print(*others, sep="\n")
    return json.loads(counts)


@pytest.mark.slow  # every input in a process of its own: a minute and a half in all
@pytest.mark.parametrize("part", range(4))
def test_every_hostile_input_is_refused_in_one_line(part):
    assert set(counted("--part", f"{part}/4")) == {"refused"}


@pytest.mark.slow  # the same
def test_damaged_folders_of_a_model_are_read_or_refused_in_one_line():
    counts = counted("--folders", "150")
    assert set(counts) <= {"refused", "accepted"} and counts["refused"] >= 100
