"""Inputs that can't be evaluated are refused before any work on a device."""

import dataclasses
import re
from types import SimpleNamespace

import pytest

from bacr_jax.config import BudgetConfig, ConditioningConfig, Config, EvalConfig
from bacr_jax.config.settings import resolve
from bacr_jax.errors import UserError
from bacr_jax.evaluation import job_checks
from bacr_jax.evaluation.job_checks import (
    EvaluationLimits,
    check_free,
    check_largest_budget,
    check_length,
    check_swap,
)
from bacr_jax.methods.registry import built_in_methods, make_method
from bacr_jax.prompts.formats import FORMATS
from bacr_jax.questions.ledger import ledger_tokenizer

PLAIN = SimpleNamespace(budget_close="")
DECLARING = SimpleNamespace(budget_close="</budget>")


BUDGETS = EvalConfig(budgets=(4, 8))


def check_swap_of(config, style):
    """Runs `check_swap` on the sections of a config."""
    check_swap(config.eval, config.conditioning, make_method(resolve(config).method), style)


def config_of(budget_input, method="bacr", **changes):
    """Returns the config of an evaluation at two budgets, with changes of the section `eval`."""
    return Config(
        method=method,
        conditioning=ConditioningConfig(budget_input=budget_input),
        eval=dataclasses.replace(BUDGETS, **changes),
    )


@pytest.mark.parametrize("budget_input", ["embedding", "prompt", "both"])
def test_a_policy_with_a_budget_as_input_can_be_swapped(budget_input):
    check_swap_of(config_of(budget_input), PLAIN)
    check_swap_of(config_of("none"), DECLARING)
    check_swap_of(config_of("embedding", "selfbudgeter"), DECLARING)


@pytest.mark.parametrize("method", built_in_methods())
def test_a_method_without_a_budget_embedding_is_not_swapped(method):
    config = config_of("embedding", method)
    name = re.escape(make_method(resolve(config).method).name)
    if make_method(resolve(config).method).conditioned:
        check_swap_of(config, PLAIN)
        return
    for budget_input, reason in (
        ("embedding", f"the method {name} has no budget embedding"),
        ("none", "conditioning.budget_input=none"),
    ):
        with pytest.raises(UserError, match=rf"does not read its budget \({reason}\)"):
            check_swap_of(config_of(budget_input, method), PLAIN)
    # The prompt contains the budget with every method.
    check_swap_of(config_of("both", method), PLAIN)


def test_some_methods_have_a_budget_embedding_and_others_do_not():
    settings = [resolve(config_of("embedding", name)).method for name in built_in_methods()]
    assert {make_method(one).conditioned for one in settings} == {True, False}


@pytest.mark.parametrize(
    ("budget_input", "changes", "style", "message"),
    [
        ("none", {}, PLAIN, r"does not read its budget \(conditioning.budget_input=none\)"),
        ("none", {"budget_tag": "declared"}, DECLARING, "set eval.budget_tag=given"),
        ("embedding", {"budgets": (0, 8)}, PLAIN, "at least two budgets above 0"),
    ],
)
def test_a_swap_without_several_inputs_is_refused(budget_input, changes, style, message):
    with pytest.raises(UserError, match=message):
        check_swap_of(config_of(budget_input, **changes), style)


def settings(**decoding):
    return {
        "sets": {"ours": {"problems": 2, "questions": "abc"}},
        "decoding": {
            "cells": {"greedy": [4, 16]},
            "budgets": [4, 16],
            "answer_tokens": 3,
            **decoding,
        },
    }


@pytest.fixture
def check(monkeypatch, tmp_path):
    def run(others, *, modes=("greedy",), questions="abc"):
        monkeypatch.setattr(job_checks.folder, "read_samples", lambda path: {})
        monkeypatch.setattr(job_checks.folder, "read_settings", lambda path: others)
        monkeypatch.setattr(job_checks.folder, "read_results", lambda path: {"sets": {}})
        cells = dict.fromkeys(modes, [8])
        mine = {
            "sets": {"ours": {"problems": 2, "questions": questions}},
            "decoding": {"cells": cells, "budgets": [8], "answer_tokens": 3},
        }
        check_free(tmp_path, mine)

    return run


def test_the_policy_before_training_may_have_other_budgets(check):
    check(settings(every=2))


@pytest.mark.parametrize(
    ("others", "how", "message"),
    [
        (
            settings(),
            {"modes": ("sampled",)},
            "--free .*no decoding mode and budget in common",
        ),
        (settings(), {"questions": "other"}, "--free .*different problems"),
        (settings(answer_tokens=9), {}, "--free .*rollout.answer_tokens=9, and this one with"),
        (settings(swap=True), {}, "--free .*that evaluation was made with --swap"),
    ],
)
def test_an_evaluation_that_is_no_free_curve_is_refused(check, others, how, message):
    with pytest.raises(UserError, match=message):
        check(others, **how)


def test_the_largest_budget_leaves_room_for_the_forced_text_and_the_answer():
    limits = EvaluationLimits(BUDGETS, BudgetConfig(), answer_tokens=3)
    sets = {"ours": SimpleNamespace(longest=10)}
    # 10 tokens of the prompt, 8 of thinking, 2 of "</think><answer>", and 3 of the answer.
    check_length(limits, ledger_tokenizer(), FORMATS["ledger"], 23, sets)
    with pytest.raises(
        UserError, match=r"forced text \(2\) and the answers \(up to 3\); use at most 7"
    ):
        check_length(limits, ledger_tokenizer(), FORMATS["ledger"], 22, sets)
    with_grace = dataclasses.replace(limits, budget=BudgetConfig(grace=2))
    check_length(with_grace, ledger_tokenizer(), FORMATS["ledger"], 25, sets)
    with pytest.raises(UserError, match="use at most 7"):
        check_length(with_grace, ledger_tokenizer(), FORMATS["ledger"], 24, sets)


def test_before_the_prompts_are_known_a_prompt_has_one_token():
    for grace in (0, 2):
        limits = EvaluationLimits(BUDGETS, BudgetConfig(grace=grace), answer_tokens=3)
        check_largest_budget(limits, 9 + grace)
        with pytest.raises(UserError, match=rf"--budgets 8: .* only {8 + grace} positions"):
            check_largest_budget(limits, 8 + grace)
