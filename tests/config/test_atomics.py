"""GPUs whose compiler adds slowly get one flag, and nothing else is touched."""

import importlib.metadata
import subprocess
import sys

import pytest

from bacr_jax import train
from bacr_jax.config import atomics
from bacr_jax.config.atomics import FLAG, allow_fast_additions

INSTALLED = "jax-cuda12-pjrt"


@pytest.fixture(params=["proc/driver/nvidia/version", "usr/lib/wsl/lib/libcuda.so.1"])
def driver(tmp_path, request):
    """The root of a file system with a driver, of Linux or of WSL2."""
    root = tmp_path / "root"
    for path in (request.param, "dev/dxg"):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()
    return root


def install(monkeypatch, version, package=INSTALLED):
    """One GPU compiler of a version, and no other."""

    def version_of(name):
        if name == package:
            return version
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version_of)


def flags_after(environment, driver):
    allow_fast_additions(environment, driver)
    return environment.get("XLA_FLAGS")


@pytest.mark.parametrize(
    ("version", "slow"),
    [
        ("0.10.1", False),
        ("0.10.2", True),
        ("0.10.10", True),
        ("0.11.0", True),
        ("0.11.0.dev20260701", True),
        ("0.11.1", False),
        ("0.11.2", False),
        ("0.12.0.1", False),
        ("1.0", False),
    ],
)
@pytest.mark.parametrize("package", ["jax-cuda12-pjrt", "jax-cuda13-pjrt"])
def test_the_flag_is_for_versions_that_add_slowly(monkeypatch, driver, version, slow, package):
    install(monkeypatch, version, package)
    assert flags_after({}, driver) == (FLAG if slow else None)


def test_without_a_gpu_compiler_or_a_driver_nothing_is_set(monkeypatch, driver, tmp_path):
    install(monkeypatch, "0.10.2")
    assert flags_after({}, tmp_path / "none") is None
    install(monkeypatch, "0.10.2", package="jaxlib")
    assert flags_after({}, driver) is None


@pytest.mark.parametrize(
    ("platforms", "flags"), [("cpu", None), ("cuda", FLAG), ("cuda,cpu", FLAG), ("gpu", FLAG)]
)
def test_a_run_on_cpus_is_left_alone(monkeypatch, driver, platforms, flags):
    install(monkeypatch, "0.10.2")
    assert flags_after({"JAX_PLATFORMS": platforms}, driver) == flags


@pytest.mark.parametrize(
    ("given", "after"),
    [
        ("--xla_gpu_autotune_level=0", f"--xla_gpu_autotune_level=0 {FLAG}"),
        ("--xla_backend_extra_options=", "--xla_backend_extra_options="),
        ("--xla_backend_extra_options=-x,y", "--xla_backend_extra_options=-x,y"),
        (FLAG, FLAG),
        ("flags.txt", "flags.txt"),
    ],
)
def test_flags_of_the_user_stay(monkeypatch, driver, given, after):
    install(monkeypatch, "0.10.2")
    assert flags_after({"XLA_FLAGS": given}, driver) == after


def test_a_process_that_has_used_its_gpus_is_warned(monkeypatch, driver, capsys):
    install(monkeypatch, "0.11.0")
    monkeypatch.setattr(atomics, "gpus_in_use", lambda: True)
    assert flags_after({}, driver) is None
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: jax-cuda12-pjrt 0.11.0 has a bug") and FLAG in line
    assert flags_after({"XLA_FLAGS": FLAG}, driver) == FLAG
    assert capsys.readouterr().err == ""


def test_a_run_allows_it_before_jax_is_imported(monkeypatch):
    seen = []

    def stop():
        seen.append("jax" in sys.modules)
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "allow_fast_additions", stop)
    assert train.main(["--config", "quickstart"]) == 130
    assert len(seen) == 1


def test_xla_of_this_version_takes_the_flag():
    """XLA ends a process at once for a flag that it does not know."""
    script = "import jax; print(jax.jit(lambda x: x + 1)(1.0))"
    environment = {"XLA_FLAGS": FLAG, "JAX_PLATFORMS": "cpu", "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stdout == "2.0\n", done.stderr
