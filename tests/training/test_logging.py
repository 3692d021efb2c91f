"""What an iteration reports."""

import inspect
import json
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.curriculum import init_curriculum
from bacr_jax.rollout import Rollout
from bacr_jax.training.logging import (
    Clock,
    budgets_by_group,
    grader_metrics,
    schedule_metrics,
    write_traces,
)
from bacr_jax.types import CLOSED_BY_BUDGET, CLOSED_BY_TAG, Branches, Trunks
from methods_world import load


def test_budgets_are_described_by_the_group_that_was_asked():
    budgets = np.array([[10, 20], [30, 40], [5, 5]])
    metrics = budgets_by_group(np.array([2, 2, 0]), budgets)
    # of 10, 20, 30, 40: quantile q lies at 10 + 30 q
    assert metrics["budget/p10_2"] == pytest.approx(13)
    assert metrics["budget/median_2"] == pytest.approx(25)
    assert metrics["budget/p90_2"] == pytest.approx(37)
    assert metrics["budget/median_0"] == 5 and "budget/median_1" not in metrics


def test_what_befalls_a_process_is_kept_apart_from_what_the_grader_decides():
    before = {"graded": 10, "worker_deaths": 0, "timeouts": 1, "cache_hits": 4}
    after = {"graded": 26, "worker_deaths": 1, "timeouts": 1, "cache_hits": 9}
    assert grader_metrics(before, after) == {
        "grader/graded": 16, "process/grader_worker_deaths": 1, "process/grader_timeouts": 0,
        "process/grader_cache_hits": 5,
    }  # fmt: skip


def test_a_groups_rate_and_location_are_means_over_its_members(tmp_path):
    config = load(tmp_path)
    schedule = init_curriculum(3, mu0=(4.0, 8.0, 12.0))
    metrics = schedule_metrics(
        schedule, jnp.array([0.5, 0.25, 0.25]), np.array([0, 0, 1]), config=config
    )
    assert metrics["curriculum/mu_0"] == pytest.approx(6) and metrics["curriculum/mu_1"] == 12
    assert metrics["curriculum/weight_0"] == pytest.approx(0.75)
    # groups without problems
    assert metrics["curriculum/mu_2"] == metrics["curriculum/weight_3"] == 0


def test_laps_of_the_same_name_add_up():
    clock = Clock()
    for _ in range(2):
        clock.lap("plan")
    clock.lap("learn")
    assert set(clock.laps) == {"time/plan", "time/learn"}
    assert sum(clock.laps.values()) <= clock.total


def test_a_trace_is_cut_where_its_answers_were_asked(tmp_path, ledger_tokens):
    ids = lambda text: ledger_tokens(text, add_special_tokens=False)["input_ids"]
    tokens = np.array([ids("<bos>4a2<think>a4+2=6")] * 2)
    trunks = Trunks(
        tokens, np.array([5, 5]), np.array([6, 6]), np.array([6, 6]),
        np.array([CLOSED_BY_TAG, CLOSED_BY_BUDGET]), np.array([8, 6]), np.zeros((2, 6)),
    )  # fmt: skip
    branches = Branches(
        np.zeros((2, 2, 1), int), np.array([[8, 11]] * 2), np.ones((2, 2), int),
        np.ones((2, 2), int), np.ones((2, 2), bool), np.array([[0, 1]] * 2), np.zeros((2, 2, 1)),
    )  # fmt: skip
    environment = SimpleNamespace(
        tokenizer=ledger_tokens, answer_texts=lambda branches: [["<answer>4", "<answer>6"]] * 2
    )
    outcomes = np.array([[[0.0, 1.0]], [[0.0, 1.0]]])
    path = tmp_path / "traces.jsonl"
    # The environment here has no more than is asked of it.
    inspect.unwrap(write_traces)(
        path, 3, environment, Rollout(trunks, branches, {}), outcomes, count=1
    )
    (line,) = map(json.loads, path.read_text().splitlines())
    assert line["prompt"] == "<bos>4a2<think>" and line["thinking"] == "a4+2=6"
    assert line["segments"] == ["a4+", "2=6", ""] and line["context"] == [3, 6]
    assert line["closed_by"] == "tag" and line["step"] == 3 and line["budget"] == 8
    assert line["outcomes"] == [0.0, 1.0]
