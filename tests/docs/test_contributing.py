"""Tests that the code in CONTRIBUTING.md works."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, Int

from bacr_jax.config import DataConfig
from bacr_jax.config import io as config_io
from bacr_jax.config.settings import resolve
from bacr_jax.methods import load_method
from bacr_jax.questions import math_sets
from bacr_jax.questions.loaders import load_questions

ROOT = Path(__file__).parents[2]
# Two traces of one question with two truncation points each. The first trace uses half of its
# budget.
BATCH = SimpleNamespace(
    outcomes=jnp.array([[[0.0, 1.0], [1.0, 1.0]]]),
    thinking=jnp.array([[8, 16]]),
    budgets=jnp.array([[16, 16]]),
)
BY_HAND = [[[0.0, 1.1], [1.0, 1.0]]]


def code_under(heading):
    section = (ROOT / "CONTRIBUTING.md").read_text().split(f"## {heading}\n")[1]
    return re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]


def test_the_method_is_one_file(tmp_path):
    path = tmp_path / "brief_grpo.py"
    path.write_text(code_under("Add a method"))
    config = config_io.load([ROOT / "configs/quickstart.yaml"], [f"method={path}"])
    method = load_method(resolve(config).method)
    assert method.name == "Brief GRPO"
    np.testing.assert_allclose(method.rewards(None, BATCH), BY_HAND, rtol=1e-6)


def test_the_reward_is_a_pure_function():
    names = {"Float": Float, "Int": Int, "Array": Array}
    exec(code_under("Add a reward"), names)
    reward = names["brevity_reward"](BATCH.outcomes, BATCH.thinking, BATCH.budgets, weight=0.2)
    np.testing.assert_allclose(reward, BY_HAND, rtol=1e-6)


@pytest.mark.parametrize("answer", [{"final_answer": "$4$"}, {"solution": "so \\boxed{4}"}])
def test_the_data_set_is_one_entry(tmp_path, monkeypatch, answer):
    monkeypatch.setattr(math_sets, "LAYOUTS", dict(math_sets.LAYOUTS))
    exec(code_under("Add a data set"), {"LAYOUTS": math_sets.LAYOUTS, "Layout": math_sets.Layout})
    (tmp_path / "test.jsonl").write_text(
        json.dumps({"problem": "2 + 2?", "difficulty": 3, **answer}) + "\n"
    )
    found = load_questions("olympiad:test.jsonl", DataConfig(dir=str(tmp_path)), 0, "test")
    assert (found.questions, found.levels.tolist()) == (["2 + 2?"], [3])
    assert found.answers == ["4"] and found.note.startswith("Olympiad")
