"""Tests the metrics of an iteration."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.config.settings import resolve
from bacr_jax.curriculum import init_curriculum
from bacr_jax.training.logging import (
    Clock,
    budgets_by_group,
    closed_answers_by_budget,
    grader_metrics,
    host_metrics,
    schedule_metrics,
    thinking_by_verdict,
)
from methods_world import group_batch, load


def test_budgets_are_described_by_the_group_that_was_asked():
    budgets = np.array([[10, 20], [30, 40], [5, 5]])
    metrics = budgets_by_group(np.array([2, 2, 0]), budgets)
    # Quantile q of 10, 20, 30, 40 is 10 + 30 q.
    assert metrics["budget/p10_2"] == pytest.approx(13)
    assert metrics["budget/median_2"] == pytest.approx(25)
    assert metrics["budget/p90_2"] == pytest.approx(37)
    assert metrics["budget/median_0"] == 5 and "budget/median_1" not in metrics


def test_closed_answers_are_counted_at_each_budget():
    budgets = np.array([8, 48, 8, 8])
    closed = np.array([[True, True], [False, True], [True, False], [True, True]])
    assert closed_answers_by_budget(budgets, closed) == pytest.approx({
        "rollout/closed_answers_8": 5 / 6, "budget/traces_8": 3,
        "rollout/closed_answers_48": 0.5, "budget/traces_48": 1,
    })  # fmt: skip


def test_thinking_is_split_by_the_verdict_on_the_last_answer(tmp_path):
    """Right: 4 and 8 tokens. Wrong: 6 and 2. Half right: 10 tokens, which count half for each."""
    config = load(tmp_path, "grpo", "rollout.questions=1", "rollout.group_size=5")
    outcomes = np.array([[[1.0], [0.0], [1.0], [0.0], [0.5]]])
    batch = dataclasses.replace(
        group_batch(config, outcomes=outcomes), thinking=jnp.array([[4, 6, 8, 2, 10]])
    )
    assert thinking_by_verdict(batch) == pytest.approx(
        {"rollout/thinking_right": 17 / 2.5, "rollout/thinking_wrong": 13 / 2.5}
    )


@pytest.mark.parametrize(("outcome", "name"), [(1.0, "right"), (0.0, "wrong")])
def test_a_verdict_without_traces_has_no_thinking(tmp_path, outcome, name):
    config = load(tmp_path, "grpo", "rollout.questions=1", "rollout.group_size=2")
    batch = dataclasses.replace(
        group_batch(config, outcomes=np.full((1, 2, 1), outcome)), thinking=jnp.array([[4, 6]])
    )
    assert thinking_by_verdict(batch) == {f"rollout/thinking_{name}": 5.0}


def test_what_befalls_a_process_is_kept_apart_from_what_the_grader_decides():
    before = {"graded": 10, "worker_deaths": 0, "timeouts": 1, "cache_hits": 4}
    after = {"graded": 26, "worker_deaths": 1, "timeouts": 1, "cache_hits": 9}
    assert grader_metrics(before, after) == {
        "grader/graded": 16, "process/grader_worker_deaths": 1, "process/grader_timeouts": 0,
        "process/grader_cache_hits": 5,
    }  # fmt: skip


def test_a_hosts_own_work_is_drawing_and_its_share_of_grading(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "bacr_jax.parallel.processes.slowest", lambda seconds: asked.append(seconds) or {}
    )
    clock = Clock()
    clock.laps |= {"time/plan": 0.5, "time/verify": 9.0}
    before, after = ({"graded": 1}, 2.0), ({"graded": 4}, 3.25)
    assert host_metrics(clock, before, after) == {"grader/graded": 3}
    # A batch that was planned one iteration ahead has no planning time in this iteration.
    host_metrics(Clock(), before, after)
    assert asked == [1.75, 1.25]


def test_scores_that_rewards_failed_to_give_befall_the_process():
    counts = {"graded": 2, "rewards_failed": 1}
    found = grader_metrics(dict.fromkeys(counts, 0), counts)
    assert found == {"grader/graded": 2, "process/grader_rewards_failed": 1}


def test_every_group_has_a_location_a_rate_and_a_weight(tmp_path):
    schedule = init_curriculum(4, mu0=(4.0, 6.0, 8.0, 12.0))
    metrics = schedule_metrics(
        schedule, jnp.array([0.5, 0.25, 0.25, 0.0]), settings=resolve(load(tmp_path)).method
    )
    assert metrics["curriculum/mu_0"] == 4 and metrics["curriculum/mu_3"] == 12
    assert metrics["curriculum/pass_rate_1"] == metrics["curriculum/weight_0"] == 0.5
    assert metrics["curriculum/weight_3"] == 0


def test_laps_of_the_same_name_add_up():
    clock = Clock()
    for _ in range(2):
        clock.lap("plan")
    clock.lap("learn")
    assert set(clock.laps) == {"time/plan", "time/learn"}
    assert sum(clock.laps.values()) <= clock.total
