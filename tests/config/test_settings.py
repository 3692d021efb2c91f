"""`resolve` gives every room its settings, with the derived values worked out here by hand."""

import dataclasses
import subprocess
import sys

import pytest

from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.config.settings import GraderSettings, ResponseLimits, resolve


def of(*overrides):
    config = config_io.override(Config(), overrides)
    return config, resolve(config)


def test_the_task_has_its_sections_and_what_follows_from_others():
    config, settings = of(
        "seed=7",
        "budget.max=512",
        "eval.budgets=[64, 2048]",
        "eval.holdout=12",
        "conditioning.budget_input=prompt",
        "conditioning.prompt_text=' At most {budget}. '",
    )
    task = settings.task
    assert task.data is config.data and task.seed == 7
    assert (task.budget_text, task.largest_budget, task.holdout) == ("At most {budget}.", 2048, 12)


@pytest.mark.parametrize(
    ("budget_input", "has_text"),
    [("embedding", False), ("none", False), ("prompt", True), ("both", True)],
)
def test_prompts_have_a_sentence_if_the_budget_is_in_them(budget_input, has_text):
    _, settings = of(f"conditioning.budget_input={budget_input}")
    assert (settings.task.budget_text is not None) == has_text


@pytest.mark.parametrize(
    ("overrides", "needed"),
    [
        (("eval.select=train_holdout", "eval.every=5"), True),
        (("eval.select=train_holdout", "eval.every=null"), False),
        (("eval.select=ledger", "eval.every=5"), False),
    ],
)
def test_questions_are_needed_for_selection_if_held_out_ones_select(overrides, needed):
    assert of(*overrides)[1].task.needs_holdout == needed


def test_graders_are_the_verifier_and_all_rewards_but_correctness():
    config, settings = of(
        "grader=mine.py:check",
        "data.answer_column=gold",
        "reward.weights={correct: 3.0, 'brief.py:f': 1.0, 'brief.py:g': 1.0}",
    )
    assert settings.task.grader == GraderSettings(
        "mine.py:check", ("brief.py:f", "brief.py:g"), ("gold",), config.grading
    )
    assert of()[1].task.grader == GraderSettings(None, (), (), Config().grading)


def test_limits_of_responses():
    _, settings = of(
        "rollout.answer_tokens=9",
        "data.max_prompt_tokens=100",
        "budget.min=4",
        "budget.max=64",
        "budget.grace=2",
        "eval.budgets=[8, 16]",
    )
    assert settings.limits == ResponseLimits(9, 100, 4, 64, 64, 2, (8, 16))
    assert of("budget.max=64", "budget.cap=80")[1].limits.cap == 80


def test_records_are_frozen_and_need_no_jax():
    with pytest.raises(dataclasses.FrozenInstanceError):
        of()[1].task.seed = 1
    code = "import sys, bacr_jax.config.settings; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
