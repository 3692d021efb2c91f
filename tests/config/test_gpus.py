"""The memory that JAX may use of a GPU, and whether there is a driver."""

import json
import os
import subprocess
import sys

import pytest

from bacr_jax.config import gpus
from bacr_plan.devices import MEMORY_FRACTION

FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
OURS = {FRACTION: "0.92"}


@pytest.mark.parametrize(
    ("environment", "is_set"),
    [
        ({}, True),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}, True),
        ({FRACTION: "", "XLA_CLIENT_MEM_FRACTION": ""}, True),
        ({FRACTION: ".5"}, False),
        ({"XLA_CLIENT_MEM_FRACTION": ".5"}, False),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, False),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, False),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "False"}, False),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "0"}, False),
    ],
)
def test_the_fraction_is_set_unless_the_user_has_chosen(environment, is_set):
    before = dict(environment)
    gpus.set_memory_fraction(environment)
    assert environment == before | (OURS if is_set else {})


@pytest.mark.parametrize("chosen", [{}, {"XLA_CLIENT_MEM_FRACTION": ".5"}, {FRACTION: ".5"}])
def test_jaxlib_takes_what_is_set(monkeypatch, chosen):
    """It refuses two fractions."""
    from jaxlib import xla_client

    for name in (FRACTION, "XLA_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    environment = dict(chosen)
    gpus.set_memory_fraction(environment)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    options = xla_client.generate_pjrt_gpu_plugin_options()
    assert options["memory_fraction"] == (0.5 if chosen else MEMORY_FRACTION)


# Runs a command until JAX initializes its devices, and prints the fraction of that moment and the
# fraction after the imports.
COMMAND = """
import json, os, sys
name = "XLA_PYTHON_CLIENT_MEM_FRACTION"
import bacr_jax
import bacr_jax.facade, bacr_jax.train, bacr_jax.evaluate, bacr_jax.generate, bacr_serve.__main__
imported = os.environ.get(name)
import jax

def stop():
    print(json.dumps([imported, os.environ.get(name)]), flush=True)
    os._exit(0)

jax.default_backend = stop
exec(sys.argv[1])
"""
OPENS = """
from bacr_jax.runs import saved_policy
from bacr_jax.config import Config
class Saved:
    config, chosen, step, style, name = Config(), None, None, None, "x"
    def check(self): pass
saved_policy.open_policy = lambda *_, **__: Saved()
"""
STARTS = {
    "train": "bacr_jax.train.main(['--config', 'quickstart', f'output.dir={sys.argv[2]}'])",
    "check": "bacr_jax.train.main(['--check', '--config', 'quickstart', 'train.steps=2'])",
    "in Python": "bacr_jax.train('quickstart', {'output.dir': sys.argv[2]})",
    "evaluate": OPENS + "bacr_jax.evaluate.main("
    "['--model', 'x', '--data', 'ledger', '--budgets', '8', '--out', sys.argv[2]])",
    "generate": OPENS + "bacr_jax.generate.main(['--model', 'x', '--budget', '8', 'why'])",
    "load": OPENS + "os.mkdir(sys.argv[2])\n"
    "open(f'{sys.argv[2]}/config.json', 'w').close()\nbacr_jax.load(sys.argv[2])",
    "serve": OPENS + "import bacr_serve.__main__\n"
    "bacr_serve.__main__.main(['--model', 'x', '--port', '0'])",
}


@pytest.mark.parametrize("command", STARTS)
def test_every_command_sets_the_fraction_before_jax_starts_and_no_import_does(command, tmp_path):
    environment = {name: value for name, value in os.environ.items() if "XLA_" not in name}
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, STARTS[command], str(tmp_path / "out")],
        env=environment | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    imported, started = json.loads(done.stdout.splitlines()[-1])
    assert (imported, started) == (None, "0.92")


def driver_of(root, *paths):
    for path in paths:
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return root


@pytest.mark.parametrize(
    ("paths", "is_there"),
    [
        ((), False),
        (("proc/driver/nvidia/version",), True),
        (("dev/dxg", "usr/lib/wsl/lib/libcuda.so.1"), True),
        # WSL2 with the graphics card of another maker, and the library without its device.
        (("dev/dxg",), False),
        (("usr/lib/wsl/lib/libcuda.so.1",), False),
    ],
)
def test_a_driver_is_that_of_linux_or_that_of_wsl(tmp_path, paths, is_there):
    assert gpus.has_driver(driver_of(tmp_path, *paths)) == is_there


@pytest.mark.parametrize("before", [None, "", "0.3"])
def test_the_environment_is_as_before_once_jax_has_started(monkeypatch, before):
    monkeypatch.delenv(FRACTION, raising=False)
    if before is not None:
        monkeypatch.setenv(FRACTION, before)
    with gpus.memory_fraction():
        assert os.environ[FRACTION] == (before or "0.92")
    assert os.environ.get(FRACTION) == before
