"""Tests that runs with cached and with newly compiled programs have the same results."""

import os
import subprocess
import sys

import pytest

from bacr_jax.runs.metrics import without_timings
from whole_runs import WHOLE_RUN

STEPS = ("train.steps=2", "output.report=false", "output.tensorboard=false")


def started(config, folder, **environment):
    """A run in a process of its own."""
    alone = {name: v for name, v in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    command = [sys.executable, "-m", "bacr_jax.train", "--config", str(config), *STEPS]
    command += [f"output.dir={folder}"]
    done = subprocess.run(command, capture_output=True, text=True, env=alone | environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow  # two runs in separate processes
def test_programs_from_the_folder_give_the_same_bits(tmp_path):
    config = tmp_path / "small.yaml"
    config.write_text(WHOLE_RUN)
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    metrics = []
    for name in ("compiled", "found"):
        started(config, tmp_path / name, **cache)
        metrics.append(without_timings(tmp_path / name / "metrics.jsonl"))
        programs = sorted(path.name for path in (tmp_path / "cache").rglob("*-cache"))
        metrics[-1] = (metrics[-1], programs)
    assert metrics[0] == metrics[1] and len(metrics[0][0]) == 2
