"""The command of the variance laboratory runs from the root of the repository."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def command(folder, *words):
    # The root is on the path, as it is for a reader who starts the command there.
    paths = os.pathsep.join(map(str, (ROOT / "src", ROOT)))
    environment = {**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    words = [sys.executable, "-m", "research.variance", "--out", str(folder), *words]
    return subprocess.run(words, env=environment, capture_output=True, text=True)


def test_bad_keys_and_sizes_are_one_line_before_anything_is_written(tmp_path):
    path = tmp_path / "noise.yaml"
    path.write_text("sizes: {cpu: {budgets: [7, 0]}}\n")
    done = command(tmp_path / "studies", "--config", str(path))
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "budgets: found 0" in done.stderr
    done = command(tmp_path / "studies", "--config", str(path), "--size", "none")
    assert done.returncode == 2 and "--size: found 'none'" in done.stderr
    assert not (tmp_path / "studies").exists()
