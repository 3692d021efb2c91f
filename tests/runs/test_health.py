"""Warnings come once, after the trouble has lasted, and not at all in a healthy run."""

import json

import numpy as np
import pytest

from bacr_jax.runs.health import (
    PATIENCE,
    SHORT_PATIENCE,
    SYMPTOMS,
    RunHealth,
    VerifierWatch,
    all_failed,
)

HEALTHY = {"reward/cut_1": 0.4, "reward/cut_2": 0.6, "policy/clipped_share": 0.02,
           "rollout/closed_answers": 0.97, "rollout/repetition": 0.02,
           "advantage/mean": 0.1, "advantage/std": 1.0, "policy/ratio": 1.0,
           "mismatch/k3": 1e-8, "mismatch/absolute": 0.02,
           "grader/graded": 100.0, "process/grader_timeouts": 1.0}  # fmt: skip
OFF_CENTRE = {"advantage/score_offset": -0.1, "advantage/mean": 0.6, "advantage/std": 1.0}


def messages(*metrics):
    health = RunHealth()
    return [m for one in metrics for m in health.warnings(one)]


def test_a_healthy_run_hears_nothing():
    assert messages(*[HEALTHY] * 200) == []


@pytest.mark.parametrize(
    ("trouble", "says"),
    [
        ({"reward/cut_1": 0.0, "reward/cut_2": 0.0}, "no answer was right"),
        ({"reward/cut_1": 1.0, "reward/cut_2": 1.0}, "nothing is left to learn"),
        ({"policy/clipped_share": 0.9}, "optimizer.learning_rate or fewer train.minibatches"),
        ({"process/grader_worker_deaths": 30.0}, "worker processes crashed"),
        ({"process/grader_timeouts": 30.0}, "or timed out"),
        (
            OFF_CENTRE | {"policy/ratio": 0.999},
            "the mean advantage differs from 0 by more than half a standard deviation",
        ),
        ({"process/slowest_host": 1.0, "process/slowest_host_times": 3.5}, "three times as long"),
    ],
)
def test_each_trouble_is_told_once_when_it_lasts(trouble, says):
    bad = HEALTHY | trouble
    assert messages(*[bad] * (PATIENCE - 1), HEALTHY, *[bad] * (PATIENCE - 1)) == []
    (message,) = messages(*[bad] * 5 * PATIENCE)
    assert says in message


@pytest.mark.parametrize(
    ("trouble", "patience", "says"),
    [
        ({"rollout/closed_answers": 0.86}, SHORT_PATIENCE, "fewer answers than at the first step"),
        ({"rollout/repetition": 0.13}, SHORT_PATIENCE, "more traces than at the first step"),
        (
            {"policy/update_kl": 0.5, "policy/update_scale": 0.1},
            SHORT_PATIENCE,
            "was more than a hundred times optimizer.max_update_kl",
        ),
        (
            # An update is dropped if its KL is not finite.
            {"policy/update_kl": float("nan"), "policy/update_scale": 0.0},
            SHORT_PATIENCE,
            "so each of them was shortened or dropped",
        ),
        (
            {"policy/update_kl": 0.2, "policy/update_scale": 0.0},  # dropped
            SHORT_PATIENCE,
            "lower optimizer.learning_rate and optimizer.conditioning_learning_rate",
        ),
        (
            {"advantage/mean": -0.6},
            2,
            "mean advantage was below 0 by more than half a standard deviation",
        ),
        (
            {"advantage/mean": -0.1, "advantage/std": 0.0},
            2,
            "below 0 by more than half a standard",
        ),
    ],
)
def test_signs_of_a_ruined_policy_are_told_within_three_steps(trouble, patience, says):
    bad = HEALTHY | trouble
    assert messages(HEALTHY, *[bad] * (patience - 1), HEALTHY) == []
    (message,) = messages(HEALTHY, *[bad] * 20)
    assert says in message
    # A policy that was so at its first step has not been ruined in training.
    if "rollout" in str(trouble):
        assert messages(*[bad] * 20) == []


def warnings_by_step(**columns):
    """Replays steps of a run, given as one list for each metric, and returns the warned alarms."""
    health = RunHealth()
    names = {symptom.message: name for name, symptom in SYMPTOMS.items()}
    warned = {}
    for step, values in enumerate(zip(*columns.values()), 1):
        metrics = {name.replace("__", "/"): value for name, value in zip(columns, values)}
        for message in health.warnings(metrics):
            warned[names[message]] = step
    return warned


