"""Parts of .ci/run: it uses only its own environment, and it notices every change in runs/."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "run"


def stand_in(folder, name, line):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{line}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize("interpreter", ["no-such-python", "broken-python"])
def test_without_its_interpreter_nothing_is_installed_elsewhere(tmp_path, interpreter):
    """The caller's environment, which is on the path, is left alone."""
    programs = tmp_path / "programs"
    for name in ("pip", "uv", "python"):
        stand_in(programs, name, f"echo {name} >> {tmp_path}/called")
    stand_in(programs, "broken-python", "exit 1")
    (tmp_path / "clone/.ci").mkdir(parents=True)
    script = shutil.copy(SCRIPT, tmp_path / "clone/.ci/run")
    done = subprocess.run(
        ["bash", script],
        env={
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHON": interpreter,
            "TMPDIR": str(tmp_path),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0 and done.stdout == ""
    assert not (tmp_path / "called").exists()


def files_of_runs(folder):
    """What the script lists, on a system whose `find` has no -printf, such as macOS."""
    programs = folder / "programs"
    stand_in(programs, "find", "exit 1")
    stand_in(programs, "python", f'exec {sys.executable} "$@"')
    (function,) = re.findall(r"^files_of_runs\(\) \{\n.*?^\}\n", SCRIPT.read_text(), re.M | re.S)
    done = subprocess.run(
        ["bash", "-c", f'set -euo pipefail\n{function}lines="$(files_of_runs)"\necho "$lines"'],
        cwd=folder,
        env={"PATH": f"{programs}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout.splitlines()


def test_every_file_of_runs_is_listed_with_its_size_and_time(tmp_path):
    assert files_of_runs(tmp_path)[0] != 0
    (tmp_path / "runs/a run").mkdir(parents=True)
    first, second = tmp_path / "runs/a run/x", tmp_path / "runs/y"
    first.write_text("12")
    second.touch()
    (tmp_path / "runs/link").symlink_to("y")
    os.utime(first, ns=(1, 1_500_000_001))
    os.utime(second, ns=(1, 2))
    before = ["runs/a run/x 2 1500000001", "runs/y 0 2"]
    code, lines = files_of_runs(tmp_path)
    assert (code, sorted(lines)) == (0, before)
    # The same size at another time, and a file more.
    os.utime(first, ns=(1, 1_500_000_002))
    (tmp_path / "runs/a run/z").touch()
    _, after = files_of_runs(tmp_path)
    assert len(after) == 3 and len(set(after) & set(before)) == 1
