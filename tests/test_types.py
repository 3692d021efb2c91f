"""Pytrees that travel between rooms: frozen, and open to whatever JAX puts in their places."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

import bacr_jax
from bacr_jax.types import Branches, Prompts, Trunks, pytree

PACKAGE = Path(bacr_jax.__file__).parent


@pytree
class Pair:
    first: Float[Array, "B"]
    second: Float[Array, "B"] | None = None


def test_leaves_are_the_fields_that_hold_something():
    doubled = jax.tree.map(lambda x: 2 * x, Pair(jnp.ones(2)))
    assert doubled.first.tolist() == [2.0, 2.0] and doubled.second is None


def test_fields_take_shapes_and_shardings_as_well_as_arrays():
    shapes = jax.eval_shape(lambda pair: pair, Pair(jnp.ones(2), jnp.ones(2)))
    assert shapes.first.shape == (2,)
    assert Pair("of rank nothing").first == "of rank nothing"


def test_an_instance_is_changed_by_making_another():
    pair = Pair(jnp.ones(2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        pair.first = jnp.zeros(2)
    assert dataclasses.replace(pair, second=1.0).second == 1.0 and pair.second is None


def test_prompts_are_taken_by_row_and_padded_on_the_right():
    tokens = jnp.array([[1, 2, 0], [3, 4, 5], [6, 0, 0]])
    prompts = Prompts(tokens, jnp.array([2, 3, 1]), jnp.array([0, 1, 0]), jnp.array([1, 3, 1]))
    rows = prompts.take(np.array([1, 1, 0])).padded(5)
    assert rows.tokens.tolist() == [[3, 4, 5, 0, 0], [3, 4, 5, 0, 0], [1, 2, 0, 0, 0]]
    assert rows.lengths.tolist() == [3, 3, 2]
    assert (rows.question_start.tolist(), rows.question_end.tolist()) == ([1, 1, 0], [3, 3, 1])


@pytest.mark.parametrize("array", [np.array, jnp.array])
def test_token_ids_of_a_trace_are_split_at_its_lengths(array):
    trunks = Trunks.empty(2, width=6, sampled=3)
    trunks = dataclasses.replace(
        trunks,
        tokens=array([[1, 2, 3, 4, 5, 0], [1, 6, 0, 0, 0, 0]]),
        prompt_lengths=array([2, 1]),
        sampled=array([3, 0]),
        thinking=array([2, 0]),
    )
    # The closing tag 5 is sampled, but it is not part of the thinking.
    assert [trunks.thinking_ids(row) for row in (0, 1)] == [[3, 4, 5], []]
    branches = dataclasses.replace(
        Branches.empty(1, 2, width=4, sampled=2),
        tokens=array([[[7, 8, 9, 0], [7, 0, 0, 0]]]),
        forced=array([[2, 1]]),
        sampled=array([[1, 0]]),
    )
    assert [branches.forced_ids(0, cut) for cut in (0, 1)] == [[7, 8], [7]]
    assert [branches.answer_ids(0, cut) for cut in (0, 1)] == [[9], []]


def run_python(*words, folder=None):
    """Runs Python without a path to the package; the exit code and standard error."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return done.returncode, done.stderr


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.stem)
def test_a_file_of_the_package_that_is_run_as_a_script_names_the_command(path):
    if path.stem == "__init__":
        pytest.skip("does nothing as a script")
    module = "bacr_jax" if path.stem == "__main__" else f"bacr_jax.{path.stem}"
    line = (
        f"error: {path} is a module of the package bacr_jax and can't be run as a file; run "
        f"python -m {module}\n"
    )
    assert run_python(path, "--config", "quickstart") == (2, line)


def test_the_same_from_within_the_folder_of_the_package():
    line = (
        "error: train.py is a module of the package bacr_jax and can't be run as a file; run "
        "python -m bacr_jax.train\n"
    )
    assert run_python("train.py", folder=PACKAGE) == (2, line)
    code, line = run_python("-c", "import enum", folder=PACKAGE)
    assert code == 2 and line.count("\n") == 1
    assert (
        "hides the module `types` of the standard library; start Python in another folder" in line
    )


def test_a_file_of_the_grader_that_is_run_as_a_script_names_its_command():
    path = PACKAGE.parent / "bacr_grading" / "__main__.py"
    line = (
        f"error: {path} is a module of the package bacr_grading and can't be run as a script; "
        "run python -m bacr_grading\n"
    )
    assert run_python(path) == (2, line)