def test_the_run_that_lost_its_largest_budget_is_warned_at_steps_6_and_13():
    """Metrics of a run of recipes/smollm2.sh whose accuracy at 48 tokens went from 56 to 0 %."""
    warned = warnings_by_step(
        reward__cut_1=[.19, .14, .39, .28, .03, 0, .19, .39, .25, .12, .16, .23, .25, .08],
        rollout__closed_answers=[1, 1, 1, 1, 1, .92, 1, 1, 1, 1, .7, .77, .73, .8],
        advantage__mean=[0, .12, .57, .03, -.84, -.73, .28, .54, .16, -.16, 0, .22, .26, -.22],
        advantage__std=[1, .99, .91, 1, .61, 0, 1, .91, .99, .97, .99, 1, .99, .9],
    )  # fmt: skip
    assert warned == {"collapse": 6, "one_sided": 6, "closed_answers": 13}


def test_a_run_that_a_single_update_ruined_is_warned_after_its_second_step_without_a_reward():
    """Metrics of SmolLM2 at twice the recipe's rates: the second update ruined all budgets.

    Its third and later steps have no right answer, so the mean advantage is 0.
    """
    warned = warnings_by_step(
        reward__cut_1=[.25, .14, 0, 0, 0, 0],
        rollout__closed_answers=[1, 1, 0, 0, 0, 0],
        rollout__repetition=[0, 0, .23, .53, .53, .31],
        advantage__mean=[0, -.27, -.59, 0, 0, 0],
        advantage__std=[1, .95, 0, 0, 0, 0],
    )  # fmt: skip
    assert warned == {"collapse": 4, "closed_answers": 5, "repetition": 5}


def test_one_step_of_few_right_answers_is_no_collapse():
    """Metrics of a run of SmolLM2 that kept learning, with eight questions a step."""
    accuracy = [.36, .09, .34, .06, .20, .41, .22, .06, .27, .30, .17, .38, .06, .20]  # fmt: skip
    assert warnings_by_step(reward__cut_1=accuracy) == {}


@pytest.mark.parametrize(
    "measured",
    [
        {"policy/update_kl": 0.14, "policy/update_scale": 0.11},
        # No token was in the loss: means over no minibatch are 0.
        {"policy/update_kl": 0.0, "policy/update_scale": 0.0},
    ],
)
def test_an_update_that_is_shortened_a_little_or_not_measured_is_no_trouble(measured):
    assert messages(*[HEALTHY | measured] * 2 * PATIENCE) == []


@pytest.mark.parametrize("mean", [0.0, -1e-9, -1e-7, 1e-9])
def test_equal_advantages_whose_mean_is_a_rounding_error_are_no_trouble(mean):
    equal = {"advantage/mean": mean, "advantage/std": 0.0}
    assert messages(*[HEALTHY | equal] * 2 * PATIENCE) == []


def accuracies(*values):
    return [HEALTHY | {"reward/cut_1": value, "reward/cut_2": value} for value in values]


def test_a_low_reward_that_is_lost_is_told_after_four_steps():
    low = [0.1, 0.08, 0.1, 0.05, 0.02]
    (message,) = messages(*accuracies(*low, 0, 0, 0, 0))
    assert "no answer was right for 4 steps" in message and "optimizer.learning_rate" in message
    assert messages(*accuracies(*low[1:], 0, 0, 0, 0)) == []
    # A policy that had a step without a right answer before has such steps by chance.
    assert messages(*accuracies(*low, 0, 0, 0, *low, 0, 0, 0, 0)) == []
    assert messages(*accuracies(0, *low, *low, 0, 0, 0, 0)) == []
    # Above an accuracy of .2, the alarm `collapse` is earlier.
    (message,) = messages(*accuracies(0.3, *low, 0, 0, 0, 0))
    assert "collapsed" in message


@pytest.mark.parametrize("traces", [16, 32, 64])
def test_a_policy_that_does_not_change_has_lost_no_reward(traces):
    """At most 0.5 % of such runs have this alarm, whatever the accuracy and the batch are."""
    rng = np.random.default_rng(traces)
    alarms = 0
    for accuracy in (0.02, 0.06, 0.1):
        for right in rng.binomial(traces, accuracy, (20, 100)):
            alarms += "lost_reward" in warnings_by_step(reward__cut_1=right / traces)
    assert alarms <= 1  # of 60 runs


@pytest.mark.parametrize("stop", range(1, 9))
def test_a_resumed_monitor_knows_whether_earlier_steps_had_right_answers(stop):
    steps = accuracies(0.1, 0.08, 0.1, 0.05, 0.02, 0, 0, 0, 0)
    first = RunHealth()
    assert [m for one in steps[:stop] for m in first.warnings(one)] == []
    resumed = RunHealth()
    resumed.resume(json.loads(json.dumps(first.to_record())))
    assert len([m for one in steps[stop:] for m in resumed.warnings(one)]) == 1


