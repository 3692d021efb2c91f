"""What follows from several keys: budgets as people write them, the set that chooses, adapters."""

import pytest

from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.config.checks import check, problems
from bacr_jax.config.derived import (
    all_budgets,
    cap,
    largest_evaluated,
    matching_sets,
    param_dtype,
    read_budgets,
    samples_of,
    selection_set,
)
from bacr_jax.config.training_checks import samples_problems
from bacr_jax.config.values import FrozenMap
from bacr_jax.errors import UserError
from config_world import changed

LEVELS = {"low": 512, "high": 4096}


def read(text, levels=LEVELS):
    return read_budgets(text, option="--budgets", levels=levels)


def test_numbers_names_and_none():
    assert read("low,0,none, 1024 ,high") == [512, 0, None, 1024, 4096]


@pytest.mark.parametrize(
    ("text", "levels", "says"),
    [
        ("-4", LEVELS, "--budgets -4: found '-4'; use whole numbers"),
        ("512,lwo", LEVELS, "found 'lwo'; use whole numbers such as 512,1024, none, or a level"),
        ("512,", LEVELS, "found ''"),
        ("low", {}, "budget.levels names"),
        ("1e3", LEVELS, "(low, high)"),
        ("99999999999", LEVELS, "whole numbers"),
    ],
)
def test_anything_else_is_one_line(text, levels, says):
    with pytest.raises(UserError) as refusal:
        read(text, levels)
    assert says in str(refusal.value) and "\n" not in str(refusal.value)


def test_levels_are_a_mapping_in_yaml_and_come_back(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("budget:\n  levels: {low: 512, high: 4096}\n")
    config = config_io.load([path])
    assert config.budget.levels == LEVELS and hash(config.budget.levels) == hash(FrozenMap(LEVELS))
    path.write_text(config_io.to_yaml(config))
    again = config_io.load([path])
    assert again == config and config_io.fingerprint(again) == config_io.fingerprint(config)
    assert config_io.override(config, ["budget.levels={low: 8}"]).budget.levels == {"low": 8}
    assert config_io.fingerprint(Config()) != config_io.fingerprint(config)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("[512]", "use a mapping of names to whole numbers"),
        ("{low: few}", "use a whole number"),
        ("{1: 5}", "budget.levels: found the name 1; use text, in quotes"),
    ],
)
def test_levels_of_another_type_are_refused(value, says):
    with pytest.raises(UserError, match=r"budget\.levels") as refusal:
        config_io.override(Config(), [f"budget.levels={value}"])
    assert says in str(refusal.value)


@pytest.mark.parametrize("value", ["{none: 5}", "{8k: 5}", "{'a,b': 5}", "{'': 5}", "{low: -1}"])
def test_names_that_are_no_names_and_budgets_that_are_none_are_refused(value):
    found = [
        line
        for line in problems(config_io.override(Config(), [f"budget.levels={value}"]))
        if "budget.levels" in line
    ]
    assert len(found) == 1


def test_all_budgets_are_those_of_training_and_of_evaluation():
    config = config_io.override(Config(), ["budget.min=2", "budget.max=4"])
    assert all_budgets(config.budget, (8, 3)) == (2, 3, 4, 8)
    choices = config_io.override(config, ["budget.prior=choices", "budget.choices=[2]"])
    assert all_budgets(choices.budget, (8,)) == (2, 4, 8)


def test_a_set_is_selected_by_its_whole_entry_or_by_its_name():
    evaluated = ("math:a", "math:b", "gsm8k:c")
    assert matching_sets("gsm8k", evaluated) == ["gsm8k:c"]
    assert matching_sets("math:b", evaluated) == ["math:b"]
    assert matching_sets("math", evaluated) == ["math:a", "math:b"]
    assert matching_sets("aime", evaluated) == []


def test_a_grace_window_needs_line_breaks():
    ledger = config_io.override(Config(), ["budget.grace=8"])
    assert any("no line break" in line for line in problems(ledger))


