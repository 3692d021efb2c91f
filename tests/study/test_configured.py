"""What is read off a study's configs: how arms train, and which rows are one problem."""

import numpy as np

from bacr_jax.evaluation.samples import subset
from bacr_jax.questions.ledger import make_problems
from bacr_study.cells import ids_digest
from bacr_study.configured import SHOWN, configured, with_sets
from study_world import STUDY, planned


def test_arms_and_votes_have_the_settings_of_their_runs(tmp_path):
    study, runs, _ = planned(tmp_path, "seeds=[0]")
    found = configured(study, runs).settings
    assert set(found) == {("plain", arm) for arm in ("grpo", "vote", "bacr")}
    assert found["plain", "vote"] == found["plain", "grpo"]
    assert found["plain", "bacr"] == dict(zip(SHOWN, (1, 0.0, 1.0e-4)))


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


def test_levels_of_their_own_are_a_set(tmp_path):
    text = STUDY.replace("budgets: [8, 64]}", "budgets: [8, 64], hard_levels: [4, 5]}", 1)
    study, runs, _ = planned(tmp_path, text=text)
    found = configured(study, runs).problems
    hard = found["plain", "ledger, levels 4, 5"]
    assert set(hard.levels.tolist()) <= {4, 5}
    assert hard.counts["rows"] == int((found["plain", "ledger"].levels > 3).sum())
