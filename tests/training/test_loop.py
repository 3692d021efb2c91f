"""Tests that a run that was stopped or killed has the same results as an uninterrupted run."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import numpy as np
import pytest

from bacr_jax.files import read_lines
from bacr_jax.parallel.peers import Peers
from bacr_jax.parallel.preemption import EXIT_CODE
from bacr_jax.runs.metrics import without_timings
from whole_runs import WHOLE_RUN, StopAt, assert_same_run

CONFIGS = Path(__file__).parents[2] / "configs"
# Overrides of the quickstart: one layer, and a warm-up after which some answers are correct.
QUICK = (
    *("model.num_layers=1", "data.ledger.train_size=640", "output.report=false"),
    *(
        "warmup.steps=120",
        "warmup.target_accuracy=0",
        "warmup.short_accuracy=0",
        "warmup.hold_accuracy=0",
    ),
    *("rollout.questions=8", "train.micro_batch_rows=8", "eval.size=40", "eval.samples=1"),
    *("train.steps=10", "checkpoint.every=2", "eval.every=3", "output.tensorboard=false"),
)
FAST = ("eval.every=3", "eval.samples=0", "output.tensorboard=false", "train.steps=6")
FAST += ("output.report=false",)
REFILLED = ("rollout.slots=6", "rollout.windows=2", "rollout.refill=0.25")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "small.yaml"
    path.write_text(WHOLE_RUN)
    return path


def arguments(config, folder, *overrides):
    return ["--config", str(config), f"output.dir={folder}", *FAST, *overrides]


def train(*command):
    from bacr_jax.train import main

    return main(list(command))


@pytest.mark.parametrize(
    ("most", "used", "step", "expected"),
    [
        (None, 900, 3, 50),
        (1000, 0, 0, 50),
        (1000, 300, 3, 10),
        (1000, 301, 3, 10),  # 9.97 steps, rounded up
        (1000, 999, 7, 8),
        (1000, 1000, 7, 7),  # no tokens left, so this was the last step
        (1000, 1, 1, 50),
    ],
)
def test_steps_in_all_are_those_that_the_allowance_of_tokens_lasts(most, used, step, expected):
    from bacr_jax.training.loop import Trainer
    from bacr_jax.training.run import RunState

    settings = SimpleNamespace(train=SimpleNamespace(max_generated_tokens=most))
    trainer, state = SimpleNamespace(steps=50, config=settings), Mock(spec=RunState)
    state.generated_tokens = used
    assert Trainer.expected_steps(trainer, state, step) == expected


@pytest.mark.parametrize("stage", [None, "a stage"])
def test_a_supervised_stage_is_saved_before_anything_else_is_done(monkeypatch, stage):
    from bacr_jax.training import initialize
    from bacr_jax.training.loop import Trainer
    from bacr_jax.training.run import RunState

    trainer = Trainer.__new__(Trainer)
    trainer.checkpoints = SimpleNamespace(latest=None)
    trainer.method = SimpleNamespace(rejection_sft=stage)
    trainer.folder = trainer.progress = trainer.poll = trainer.run = Mock()
    trainer.writes = False
    trainer._record_origin = Mock()
    trainer.save = Mock()
    fresh, after = Mock(RunState), Mock(RunState)
    monkeypatch.setattr(initialize, "initial_state", lambda *_: (trainer.run, fresh))
    monkeypatch.setattr(initialize, "after_rejection_sft", lambda run, state, *_: after)
    assert trainer.start() == (after, 0)
    assert trainer.save.call_args_list == ([] if stage is None else [call(after, 0)])


def test_another_config_json_is_refused_before_anything_is_restored(tmp_path):
    from bacr_jax.config import Config
    from bacr_jax.config import io as config_io
    from bacr_jax.errors import UserError
    from bacr_jax.model.sizes import Qwen2Config
    from bacr_jax.questions.question_set import QuestionSet
    from bacr_jax.runs.provenance import provenance
    from bacr_jax.training.loop import Trainer

    config = config_io.override(Config(), ["model.path=base"])
    questions = QuestionSet("ours", ["1+1"], ["2"], np.zeros(1, int), np.zeros(1, int), ["a"])

    def described(theta):
        values = config_io.flatten(config)
        shape = Qwen2Config(27, 16, 24, 3, 4, 2, 4, rope_theta=theta)
        return {"step": 4, **provenance(values, "x", questions, None, model=shape)}

    trainer = Trainer.__new__(Trainer)
    trainer.config = config
    trainer.folder = SimpleNamespace(path=tmp_path)
    trainer.checkpoints = Mock()
    trainer.checkpoints.meta.return_value = json.loads(json.dumps(described(1e4)))
    trainer.describe = lambda step: described(5e5)
    with pytest.raises(UserError, match="rope_theta is 500000.0 instead of 10000.0"):
        trainer._resume(4)
    assert trainer.checkpoints.method_calls == [call.meta(4)]


@pytest.mark.parametrize("long", ["before", "after"])
def test_each_kind_of_evaluation_is_a_phase_whose_length_is_compared_with_its_own(long):
    from bacr_jax.training.loop import Trainer
    from bacr_jax.training.run import RunState

    class Evaluating(Exception):
        pass

    trainer = Trainer.__new__(Trainer)
    trainer.evaluations = Mock()
    trainer.evaluations.has.return_value = False
    trainer.task_data = Mock()
    trainer.run = Mock()
    trainer._evaluate_sets = Mock(side_effect=Evaluating)
    now = [0.0]
    # Evaluations of one minute during training, and one of half an hour at an end of it.
    peers = Peers({}, 0, 2, lambda: now[0])
    trainer.on_phase = peers.enter
    for step, when in enumerate(["during", "during", long]):
        with pytest.raises(Evaluating):
            trainer.evaluate(Mock(RunState, train=None), step, when)
        for _ in range(60 if when == "during" else 1800):
            now[0] += 1.0
            peers._arrived = dict.fromkeys(peers._arrived, now[0])
            peers._last_exchange = now[0]
            assert peers.lost() is None


# test_train.py has a quick version, which stops a run in a rollout and in its last evaluation.
@pytest.mark.slow
def test_a_run_stopped_wherever_it_polls_ends_as_one_that_was_not(config, tmp_path, monkeypatch):
    assert train(*arguments(config, tmp_path / "whole", *REFILLED)) == 0
    folder = tmp_path / "run"
    command = arguments(config, folder, *REFILLED)
    metrics = folder / "metrics.jsonl"
    reached = []
    # Stop the run in the warm-up, in a rollout, in an evaluation, and in the last evaluation.
    for steps, at in ((0, 9), (1, 3), (3, 4), (6, 3)):
        StopAt(monkeypatch, metrics, steps, at)
        assert train(*command) == EXIT_CODE
        reached += [max((int(p.name) for p in (folder / "checkpoints").iterdir()), default=-1)]
    assert reached == [-1, 1, 3, 6]
    monkeypatch.undo()
    assert train(*command) == 0
    assert_same_run(folder, tmp_path / "whole", 6)


@pytest.mark.slow
def test_a_run_stopped_before_an_undo_undoes_the_same_update(config, tmp_path, monkeypatch):
    # With this margin, every update of the policy is undone, until the guard stops. Step 1 trains
    # only the value head.
    monkeypatch.setattr("bacr_jax.training.undo.STANDARD_ERRORS", -100.0)
    command = arguments(config, tmp_path / "whole", "train.undo_closed_answers=1")
    assert train(*command) == 0
    records = without_timings(tmp_path / "whole" / "metrics.jsonl")
    undone = [record["step"] for record in records if record["train/undone"]]
    assert undone == [3, 4, 5]
    folder = tmp_path / "run"
    command = arguments(config, folder, "train.undo_closed_answers=1")
    for step in (3, 5):  # before the second undo, and after the last one
        with monkeypatch.context() as patch:
            StopAt(patch, folder / "metrics.jsonl", step, 2)
            assert train(*command) == EXIT_CODE
    assert train(*command) == 0
    assert_same_run(folder, tmp_path / "whole", 6)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["limited_updates"] == {"undone": 3, "shortened": 0, "dropped": 0}


def start(*command):
    return subprocess.Popen(
        [sys.executable, "-m", "bacr_jax.train", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )


def wait_for(folder, lines, process):
    """Until a run has logged so many steps."""
    path = folder / "metrics.jsonl"
    while process.poll() is None and (
        not path.exists() or len(path.read_bytes().splitlines()) < lines
    ):
        time.sleep(0.02)


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    return tmp_path_factory.mktemp("warm")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["bacr", "hapo", "dapo"])
def test_ten_steps_are_five_and_a_kill_and_five(warm, tmp_path, method):
    files = [CONFIGS / "quickstart.yaml"]
    files += [CONFIGS / "methods" / f"{method}.yaml"] if method in ("hapo", "dapo") else []
    named = [word for file in files for word in ("--config", str(file))]
    command = lambda folder: [*named, *QUICK, f"warmup.dir={warm}", f"output.dir={folder}"]
    assert train(*command(tmp_path / "whole")) == 0
    folder = tmp_path / "killed"
    process = start(*command(folder))
    wait_for(folder, 5, process)
    time.sleep(random.random())
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert train(*command(folder)) == 0
    assert_same_run(folder, tmp_path / "whole", 10)
    rewards = [record["reward/mean"] for record in without_timings(folder / "metrics.jsonl")]
    assert len(set(rewards)) > 3


@pytest.mark.slow
def test_a_run_killed_after_its_supervised_stage_does_not_repeat_it(warm, tmp_path, monkeypatch):
    from bacr_jax.training import initialize
    from bacr_jax.training.loop import Trainer

    class Killed(BaseException):
        pass

    def evaluate(trainer, *_):
        trainer.checkpoints.wait()
        raise Killed

    keys = ("method=selfbudgeter", "selfbudgeter.cold_start_steps=40")
    keys += ("selfbudgeter.cold_start_tokens=2048", "train.steps=2", f"warmup.dir={warm}")
    quickstart = ("--config", str(CONFIGS / "quickstart.yaml"))
    command = lambda name: [*quickstart, *QUICK, *keys, f"output.dir={tmp_path / name}"]
    assert train(*command("whole")) == 0
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "evaluate", evaluate)
        with pytest.raises(Killed):
            train(*command("run"))
    assert steps_saved(tmp_path / "run" / "checkpoints") == [0]
    monkeypatch.setattr(initialize, "rejection_sft", lambda *_, **__: pytest.fail("repeated"))
    assert train(*command("run")) == 0
    assert_same_run(tmp_path / "run", tmp_path / "whole", 2)


@pytest.mark.slow
def test_kills_at_random_moments_of_evaluations_change_nothing(config, tmp_path):
    # Spend most of the time in evaluations: after every step, with eight samples of 200 problems.
    overrides = ["data.order=shuffled", "eval.every=1", "eval.samples=8", "eval.size=200"]
    overrides += ["train.steps=4", "checkpoint.every=1"]
    assert train(*arguments(config, tmp_path / "whole", *overrides)) == 0
    folder = tmp_path / "killed"
    moments = random.Random(0)
    evaluations = lambda: len(read_lines(folder / "eval.jsonl"))
    for _ in range(3):
        before = evaluations()
        process = start(*arguments(config, folder, *overrides))
        # Wait until an evaluation is finished, so that the kill interrupts the next one, unless the
        # run is near its end.
        while process.poll() is None and evaluations() == before and before < 4:
            time.sleep(0.02)
        time.sleep(moments.random() * 2)
        process.kill()
        process.communicate()
    assert train(*arguments(config, folder, *overrides)) == 0
    assert_same_run(folder, tmp_path / "whole", 4)


@pytest.mark.slow
def test_eight_kills_lose_no_more_than_the_interval(config, tmp_path):
    overrides = ["train.steps=200", "checkpoint.every=2", "eval.every=null"]
    folder = tmp_path / "killed"
    command = arguments(config, folder, *overrides)
    moments, reached = random.Random(1), 0
    for kill in range(8):
        process = start(*command)
        # Wait until the run is training. It then writes a checkpoint at every second step.
        wait_for(folder, reached + 2, process)
        time.sleep(moments.random() * 0.5)
        process.kill()
        out, err = process.communicate()
        assert process.returncode == -signal.SIGKILL, err
        logged = len(read_lines(folder / "metrics.jsonl"))
        saved = [int(p.name) for p in (folder / "checkpoints").iterdir() if p.name.isdigit()]
        newest = max(saved, default=0)
        # One interval of two steps, and another one if a checkpoint was being written.
        assert logged - newest <= 4, (kill, logged, saved)
        assert newest >= reached - 2
        reached = newest
    steps = reached + 4
    length = [f"train.steps={steps}", "--allow-change", "train.steps"]
    assert train(*command, *length) == 0
    whole = arguments(config, tmp_path / "whole", *overrides, f"train.steps={steps}")
    # The learning rate depends on the number of steps, which was changed. Only the rollouts of the
    # first steps are therefore compared with an uninterrupted run.
    assert [r["step"] for r in read_lines(folder / "metrics.jsonl")] == list(range(1, steps + 1))
    assert train(*whole) == 0
    same = lambda f: [
        {k: v for k, v in r.items() if k.startswith("rollout/")}
        for r in without_timings(f / "metrics.jsonl")
    ]
    assert same(folder)[:3] == same(tmp_path / "whole")[:3]


def stopped_in(process, number=signal.SIGTERM):
    """Signals a process and gives its messages; it must have ended in good order, and soon."""
    process.send_signal(number)
    asked = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert process.returncode == EXIT_CODE, err
    assert time.monotonic() - asked < 10
    assert f"{signal.Signals(number).name}: stopped" in err and "Traceback" not in err
    return err


def steps_saved(folder):
    return sorted(int(p.name) for p in folder.iterdir())


@pytest.mark.slow  # tests/parallel/test_preemption.py tests SIGUSR1.
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_training_saves_a_checkpoint(config, tmp_path, number):
    folder = tmp_path / "run"
    overrides = ["train.steps=500", "eval.every=null", "checkpoint.every=500"]
    process = start(*arguments(config, folder, *overrides))
    wait_for(folder, 3, process)
    stopped_in(process, number)
    logged = len((folder / "metrics.jsonl").read_bytes().splitlines())
    # Step 1 is always saved, so that a folder without write permission is noticed early.
    assert steps_saved(folder / "checkpoints") == [1, logged]


@pytest.mark.slow
def test_a_signal_in_an_evaluation_saves_a_checkpoint(config, tmp_path):
    folder = tmp_path / "run"
    overrides = ["eval.every=2", "eval.samples=20", "eval.size=200"]
    process = start(*arguments(config, folder, *overrides))
    wait_for(folder, 2, process)
    time.sleep(0.5)
    stopped_in(process)
    assert steps_saved(folder / "checkpoints")[-1] == 2
    assert [r["step"] for r in read_lines(folder / "eval.jsonl")] == [0]


@pytest.mark.slow
def test_a_signal_in_the_warm_up_keeps_its_steps(config, tmp_path):
    folder = tmp_path / "run"
    process = start(*arguments(config, folder, "warmup.steps=100000"))
    progress = folder / "warmup" / "progress"
    while not any(p.name.isdigit() for p in progress.glob("*/*")):
        assert process.poll() is None
        time.sleep(0.05)
    err = stopped_in(process)
    assert "run the same command to continue" in err
    (kept,) = progress.iterdir()
    assert steps_saved(kept)[-1] > 0 and not (folder / "metrics.jsonl").exists()


STUBBORN = """
import os, signal, sys, time
from bacr_jax.parallel.preemption import PreemptionHandler
with PreemptionHandler():
    print("listening", flush=True)
    time.sleep(60)
    time.sleep(60)
"""


def test_a_second_signal_ends_a_process_that_does_not_poll():
    process = subprocess.Popen(
        [sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "listening\n"
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)  # The same request, because `timeout` sends it twice.
    time.sleep(0.7)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert process.returncode == -signal.SIGTERM
    assert err.count("SIGTERM: stopping after the current work is saved") == 1
