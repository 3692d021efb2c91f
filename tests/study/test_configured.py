"""What is read off a study's configs: how arms train, and which rows are one problem."""

import dataclasses

import numpy as np
import pytest

from bacr_jax.errors import UserError
from bacr_jax.evaluation.samples import subset
from bacr_jax.questions.ledger import make_problems
from bacr_study.cells import ids_digest
from bacr_study.configured import (
    SHOWN,
    check_evaluation,
    check_hard_levels,
    configured,
    held_out_budgets,
    held_out_warnings,
    with_sets,
)
from study_world import STUDY, planned


def test_arms_and_votes_have_the_settings_of_their_runs(tmp_path):
    study, runs, _ = planned(tmp_path, "seeds=[0]")
    found = configured(study, runs).settings
    assert set(found) == {("plain", arm) for arm in ("grpo", "vote", "bacr")}
    assert found["plain", "vote"] == found["plain", "grpo"]
    assert found["plain", "bacr"] == dict(zip(SHOWN, (1, 0.0, 1.0e-4)))


def held_out(folder, *overrides):
    """Returns the held-out budgets of the runs of a study of two trained arms and another."""
    untrained = "  start: {label: S, set: {train.steps: 0}}\n  bacr:"
    text = STUDY.replace("  bacr:", untrained)
    _, runs, _ = planned(folder, "seeds=[0]", *overrides, text=text)
    return held_out_budgets(runs)


def test_held_out_accuracy_is_measured_at_the_budgets_of_the_config(tmp_path):
    arms = [("plain", "grpo"), ("plain", "bacr")]
    # Without evaluations during training, no held-out questions are evaluated.
    assert held_out(tmp_path) == {}
    assert held_out(tmp_path, "eval.every=5", "eval.select=ledger") == {}
    assert held_out(tmp_path, "eval.every=5") == dict.fromkeys(arms, [8, 64])
    # The mean is over positive budgets.
    budgets = held_out(tmp_path, "eval.every=5", "eval.budgets=[0,16,32]")
    assert budgets == dict.fromkeys(arms, [16, 32])


@pytest.mark.parametrize(
    ("budgets", "names"),
    [
        ([], None),
        ([[8, 64]], None),
        ([[8, 1024]], "8, 1,024"),
        ([[8, 64], [8]], "8"),
        ([[16], [8]], "16 or 8"),
    ],
)
def test_held_out_accuracy_at_other_budgets_than_the_tables_is_a_warning(tmp_path, budgets, names):
    study, _, _ = planned(tmp_path)
    expected = []
    if names is not None:
        expected = [
            "plain: held-out accuracy during training is a mean over the budgets "
            f"{names} (eval.budgets), but the tables have the budgets 8, 64"
        ]
    assert list(held_out_warnings(study.tasks[0], budgets)) == expected


def test_budget_0_is_in_no_mean_and_causes_no_warning(tmp_path):
    study, _, _ = planned(tmp_path)
    task = dataclasses.replace(study.tasks[0], budgets=(0, 8, 64))
    assert list(held_out_warnings(task, [[8, 64]])) == []


def test_an_arm_that_is_not_run_is_no_reference(tmp_path):
    study, _, _ = planned(tmp_path, "arms=[bacr]")
    assert study.reference == ("grpo",) and study.references == ()
    study, _, _ = planned(tmp_path)
    assert study.references == ("grpo",)


def test_tasks_are_shown_on_the_first_set_that_their_config_or_they_name(tmp_path):
    study, runs, _ = planned(tmp_path)
    assert [task.main for task in with_sets(study, runs).tasks] == ["ledger"]
    text = STUDY.replace("budgets: [8, 64]}", "budgets: [8, 64], data: [math:a, ledger]}", 1)
    study, runs, _ = planned(tmp_path, text=text)
    assert [(task.main, task.hard) for task in with_sets(study, runs).tasks] == [("math:a", "")]


def test_rows_of_a_made_set_are_one_problem_if_their_question_is(tmp_path):
    text = STUDY.replace("samples: 2, size: 10", "samples: 2, size: 300")
    study, runs, _ = planned(tmp_path, text=text)
    found = configured(study, runs).problems["plain", "ledger"]
    ledger = runs[0].config.data.ledger
    every = make_problems(0, 2000, max_operand=ledger.max_operand, split="test")
    asked = [every[i] for i in subset(2000, 300, 0)]
    counts = {k: found.counts[k] for k in ("rows", "distinct_problems")}
    assert counts == {"rows": 300, "distinct_problems": len({one.question for one in asked})}
    # Start digits times operands, a fifth of them held out.
    first = found.counts["levels"]["1"]
    assert first["distinct_problems"] == 10 * ledger.max_operand // 5 < first["rows"]
    assert np.array_equal(found.levels, [one.level for one in asked])
    assert found.digest == ids_digest([f"ledger-test-{i}" for i in subset(2000, 300, 0)])


