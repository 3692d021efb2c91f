"""What installs with the package: a light import, its version, its declared dependencies."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import bacr_jax

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Names of imports that are not those of their distributions.
DISTRIBUTION = {
    "yaml": "pyyaml",
    "orbax": "orbax-checkpoint",
    "PIL": "pillow",
    "vl_convert": "vl-convert-python",
}
# Imported where they are there, with a refusal that says what to install, or because JAX or
# transformers requires them.
OWN = {folder.name for folder in (ROOT / "src").iterdir()}
OPTIONAL = {"wandb", "huggingface_hub", "pyarrow", "torch", "jaxlib", "nvidia"}
OPTIONAL |= {"reasoning_gym", "verifiers", "gguf", "starlette", "uvicorn"}


def third_party():
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((alias.name, path) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module, path


def test_everything_imported_is_declared():
    words = (re.match(r"[\w-]+", text)[0].lower() for text in PROJECT["dependencies"])
    declared = {word.replace("-", "_") for word in words}
    missing = {
        (name.partition(".")[0], path.name)
        for name, path in third_party()
        if (top := name.partition(".")[0]) not in sys.stdlib_module_names | OPTIONAL | OWN
        and DISTRIBUTION.get(top, top).lower().replace("-", "_") not in declared
    }
    assert missing == set()


def required_names(package):
    """The names of all packages that are installed with a package, without extras."""
    names = set()
    waiting = [package]
    while waiting:
        for text in importlib.metadata.requires(waiting.pop()) or ():
            requirement = Requirement(text)
            name = canonicalize_name(requirement.name)
            marker = requirement.marker
            if name in names or marker is not None and not marker.evaluate({"extra": ""}):
                continue
            names.add(name)
            waiting.append(name)
    return names


def test_no_extra_is_needed_for_a_package_that_is_installed_without_it():
    """An error that asks for such an extra can't occur, or its advice is wrong."""
    present = required_names("bacr_jax")
    extras = PROJECT["optional-dependencies"]
    for extra in extras.keys() - {"test"}:
        for requirement in map(Requirement, extras[extra]):
            is_present = canonicalize_name(requirement.name) in present
            assert not is_present or requirement.extras, (extra, requirement.name)


def test_the_import_is_light_and_the_command_is_a_module_and_a_call():
    """In a process of its own: here JAX is imported."""
    code = """
import inspect, sys, bacr_jax
heavy = {"jax", "flax", "numpy", "yaml", "rich"} & set(sys.modules)
assert not heavy, heavy
rooms = {"advantages", "curriculum", "learner", "losses", "qwen2", "rewards", "rollout"}
assert {"load", "train", "Policy"} | rooms <= set(dir(bacr_jax))
assert callable(bacr_jax.train) and bacr_jax.train.main
assert "jax" not in sys.modules
from bacr_jax import train
assert train is bacr_jax.train is sys.modules["bacr_jax.train"]
assert str(inspect.signature(train)).startswith("(config: "), inspect.signature(train)
for room in rooms:
    assert getattr(bacr_jax, room).__doc__
from bacr_jax import qwen2
assert qwen2 is bacr_jax.qwen2 and qwen2.forward
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("system", "is_needed"), [("linux", True), ("darwin", False)])
def test_the_gpu_compiler_is_installed_where_it_exists(system, is_needed):
    """JAX's CUDA plugin has no wheel for macOS, so pip would refuse the extra."""
    (compiler,) = map(Requirement, PROJECT["optional-dependencies"]["plan"])
    assert compiler.extras == {"cuda12-local"}
    marker = compiler.marker
    assert (marker is None or marker.evaluate({"sys_platform": system})) == is_needed


def test_the_version_is_that_of_the_installed_package():
    assert bacr_jax.__version__ == importlib.metadata.version("bacr_jax")
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        bacr_jax.lod  # noqa: B018