def test_the_longest_thinking_of_an_evaluation():
    config = config_io.override(Config(), ["eval.budgets=[0, 512]", "budget.max=4096"])
    assert (cap(config.budget), largest_evaluated(config.budget, config.eval)) == (4096, 512)
    told_none = config_io.override(config, ["eval.no_budget=true", "budget.cap=1000"])
    assert (cap(told_none.budget), largest_evaluated(told_none.budget, told_none.eval)) == (
        1000,
        1000,
    )


SETS = {"eval": ("math500:a/test.jsonl", "gsm8k:b/test.jsonl")}


@pytest.mark.parametrize(
    ("evaluation", "chosen_on"),
    [
        ({"every": 5}, "train_holdout"),
        # One checkpoint is evaluated: nothing to choose from.
        ({}, None),
        ({"select": "gsm8k"}, "gsm8k:b/test.jsonl"),
        ({"select": "gsm8k:b/test.jsonl", "every": 5}, "gsm8k:b/test.jsonl"),
    ],
)
def test_training_questions_select_unless_a_set_is_named(evaluation, chosen_on):
    config = changed(eval=evaluation, data=SETS)
    assert selection_set(config.eval, config.data) == chosen_on


def test_answers_are_counted_for_all_sets_or_for_each():
    math, gsm = SETS["eval"]
    assert samples_of(changed(eval={"samples": 3}).eval, math) == 3
    each = changed(eval={"samples": FrozenMap({"math500": 2, gsm: 0, "gsm8k": 9})}, data=SETS)
    assert [samples_of(each.eval, spec) for spec in (math, gsm)] == [2, 0]
    path_of = config_io.override(each, ["eval.samples={math500: 2, gsm8k: 5}"])
    assert samples_of(path_of.eval, gsm) == 5
    assert [p for c in (each, path_of) for p in samples_problems(c.eval, c.data)] == []


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (
            "{math500: 4, gsm: 16}",
            "{math500: 4, gsm: 16} contains no number for gsm8k:b/test.jsonl, ",
        ),
        ("{}", "contains no number for math500:a/test.jsonl, a set of data.eval; add math500: 4,"),
        ("{math500: -1, gsm8k: 4}", "eval.samples: found -1; it must be 0 or more"),
    ],
)
def test_a_set_without_a_number_of_answers_is_refused(value, says):
    config = config_io.override(
        changed(data={**SETS, "train": "math:a"}), [f"eval.samples={value}"]
    )
    assert any(says in line for line in problems(config))


@pytest.mark.parametrize("value", ["few", "{math500: few}", "[4, 16]", "{math500: 1.5}"])
def test_numbers_of_answers_of_another_type_are_refused(value):
    with pytest.raises(UserError, match="eval.samples.*: found .*; use a whole number"):
        config_io.override(Config(), [f"eval.samples={value}"])


def test_the_base_has_the_compute_type_and_trained_weights_are_float32():
    def of(*overrides):
        config = config_io.load([], list(overrides))
        return param_dtype(config.model, config.adapter)

    assert of() == "float32"
    assert of("adapter.rank=4") == "bfloat16"
    assert of("adapter.rank=4", "model.compute_dtype=float32") == "float32"
    assert of("adapter.rank=4", "model.param_dtype=float32") == "float32"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["model.param_dtype=bfloat16"], "set it to float32, or set adapter.rank=32"),
        (
            ["adapter.path=somewhere"],
            "adapter.path is set, but adapter.rank is null; set adapter.rank to",
        ),
        (["adapter.rank=0"], "adapter.rank: found 0"),
        (
            ["adapter.rank=4", "adapter.targets=[q,q]"],
            "adapter.targets: a matrix appears twice; list each matrix once",
        ),
        (["adapter.rank=4", "adapter.targets=[]"], "adapter.targets"),
        (["adapter.rank=4", "adapter.targets=[w]"], "adapter.targets"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(overrides, says):
    with pytest.raises(UserError) as caught:
        check(config_io.load([], overrides))
    assert says in str(caught.value) and "\n" not in str(caught.value)
