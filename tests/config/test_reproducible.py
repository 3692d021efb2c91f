"""`reproducible: true` tells XLA what it needs, beside what the user told it."""

import importlib.metadata
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from bacr_jax import train
from bacr_jax.config.reproducible import autotune_file, flags_for, make_reproducible
from bacr_jax.errors import UserError

FIXED = ["--xla_gpu_deterministic_ops=true", "--xla_gpu_exclude_nondeterministic_ops=true"]
WHOLE = 'version: 3\nresults {\n  device: "sm_80"\n  result {\n    gemm {\n    }\n  }\n}\n'


def test_without_the_key_the_environment_stays_as_it_is(tmp_path):
    environment = {"XLA_FLAGS": "--xla_gpu_deterministic_ops=false"}
    make_reproducible(False, str(tmp_path), environment)
    assert environment == {"XLA_FLAGS": "--xla_gpu_deterministic_ops=false"}


def test_sums_get_a_fixed_order_and_choices_are_kept_in_the_run_folder(tmp_path):
    environment = {}
    make_reproducible(True, str(tmp_path / "run"), environment)
    kept = autotune_file(tmp_path / "run")
    assert environment["XLA_FLAGS"].split() == [
        *FIXED,
        f"--xla_gpu_dump_autotune_results_to={kept}",
    ]
    assert kept.parent == tmp_path / "run"
    # XLA writes text only into files of such a name.
    assert kept.suffix == ".textproto"


def test_flags_of_the_user_stay_and_nothing_is_said_twice(tmp_path):
    mine = (
        "--xla_gpu_deterministic_ops=1 --xla_gpu_autotune_level=0 "
        "--xla_gpu_dump_autotune_results_to=/mine"
    )
    flags = flags_for(tmp_path, {"XLA_FLAGS": f" {mine} "})
    assert flags == f"{mine} {FIXED[1]}"
    assert flags_for(tmp_path, {"XLA_FLAGS": flags}) == flags


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            "--xla_gpu_deterministic_ops=false",
            "XLA_FLAGS contains --xla_gpu_deterministic_ops=false, but reproducible=true needs "
            "the value true",
        ),
        ("--xla_gpu_exclude_nondeterministic_ops=0", "nondeterministic_ops=0, but reproducible"),
        # The last of two counts.
        (f"{FIXED[0]} --xla_gpu_deterministic_ops=False", "deterministic_ops=False, but"),
        ("flags.txt", "XLA_FLAGS: 'flags.txt' is the name of a file"),
        ('--xla_dump_to="/tmp', "close every quote"),
    ],
)
def test_flags_that_contradict_are_one_line_and_exit_code_2(
    tmp_path, capsys, monkeypatch, given, says
):
    monkeypatch.setenv("XLA_FLAGS", given)
    file = tmp_path / "small.yaml"
    file.write_text("reproducible: true\n")
    assert train.main(["--config", str(file), f"output.dir={tmp_path / 'run'}"]) == 2
    line = capsys.readouterr().err
    assert says in line and line.count("\n") == 1
    assert os.environ["XLA_FLAGS"] == given
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("length", [None, 0, 5, 9, 11, 20, 30, 60, len(WHOLE) - 1])
def test_choices_are_read_back_only_when_they_were_written_to_the_end(tmp_path, length):
    kept = autotune_file(tmp_path)
    load = f"--xla_gpu_load_autotune_results_from={kept}"
    # XLA stops at a file that is missing or torn by a kill; "version: 3" alone is a whole one.
    if length is not None:
        kept.write_text(WHOLE[:length])
    assert (load in flags_for(tmp_path, {})) is (length == 11)
    kept.write_text(WHOLE)
    assert load in flags_for(tmp_path, {})


def test_processes_and_versions_keep_files_of_their_own(tmp_path, monkeypatch):
    alone = flags_for(tmp_path, {})
    second = flags_for(tmp_path, {"JAX_PROCESS_ID": "1"})
    assert second != alone
    assert second == flags_for(tmp_path, {"SLURM_PROCID": "1"})
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "9.9")
    assert flags_for(tmp_path, {}) != alone


def test_a_path_that_xla_can_not_read_is_refused(tmp_path):
    assert flags_for(tmp_path / "my run", {}).endswith(f'{autotune_file(tmp_path / "my run")}"')
    with pytest.raises(UserError, match="does not support quotes"):
        flags_for(tmp_path / 'a"b', {})


def test_gpus_that_are_in_use_are_too_late_to_tell(tmp_path, monkeypatch):
    backend = SimpleNamespace(backends_are_initialized=lambda: True)
    monkeypatch.setitem(sys.modules, "jax._src.xla_bridge", backend)
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(default_backend=lambda: "gpu"))
    with pytest.raises(UserError, match="already used its GPUs"):
        make_reproducible(True, str(tmp_path), {})
    make_reproducible(True, str(tmp_path), {"XLA_FLAGS": " ".join(FIXED)})


@pytest.mark.slow  # processes that import JAX, as those of launch/test_launch.py
def test_xla_knows_every_flag_also_where_there_are_only_cpus(tmp_path):
    """XLA ends the process at a flag that it doesn't know."""
    folder = tmp_path / "my run"
    folder.mkdir()
    autotune_file(folder).write_text(WHOLE)
    code = (
        "import os, sys\n"
        "from bacr_jax.config.reproducible import make_reproducible\n"
        f"make_reproducible(True, {str(folder)!r})\n"
        "assert 'jax' not in sys.modules\n"
        "os.environ['XLA_FLAGS'] += sys.argv[1]\n"
        "import jax\n"
        "print(jax.jit(lambda x: x + 1)(1))\n"
    )

    def run(more):
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        environment.pop("XLA_FLAGS", None)
        command = [sys.executable, "-c", code, more]
        return subprocess.run(command, capture_output=True, text=True, env=environment)

    assert run("").stdout == "2\n"
    assert (
        "Unknown flag in XLA_FLAGS: --xla_gpu_no_such_flag" in run(" --xla_gpu_no_such_flag").stderr
    )
