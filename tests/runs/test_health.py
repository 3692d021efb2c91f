"""Warnings come once, after the trouble has lasted, and not at all in a healthy run."""

import pytest

from bacr_jax.runs.health import PATIENCE, RunHealth, VerifierWatch, all_failed

HEALTHY = {"reward/cut_1": 0.4, "reward/cut_2": 0.6, "policy/clipped_share": 0.02,
           "policy/ratio": 1.0, "mismatch/k3": 1e-8, "mismatch/absolute": 0.02,
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
        ({"reward/cut_1": 0.0, "reward/cut_2": 0.0}, "not one right answer"),
        ({"reward/cut_1": 1.0, "reward/cut_2": 1.0}, "nothing is left to learn"),
        ({"policy/clipped_share": 0.9}, "optimizer.learning_rate or train.minibatches"),
        ({"process/grader_worker_deaths": 30.0}, "workers die"),
        ({"process/grader_timeouts": 30.0}, "run out of time"),
        (
            OFF_CENTRE | {"policy/ratio": 0.999},
            "the mean advantage is more than half of its deviation away from 0",
        ),
        ({"process/slowest_host": 1.0, "process/slowest_host_times": 3.5}, "three times as long"),
    ],
)
def test_each_trouble_is_told_once_when_it_lasts(trouble, says):
    bad = HEALTHY | trouble
    assert messages(*[bad] * (PATIENCE - 1), HEALTHY, *[bad] * (PATIENCE - 1)) == []
    (message,) = messages(*[bad] * 5 * PATIENCE)
    assert says in message


def test_a_sampler_that_disagrees_is_told_at_once_with_the_likely_causes():
    (message,) = messages(HEALTHY, HEALTHY | {"mismatch/absolute": 0.2}, HEALTHY)
    for cause in ("old weights", "temperature or top-p", "--dtype"):
        assert cause in message


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