def at_budgets(traces=16, **shares):
    """Metrics of a step with the same number of traces at each budget."""
    metrics = dict(HEALTHY)
    for name, share in shares.items():
        metrics[f"rollout/closed_answers_{name[1:]}"] = share
        metrics[f"budget/traces_{name[1:]}"] = float(traces)
    return metrics


def test_answers_that_are_not_closed_at_one_budget_are_told_though_the_mean_is_fine():
    start = at_budgets(b8=1.0, b48=1.0)
    (message,) = messages(start, *[at_budgets(b8=1.0, b48=0.6)] * 3)
    assert "rollout/closed_answers_BUDGET" in message
    # It must last at one budget, not at one after the other.
    assert messages(start, *[at_budgets(b8=1.0, b48=0.6), at_budgets(b8=0.6, b48=1.0)] * 10) == []
    # A step without traces of this budget does not end the count.
    gap = at_budgets(b8=1.0)
    bad = at_budgets(b8=1.0, b48=0.6)
    assert len(messages(start, bad, gap, bad, gap, bad)) == 1
    # So were its answers from the start.
    assert messages(*[bad] * 10) == []


@pytest.mark.parametrize(
    ("traces", "share", "warns"),
    # Four standard errors of .95: .22 with 16 traces, .054 with 256, where the bound is .1.
    [(16, 0.80, False), (16, 0.75, True), (256, 0.91, False), (256, 0.89, True)],
)
def test_the_bound_at_one_budget_allows_for_the_number_of_traces(traces, share, warns):
    steps = [at_budgets(traces, b8=1.0), *[at_budgets(traces, b8=share)] * 3]
    assert len(messages(*steps)) == warns
    # The first step may have fewer traces than the others.
    steps = [at_budgets(16, b8=1.0), *[at_budgets(traces, b8=0.80)] * 3]
    assert messages(*steps) == []


def test_a_sampler_that_disagrees_is_told_at_once_with_the_likely_causes():
    (message,) = messages(HEALTHY, HEALTHY | {"mismatch/absolute": 0.2}, HEALTHY)
    for cause in ("old weights", "temperature or top-p", "--dtype"):
        assert cause in message


def test_a_run_s_own_limit_says_how_far_sampler_and_learner_may_be_apart():
    apart = HEALTHY | {"mismatch/absolute": 0.02}
    health = RunHealth(1e-3)
    (message,) = [m for _ in range(3) for m in health.warnings(apart)]
    assert "a server probably has old weights" in message
    assert messages(apart) == []


def test_a_baseline_off_centre_is_no_trouble_where_sampler_and_learner_are_one_policy():
    assert messages(*[HEALTHY | OFF_CENTRE] * 2 * PATIENCE) == []
    assert messages(*[HEALTHY | OFF_CENTRE | {"mismatch/k3": 1e-4}] * 2 * PATIENCE) != []


def test_a_reward_that_falls_from_its_best_has_collapsed():
    wrong = HEALTHY | {"reward/cut_1": 0.02, "reward/cut_2": 0.02}
    (message,) = messages(*[HEALTHY] * 30, *[wrong] * 30)
    assert "collapsed" in message and "best.json" in message
    # From the start on it is a hard task, no collapse.
    assert messages(*[wrong] * 60) == []


def test_a_verifier_fails_if_it_gave_no_answer_a_score_between_two_totals():
    before = {"a": (10, 4), "b": (10, 0), "c": (7, 7)}
    now = {"a": (20, 14), "b": (20, 9), "c": (7, 7)}
    assert all_failed(before, now) == {"a": True, "b": False}


def test_three_failing_steps_in_a_row_are_noticed_and_steps_without_answers_are_passed_over():
    watch = VerifierWatch()
    failing, fine, none = {"a": (4, 4)}, {"a": (4, 3)}, {"a": (0, 0)}
    steps = [failing, failing, fine, failing, none, failing, failing]
    found = [watch.after_step({"a": (0, 0)}, step) for step in steps]
    assert found == [[], [], [], [], [], [], ["a"]]


def closing(*shares):
    """Metrics of steps with these shares of closed answers."""
    sound = {"reward/cut_1": 0.5, "reward/mean": 0.5}
    return [{**sound, "rollout/closed_answers": share} for share in shares]


def test_a_resumed_monitor_continues_as_if_the_run_had_not_stopped():
    """The history is stored, because metrics.jsonl lacks steps if output.log_every is above 1."""
    steps = closing(0.99, 0.99, 0.88, 0.88, 0.88, 0.88)
    (message,) = messages(*steps)
    for stop in range(1, len(steps)):
        first = RunHealth()
        before = [m for one in steps[:stop] for m in first.warnings(one)]
        resumed = RunHealth()
        resumed.resume(json.loads(json.dumps(first.to_record())))
        after = [m for one in steps[stop:] for m in resumed.warnings(one)]
        assert before + after == [message], stop