def with_levels(levels, sets="[ledger]", views="[accuracy]"):
    """Returns a study whose task has hard levels, and whose ledger has levels 1 to 5."""
    keys = f"budgets: [8, 64], hard_levels: {levels}, data: {sets}}}"
    text = STUDY.replace("budgets: [8, 64]}", keys, 1).replace("samples: 2, size: 10", "samples: 2")
    return f"views: {views}\n{text}"


@pytest.fixture
def without_levels(tmp_path):
    """Returns the name of a set whose problems have no level."""
    path = tmp_path / "gsm8k.jsonl"
    path.write_text('{"question": "One?", "answer": "#### 1"}\n')
    return f"gsm8k:{path}"


def test_hard_levels_that_some_set_has_are_accepted(tmp_path, without_levels):
    for sets in ("[ledger]", f"['{without_levels}', ledger]"):
        study, runs, _ = planned(tmp_path, text=with_levels("[5]", sets))
        check_hard_levels(study, runs[0])
    # Without hard levels, no set is read.
    study, runs, _ = planned(tmp_path, text=with_levels("[]", "[math:nowhere]"))
    check_hard_levels(study, runs[0])


def test_hard_levels_that_no_set_has_are_refused(tmp_path, without_levels):
    cases = [
        (f"['{without_levels}']", "[accuracy]", "have no levels; use levels that they have"),
        # The view shows the first set only.
        (f"['{without_levels}', ledger]", "[hard]", "have no levels; use levels that they have"),
    ]
    for sets, views, words in cases:
        study, runs, _ = planned(tmp_path, text=with_levels("[5]", sets, views))
        where = r"tasks\.plain\.hard_levels: found \[5\], but the evaluated problems of gsm8k:"
        with pytest.raises(UserError, match=f"{where}.* {words}") as refused:
            check_hard_levels(study, runs[0])
        assert len(refused.value.lines) == 1


def test_a_subset_without_problems_of_the_hard_levels_is_refused(tmp_path):
    study, runs, _ = planned(tmp_path, text=with_levels("[5]"))
    rows = configured(study, runs).problems["plain", "ledger"].levels
    sizes = {}
    for size in range(1, 6):
        levels = rows[subset(len(rows), size, 0)]
        sizes[size] = 5 in levels
    assert set(sizes.values()) == {True, False}
    for size, is_hard in sizes.items():
        study, runs, _ = planned(tmp_path, f"evaluation.size={size}", text=with_levels("[5]"))
        if is_hard:
            check_hard_levels(study, runs[0])
            continue
        with pytest.raises(UserError, match="evaluated problems of ledger have levels [1-4]"):
            check_hard_levels(study, runs[0])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            "budgets: [8, 40000]",
            "tasks.plain.budgets: found 40000, but the model has only 32768 positions for prompt, "
            "thinking and answer together; use smaller budgets",
        ),
        ("budgets: [8], data: [ledger, 'gsm8k:nowhere.jsonl']", "tasks.plain.data: "),
    ],
)
def test_what_only_the_evaluation_needs_is_checked_before_training(tmp_path, keys, message):
    study, runs, _ = planned(tmp_path, text=STUDY.replace("budgets: [8, 64]", keys, 1))
    with pytest.raises(UserError) as refused:
        check_evaluation(study, runs[0])
    assert str(refused.value).startswith(message) and len(refused.value.lines) == 1
    study, runs, _ = planned(tmp_path)
    check_evaluation(study, runs[0])


def test_levels_of_their_own_are_a_set(tmp_path):
    text = STUDY.replace("budgets: [8, 64]}", "budgets: [8, 64], hard_levels: [4, 5]}", 1)
    study, runs, _ = planned(tmp_path, text=text)
    found = configured(study, runs).problems
    hard = found["plain", "ledger, levels 4, 5"]
    assert set(hard.levels.tolist()) <= {4, 5}
    assert hard.counts["rows"] == int((found["plain", "ledger"].levels > 3).sum())
