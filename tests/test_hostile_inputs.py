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


@pytest.mark.slow  # every input in a process of its own: some ten minutes
def test_every_hostile_input_is_refused_in_one_line():
    script = Path(hostile_world.__file__)
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([*sys.path, str(script.parent)]),
    }
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment
    )
    *others, counts = done.stdout.splitlines()
    assert set(json.loads(counts)) == {"refused"}, others
