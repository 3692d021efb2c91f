"""Generators are trusted by the digest of what their scorers could call."""

import ast
import shutil
import sys
from pathlib import Path

import pytest

from bacr_tasks import gym, gym_checked, gym_safe

reasoning_gym = pytest.importorskip("reasoning_gym")
ROOT = Path(reasoning_gym.__file__).parent
# Calls that run text as code, and where reasoning-gym 0.1.25 has them: in scorers that `gym_safe`
# replaces, or on text that a generator has made itself.
RUNS_TEXT = {"eval", "exec", "parse_expr", "sympify", "compile_command", "__import__", "loads"}
REPLACED = {
    "algebra.intermediate_integration", "algebra.polynomial_multiplication",
    "algebra.simple_integration", "algorithmic.binary_matrix", "algorithmic.spiral_matrix",
    "algorithmic.string_insertion", "games.countdown", "games.n_queens", "games.puzzle24",
}  # fmt: skip
OWN_TEXT = {
    "arithmetic.basic_arithmetic", "arithmetic.bitwise_arithmetic", "code.codeio",
    "arithmetic.gsm_symbolic.generators_00_49", "arithmetic.gsm_symbolic.generators_50_99",
    "algorithmic.number_sorting", "logic.propositional_logic",
}  # fmt: skip


def calls(path):
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", None) or getattr(node.func, "attr", None)
            of_json = ast.unparse(node.func) == "json.loads"
            if name in RUNS_TEXT and not of_json:
                yield name


def test_no_other_module_of_the_package_runs_text():
    found = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in ROOT.rglob("*.py")
        if "-" not in path.stem and any(calls(path))
    }
    assert found == REPLACED | OWN_TEXT
    replaced = {module.rpartition(".")[2] for module in REPLACED}
    too_kind = {"number_sorting", "complex_arithmetic", "game_of_life_halting"}
    assert replaced | too_kind == set(gym_safe.SCORERS)


def test_every_installed_generator_was_checked_but_the_one_that_mixes_others():
    from reasoning_gym.factory import DATASETS

    unchecked = {
        name
        for name, (dataset_class, _) in DATASETS.items()
        if not gym_checked.is_checked(name, dataset_class.__module__)
    }
    assert unchecked == {"composite"}


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A copy of the package's sources in the place of the installed one."""
    folder = tmp_path / "reasoning_gym"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns("__pycache__", "*.json*", "*.csv"))
    for cached in (gym_checked._imports, gym_checked._root):
        monkeypatch.setattr(gym_checked, cached.__name__, cached.__wrapped__)
    monkeypatch.setattr(gym_checked, "_root", lambda: folder)
    return folder


@pytest.mark.parametrize(
    ("changed", "name", "module"),
    [
        ("games/countdown.py", "countdown", "games.countdown"),
        ("dataset.py", "gcd", "arithmetic.gcd"),
        ("utils.py", "chain_sum", "arithmetic.chain_sum"),
        ("games/contrib/sokoban/src/player.py", "sokoban", "games.sokoban"),
        ("logic/contrib/logic_puzzle/puzzle.py", "zebra_puzzles", "logic.zebra_puzzles"),
    ],
)
def test_a_scorer_is_another_once_anything_that_it_could_call_has_changed(
    copied, changed, name, module
):
    module = f"reasoning_gym.{module}"
    assert gym_checked.is_checked(name, module)
    with (copied / changed).open("a") as file:
        file.write("\nEVIL = eval\n")
    assert not gym_checked.is_checked(name, module)
    # A generator that has nothing to do with it is what it was.
    if changed != "dataset.py":
        assert gym_checked.is_checked(
            "letter_counting", "reasoning_gym.algorithmic.letter_counting"
        )


def test_a_generator_that_was_not_checked_is_refused_in_one_line(monkeypatch):
    monkeypatch.setitem(gym_checked.CHECKED, "gcd", "0123456789abcdef")
    with pytest.raises(
        ValueError, match=r"gym:gcd: the scorer .* reasoning-gym==0\.1\.25"
    ) as error:
        gym.source("gcd", short=False)
    assert str(error.value).isprintable()
    assert sys.modules["reasoning_gym"] is reasoning_gym
