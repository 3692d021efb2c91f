"""`resolve` gives every room its settings, with the derived values worked out here by hand."""

import dataclasses
import subprocess
import sys

import pytest

from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.config.checks import problems
from bacr_jax.config.settings import (
    GraderSettings,
    MethodSettings,
    ResponseLimits,
    resolve,
)


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
    assert settings.limits == ResponseLimits(9, 100, 4, 64, 64, 2, (8, 16), 16)
    assert of("budget.max=64", "budget.cap=80")[1].limits.cap == 80
    unlimited = of("budget.cap=80", "eval.budgets=[8]", "eval.no_budget=true")[1]
    assert unlimited.limits.largest_evaluated == 80


def test_records_are_frozen_and_need_no_jax():
    with pytest.raises(dataclasses.FrozenInstanceError):
        of()[1].task.seed = 1
    code = "import sys, bacr_jax.config.settings; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_method_reads_its_sections_as_they_are_in_the_config():
    config, settings = of("method=grpo", "eval.budgets=[64]", "rollout.group_size=3")
    method = settings.method
    for field in dataclasses.fields(method):
        if field.name != "evaluated":
            assert getattr(method, field.name) is getattr(config, field.name), field.name
    assert method.evaluated == (64,)
    assert resolve(Config()).method == MethodSettings()


def test_the_values_of_a_method_follow_from_the_sections_it_has_now():
    settings = of("budget.min=8", "budget.max=64", "eval.budgets=[4, 16, 32, 128]")[1].method
    assert settings.budget_choices == (16, 32)
    assert settings.budget_range == (8, 64)
    assert settings.reward_shares == {}
    choices = dataclasses.replace(settings.budget, prior="choices")
    assert dataclasses.replace(settings, budget=choices).budget_range == (16, 32)
    rewards = dataclasses.replace(settings.reward, weights={"correct": 3.0, "brief.py:f": 1.0})
    shares = dataclasses.replace(settings, reward=rewards).reward_shares
    assert shares == {"correct": 0.75, "brief.py:f": 0.25}


def test_a_setting_that_no_method_reads_is_refused_with_those_that_it_can_read():
    with pytest.raises(
        AttributeError, match="'mesh' is not one of the settings .* use one of method, conditioning"
    ):
        getattr(MethodSettings(), "mesh")  # noqa: B009


@pytest.mark.parametrize("budget_input", ["embedding", "prompt"])
def test_a_config_that_contradicts_itself_is_resolved_and_then_refused(budget_input):
    """The checks read derived values of every config whose numbers are within their bounds."""
    conflicts = ("eval.budgets=[]", "budget.min=64", "budget.max=8", "budget.prior=choices")
    config, settings = of(*conflicts, f"conditioning.budget_input={budget_input}")
    assert settings.task.largest_budget == 8
    lines = list(problems(config, lambda method: iter([f"method {method.method}"])))
    assert any(line.startswith("eval.budgets") for line in lines)
    assert any(line.startswith("budget.min=64 is above budget.max=8") for line in lines)
    assert lines[-1] == "method bacr"
