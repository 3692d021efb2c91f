"""Warnings come once, after the trouble has lasted, and not at all in a healthy run."""

import importlib.util
import json
from pathlib import Path

import pytest

from bacr_jax.runs.health import (
    PATIENCE,
    SHORT_PATIENCE,
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


@pytest.mark.parametrize(
    ("trouble", "patience", "says"),
    [
        ({"rollout/closed_answers": 0.86}, SHORT_PATIENCE, "fewer answers are closed"),
        ({"rollout/repetition": 0.13}, SHORT_PATIENCE, "more traces repeat themselves"),
        (
            {"policy/update_kl": 0.2, "policy/update_scale": 0.3},
            SHORT_PATIENCE,
            "more than ten times as large as optimizer.max_update_kl allows",
        ),
        (
            {"policy/update_kl": 0.2, "policy/update_scale": 0.0},  # dropped
            SHORT_PATIENCE,
            "lower optimizer.learning_rate and optimizer.conditioning_learning_rate",
        ),
        ({"advantage/mean": -0.6}, 2, "mean advantage was more than half of its deviation below 0"),
        (
            {"advantage/mean": -0.1, "advantage/std": 0.0},
            2,
            "more than half of its deviation below",
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


def test_the_run_that_lost_its_largest_budget_would_have_been_warned_at_steps_6_and_13():
    """Metrics of a run of recipes/smollm2.sh whose accuracy at 48 tokens went from 56 to 0 %."""
    closed = [1, 1, 1, 1, 1, 0.92, 1, 1, 1, 1, 0.7, 0.77, 0.73, 0.8]
    mean = [0, 0.12, 0.57, 0.03, -0.84, -0.73, 0.28, 0.54, 0.16, -0.16, 0, 0.22, 0.26, -0.22]
    deviation = [1, 0.99, 0.91, 1, 0.61, 0, 1, 0.91, 0.99, 0.97, 0.99, 1, 0.99, 0.9]
    health, warned = RunHealth(), {}
    for step, values in enumerate(zip(closed, mean, deviation), 1):
        names = ("rollout/closed_answers", "advantage/mean", "advantage/std")
        for message in health.warnings(HEALTHY | dict(zip(names, values))):
            warned[step] = message
    assert list(warned) == [6, 13]
    assert "mean advantage" in warned[6] and "closed" in warned[13]


@pytest.mark.parametrize(
    "measured",
    [
        {"policy/update_kl": 0.02, "policy/update_scale": 0.4},
        # No token was in the loss: means over no minibatch are 0.
        {"policy/update_kl": 0.0, "policy/update_scale": 0.0},
    ],
)
def test_an_update_that_is_shortened_a_little_or_not_measured_is_no_trouble(measured):
    assert messages(*[HEALTHY | measured] * 2 * PATIENCE) == []


@pytest.fixture(scope="module")
def replay():
    path = Path(__file__).parents[2] / "benchmarks" / "replay_alarms.py"
    specification = importlib.util.spec_from_file_location("replay_alarms", path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def replayed(replay, monkeypatch, capsys, *folders):
    monkeypatch.setattr("sys.argv", ["replay_alarms.py", *map(str, folders)])
    replay.main()
    *runs, counts = map(json.loads, capsys.readouterr().out.splitlines())
    return runs, counts


def test_alarms_are_replayed_over_committed_runs(replay, monkeypatch, capsys):
    results = Path(__file__).parents[2] / "docs" / "results"
    names = ("smollm2-recipe-cpu", "quickstart-cpu")
    runs, counts = replayed(replay, monkeypatch, capsys, *(results / name for name in names))
    assert runs[0]["alarms"] == {"one_sided": 6, "closed_answers": 13}
    assert [failure.split()[-3:] for failure in runs[0]["failed"]] == [
        ["greedy", "48", "accuracy"],
        ["48", "closed", "answers"],
    ]
    # docs/alarms.md has these numbers.
    assert all(run["alarms"] == {} for run in runs[1:])
    assert counts == {
        "runs": 7, "failed": 3, "failed_with_alarm": 1, "fine": 4, "fine_with_alarm": 0,
        "false_alarms": {},
    }  # fmt: skip


def test_an_alarm_in_a_run_that_did_not_fail_is_a_false_one(replay, monkeypatch, capsys, tmp_path):
    run = tmp_path / "one"
    run.mkdir()
    steps = [HEALTHY] + [HEALTHY | {"rollout/closed_answers": 0.8}] * 3
    lines = [json.dumps({"step": step} | metrics) for step, metrics in enumerate(steps, 1)]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    sets = {"ledger": {"greedy": {"8": {"accuracy": 0.5, "problems": 100}}}}
    evaluations = [{"when": when, "sets": sets} for when in ("before", "after")]
    (run / "eval.jsonl").write_text("".join(json.dumps(one) + "\n" for one in evaluations))
    (report,), counts = replayed(replay, monkeypatch, capsys, run)
    assert report == {"run": "one", "steps": 4, "alarms": {"closed_answers": 4}, "failed": []}
    assert counts["false_alarms"] == {"closed_answers": 1} and counts["fine_with_alarm"] == 1


def test_a_folder_without_a_run_is_refused_in_a_line(replay, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["replay_alarms.py", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        replay.main()
    assert f"{tmp_path}: has neither metrics.jsonl nor" in capsys.readouterr().err


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
