"""Tests that docs/equations.md names only functions, modules, files and config keys that exist."""

import importlib
import re
from pathlib import Path

import jax

from bacr_jax import rewards
from bacr_jax.config.io import schema

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src/bacr_jax"
SPAN = re.compile(r"`([^`]+)`")


def module_of(name):
    for full in (f"bacr_jax.{name}", name):
        try:
            return importlib.import_module(full)
        except ModuleNotFoundError:
            pass
    return None


def exists(span):
    """True for a config key, an expression, a module, and a function named with its module."""
    if span.partition("=")[0] in schema():
        return True
    if "(" in span:
        return eval(span, {"jax": jax, "rewards": rewards}) is not None
    if module_of(span) is not None:
        return True
    module, _, name = span.rpartition(".")
    return bool(module) and hasattr(module_of(module), name)


def unknown(text):
    """The names that do not exist. `X` in `model/y.py` is looked up in this file's module."""
    missing = []
    for line in text.splitlines():
        names = []
        for span in SPAN.findall(line):
            if not span.endswith(".py"):
                names += [] if exists(span) else [span]
                continue
            path = next((base / span for base in (ROOT, SRC) if (base / span).is_file()), None)
            if path is None:
                missing.append(span)
            elif path.is_relative_to(SRC):
                module = path.relative_to(SRC.parent).with_suffix("")
                module = importlib.import_module(".".join(module.parts))
                names = [name for name in names if not hasattr(module, name)]
        missing += names
    return missing


def test_what_the_equations_name_exists():
    text = (ROOT / "docs/equations.md").read_text()
    # This attribute of every function with static arguments is named without a function.
    assert hasattr(rewards.cut_points, "static_argnames")
    assert unknown(text.replace("`static_argnames`", "")) == []


def test_a_name_that_does_not_exist_is_found():
    lines = [
        "`budget_embedding` in `model/budget.py`",
        "`curriculum.sample_budget`, `curriculum.sample_budgets`, `curriculum.clip_mu`",
        "`model/values.py` and `value.inputs`, `value.input=raw`",
        "`embed`",
    ]
    missing = ["budget_embedding", "curriculum.sample_budget", "model/values.py", "value.inputs"]
    assert unknown("\n".join(lines)) == [*missing, "embed"]
