"""The command a user types, on a run small enough for a test."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest

import bacr_jax
import documented_metrics
from bacr_jax.config import io as config_io
from bacr_jax.errors import UserError
from bacr_jax.files import read_lines
from bacr_jax.parallel import peers, processes
from bacr_jax.parallel.preemption import EXIT_CODE, SIGNALS, Preempted
from bacr_jax.prompts import fingerprints, task_data
from bacr_jax.runs.checkpoint import read_meta
from bacr_jax.runs.chosen_step import choose_step
from bacr_jax.runs.folder import lock_if_free, steps_in, write_config
from bacr_jax.runs.restarts import GIVEN_UP, MOST_RESTARTS
from bacr_jax.runs.saved_policy import read_config
from bacr_jax.training import events
from bacr_jax.training.failures import TrainingFailed
from whole_runs import WHOLE_RUN, StopAt, assert_same_run


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "small.yaml"
    path.write_text(WHOLE_RUN)
    return path


# Nothing drawn beside the numbers.
PLAIN = ("output.report=false", "output.tensorboard=false")


def train(config, folder, *overrides):
    from bacr_jax.train import main

    code = main(["--config", str(config), f"output.dir={folder}", *overrides])
    assert code == 0
    return folder


@pytest.fixture(scope="module")
def told(config, tmp_path_factory):
    """Everything that a run tells its callbacks."""
    folder, events = tmp_path_factory.mktemp("runs") / "one", []
    overrides = [f"output.dir={folder}", "output.tensorboard=false"]
    done = bacr_jax.train(config, overrides, callbacks=[events.append])
    assert done is events[-1]
    return events


@pytest.fixture(scope="module")
def finished(told):
    return told[-1].folder


def test_callbacks_are_told_of_everything_in_its_order(told, finished):
    kinds = [(type(event).__name__, event.step) for event in told]
    in_order = [kind for kind in kinds if kind[0] != "CheckpointSaved"]
    assert in_order == [
        ("Started", 0),
        ("EvaluationDone", 0),
        ("StepDone", 1),
        ("StepDone", 2),
        ("EvaluationDone", 2),
        ("StepDone", 3),
        ("StepDone", 4),
        ("EvaluationDone", 4),
        ("Finished", 4),
    ]
    # Written beside the training: told once it is whole.
    assert sorted(step for name, step in kinds if name == "CheckpointSaved") == [1, 2, 4]
    steps = [event for event in told if isinstance(event, events.StepDone)]
    logged = read_lines(finished / "metrics.jsonl")
    assert [event.metrics["loss/total"] for event in steps] == [r["loss/total"] for r in logged]
    assert told[-1].summary["steps"] == 4 and told[0].steps == 4
    with pytest.raises(TypeError):
        steps[0].metrics["loss/total"] = 0.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        told[0].step = 3


def records(folder):
    from bacr_jax.runs.metrics import without_timings

    return without_timings(folder / "metrics.jsonl")


def test_a_run_folder_explains_itself(finished):
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["wall_seconds"] > 0
    assert "advantage.credit=to_go (published: trajectory)" in summary["departures"]
    for when in ("before", "after"):
        for mode in ("greedy", "sampled"):
            assert list(summary["eval"][when][mode]) == ["4", "12"]
            for entry in summary["eval"][when][mode].values():
                low, high = entry["ci95"]
                assert 0 <= low <= entry["accuracy"] <= high <= 1
                assert entry["mean_thinking_tokens"] <= 12
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all("/" in name for line in lines for name in line if name != "step")
    assert (finished / "checkpoints" / "4").is_dir()
    assert (finished / "accuracy_ledger.png").stat().st_size > 10_000
    trace = json.loads((finished / "rollouts" / "000004.jsonl").read_text().splitlines()[0])
    assert trace["prompt"].startswith("<bos>") and len(trace["answers"]) == 4
    assert trace["thinking_tokens"] <= trace["budget"]


def test_the_page_of_metrics_knows_every_number_of_the_folder(finished):
    lines = read_lines(finished / "metrics.jsonl")
    names = {name for line in lines for name in line} - {"step"}
    evaluations = read_lines(finished / "eval.jsonl")
    written = {
        "metrics.jsonl": names,
        "eval.jsonl": set().union(*map(documented_metrics.leaves, evaluations)),
        "summary.json": documented_metrics.leaves(
            json.loads((finished / "summary.json").read_text())
        ),
    }
    for file, keys in written.items():
        missing = documented_metrics.undocumented(keys, file)
        assert missing == set(), documented_metrics.advice(missing, f"{file}: ...")
    known = map(documented_metrics.pattern, documented_metrics.keys_of("summary.json"))
    gone = [one.pattern for one in known if not any(map(one.fullmatch, written["summary.json"]))]
    assert gone == [], "docs/metrics.md: take out the rows that no summary.json has"


def test_evaluation_has_its_own_cadence_and_samples(finished):
    lines = [json.loads(line) for line in (finished / "eval.jsonl").read_text().splitlines()]
    assert [(line["step"], line["when"]) for line in lines] == [
        (0, "before"),
        (2, "during"),
        (4, "after"),
    ]
    for line in lines:
        assert list(line["sets"]) == ["ledger", "train_holdout"]
        held_out = line["sets"]["train_holdout"]
        # A tenth of the 64 training questions, greedily at every budget, whatever eval.size is.
        assert list(held_out) == ["greedy"]
        assert [entry["problems"] for entry in held_out["greedy"].values()] == [6, 6]
        summary = line["sets"]["ledger"]
        assert [summary[mode]["12"]["samples"] for mode in ("greedy", "sampled")] == [1, 1]
        accuracies = [summary["greedy"][budget]["accuracy"] for budget in ("4", "12")]
        assert line["anytime"]["ledger"]["greedy"]["mean"] == pytest.approx(np.mean(accuracies))
    assert (finished / "evaluation_ledger.png").read_bytes().startswith(b"\x89PNG")
    assert "<!doctype html>" in (finished / "report.html").read_text()
    summary = json.loads((finished / "summary.json").read_text())
    assert list(summary["eval"]) == ["before", "after"]


@pytest.mark.slow
def test_a_run_that_is_evaluated_once_holds_out_the_same_and_chooses_nothing(
    config, finished, tmp_path, capsys
):
    folder = train(
        config,
        tmp_path / "run",
        "eval.every=null",
        "train.steps=1",
        f"warmup.dir={finished / 'warmup'}",
        *PLAIN,
    )
    said = capsys.readouterr().out
    assert "6 held out for validation" in said
    starts = [said.index(f"{label:9}") for label in ("method", "model", "devices", "run")]
    assert starts == sorted(starts) and starts[-1] < said.index("evaluation before")
    ends = [said.index(f"{label:9}bacr ") for label in ("look", "ask", "compare")]
    assert ends == sorted(ends) and ends[0] > said.index("everything is in")
    assert f"bacr methods --run {folder}" in said and f"bacr report --run {folder}\n" in said
    for line in map(json.loads, (folder / "eval.jsonl").read_text().splitlines()):
        assert list(line["sets"]) == ["ledger"]
    best = json.loads((folder / "best.json").read_text())
    assert best == {"step": 1, "accuracy": None, "set": None, "worst": None, "declines": []}
    prints = [
        json.loads((f / "checkpoints" / step / "meta" / "metadata").read_text())["meta"][
            "data_fingerprint"
        ]
        for f, step in ((folder, "1"), (finished, "4"))
    ]
    assert prints[0] == prints[1]


def test_the_sampler_agrees_with_the_learner(finished):
    for line in records(finished):
        # of two minibatches the second sees a moved policy, but old scores are the sampler's own
        assert abs(line["mismatch/k1"]) < 1e-5 and line["mismatch/k3"] < 1e-6


def test_the_value_head_warms_up_alone_and_the_schedule_moves(finished):
    lines = records(finished)
    mu = [[line[f"curriculum/mu_{k}"] for k in range(4)] for line in lines]
    assert mu[0] == [8.0] * 4  # the initial mean holds until the first update
    assert mu[1] != mu[0] and mu[2] == mu[1]


@pytest.mark.slow  # two more runs; test_loop.py compares whole runs too
def test_the_same_seed_gives_the_same_metrics_and_another_does_not(config, finished, tmp_path):
    again = train(config, tmp_path / "again", *PLAIN)
    assert records(again) == records(finished)
    other = train(config, tmp_path / "other", "seed=1", "train.steps=1", *PLAIN)
    assert records(other)[0] != records(finished)[0]


def test_a_finished_run_gives_the_same_again_whatever_became_of_its_evaluations(
    config, finished, tmp_path, capsys
):
    from bacr_jax.train import main

    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    (folder / "best.json").unlink()
    records = read_lines(folder / "eval.jsonl")
    # The one before training claims another accuracy, and the last one is lost.
    records[0]["sets"]["ledger"]["greedy"]["4"]["accuracy"] = 0.9
    (folder / "eval.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in records[:-1]))
    train(config, folder, "output.report=false")
    assert "eval.jsonl was changed since the run wrote it" in capsys.readouterr().out
    assert_same_run(folder, finished, 4)
    # The time of both legs.
    before = read_meta(finished / "checkpoints" / "4" / "state")["wall_seconds"]
    assert json.loads((folder / "summary.json").read_text())["wall_seconds"] > before
    # Nothing stands for metrics.
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[1:]))
    assert main(["--config", str(config), f"output.dir={folder}"]) == 2
    error = capsys.readouterr().err
    assert (
        "metrics.jsonl was changed after the checkpoint of step 4 was saved: it had 4 records"
        in error
    )


def test_a_decode_copy_that_drifts_stops_the_run_before_its_evaluation_counts(
    config, finished, tmp_path, capsys, monkeypatch
):
    from bacr_jax.train import main
    from bacr_jax.training import loop

    def evaluate_and_flip(decoder, *args, **kwargs):
        found = evaluate_set(decoder, *args, **kwargs)
        bits = np.array(decoder.params.final_norm).view(np.uint32)
        bits[3] += 1  # Twice, as there are two sets.
        norm = jax.device_put(bits.view(np.float32), decoder.params.final_norm.sharding)
        object.__setattr__(decoder.params, "final_norm", norm)
        return found

    folder, evaluate_set = tmp_path / "run", loop.evaluate_set
    shutil.copytree(finished, folder)
    lines = (folder / "eval.jsonl").read_text().splitlines(keepends=True)
    (folder / "eval.jsonl").write_text("".join(lines[:-1]))
    monkeypatch.setattr(loop, "evaluate_set", evaluate_and_flip)
    assert main(["--config", str(config), f"output.dir={folder}"]) == 1
    error = capsys.readouterr().err
    assert "stopped after step 4, because a device or its memory is faulty (final_norm" in error
    assert "to continue from checkpoint 4" in error
    assert (folder / "eval.jsonl").read_text() == "".join(lines[:-1])


def test_nothing_compiles_after_the_first_iteration(config, tmp_path):
    from bacr_jax.config import io as config_io
    from bacr_jax.runs.folder import open_run
    from bacr_jax.training.loop import Trainer

    settings = config_io.load([config], [f"output.dir={tmp_path / 'run'}", "warmup.steps=0"])
    compiled = []

    def listen(event, *_, **__):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    with open_run(tmp_path / "run", settings) as folder:
        trainer = Trainer(settings, folder)
        state, _ = trainer.start()
        with trainer.training(state, 0):
            state = trainer.iterate(state, 0)
        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            for step in range(1, 4):
                state = trainer.iterate(state, step)
            assert compiled == []
            jax.jit(lambda x: x + np.pi)(1.0)
            assert compiled  # the listener works
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.slow
def test_a_run_stopped_in_a_rollout_and_in_its_last_evaluation_ends_as_one_that_was_not(
    config, finished, tmp_path, monkeypatch
):
    from bacr_jax.train import main

    command = ["--config", str(config), f"output.dir={tmp_path / 'run'}", "output.report=false"]
    command += [f"warmup.dir={finished / 'warmup'}"]

    def raise_at_two(event):
        if isinstance(event, events.StepDone) and event.step == 2:
            raise LookupError("mine")

    for steps, at in ((1, 3), (4, 3)):
        StopAt(monkeypatch, tmp_path / "run" / "metrics.jsonl", steps, at)
        assert main(command) == EXIT_CODE
        assert (tmp_path / "run" / "checkpoints" / str(steps)).is_dir()
        monkeypatch.undo()
        if steps == 1:
            # A callback that raises costs nothing either.
            with pytest.raises(LookupError, match="mine"):
                bacr_jax.train(config, command[2:], callbacks=[raise_at_two])
            assert (tmp_path / "run" / "checkpoints" / "2").is_dir()
    assert main(command) == 0
    assert_same_run(tmp_path / "run", finished, 4)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_ends_a_call_with_a_checkpoint_and_the_command_s_own_code(
    config, finished, tmp_path, number, capfd
):
    """What a script that catches nothing ends with; its own handlers are back afterwards."""

    def stop_at_two(event):
        if isinstance(event, events.StepDone) and event.step == 2:
            os.kill(os.getpid(), number)

    heard = []
    before = signal.signal(number, lambda *_: heard.append(number))
    overrides = [f"output.dir={tmp_path / 'run'}", f"warmup.dir={finished / 'warmup'}"]
    kind = KeyboardInterrupt if number == signal.SIGINT else SystemExit
    try:
        with pytest.raises(kind) as ended:
            bacr_jax.train(config, [*overrides, *PLAIN], callbacks=[stop_at_two])
        os.kill(os.getpid(), number)
    finally:
        signal.signal(number, before)
    assert heard == [number] and (tmp_path / "run" / "checkpoints" / "2").is_dir()
    if kind is SystemExit:
        assert ended.value.code == EXIT_CODE
        said = (
            f"{signal.Signals(number).name}: stopped; call it again with the same arguments to "
            "continue"
        )
        assert said in capfd.readouterr().err


STOPPED_SCRIPT = """
import os, signal, sys
import bacr_jax
from bacr_jax.training import session

def train(config, folder, poll, callbacks):
    os.kill(os.getpid(), signal.SIGTERM)
    poll()

session.train = train
bacr_jax.train("quickstart", ["output.dir=" + sys.argv[1]])
"""


@pytest.mark.parametrize("how", ["script", "-m", "-c"])
def test_a_script_ends_with_the_command_s_own_code_whatever_starts_it(tmp_path, how):
    (tmp_path / "mine.py").write_text(STOPPED_SCRIPT)
    words = {"script": ["mine.py"], "-m": ["-m", "mine"], "-c": ["-c", STOPPED_SCRIPT]}[how]
    done = subprocess.run(
        [sys.executable, *words, str(tmp_path / "run")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == EXIT_CODE, done.stderr
    assert "Traceback" not in done.stderr and "SIGTERM: stopped" in done.stderr


# Trains without a reader of stdout and stderr, as after `2>&1 | head`.
UNREAD_SCRIPT = """
import os, signal, sys
import bacr_jax.train
from bacr_jax.runs.progress import Progress
from bacr_jax.training import session

def train(config, folder, poll):
    sys.stdin.read()
    with Progress() as progress:
        for step in range(300):
            progress.print_line("step " * 100)
    (folder.path / "trained").touch()
    if sys.argv[2] == "stop":
        os.kill(os.getpid(), signal.SIGTERM)
        poll()

session.train = train
sys.exit(bacr_jax.train.main(["--config", "quickstart", "output.dir=" + sys.argv[1]]))
"""


@pytest.mark.parametrize(("how", "code"), [("finish", 0), ("stop", EXIT_CODE)])
def test_without_a_reader_training_goes_on_and_ends_with_its_own_code(tmp_path, how, code):
    reader, output = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", UNREAD_SCRIPT, str(tmp_path / "run"), how],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
    )
    os.close(output)
    os.close(reader)
    process.stdin.close()
    assert process.wait(120) == code
    assert (tmp_path / "run" / "trained").exists()


def test_a_job_that_is_killed_while_it_loads_its_inputs_is_given_up(tmp_path, monkeypatch, capsys):
    from bacr_jax.training import session

    class Killed(BaseException):
        pass

    def load(*_):
        raise Killed

    monkeypatch.setattr(session, "Trainer", load)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    command = ["--config", "quickstart", f"output.dir={tmp_path / 'run'}"]
    for count in range(MOST_RESTARTS + 1):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(count))
        with pytest.raises(Killed):
            bacr_jax.train.main(command)
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(MOST_RESTARTS + 1))
    assert bacr_jax.train.main(command) == GIVEN_UP
    line = capsys.readouterr().err
    assert f"training: stopped, because Slurm restarted job 17 {MOST_RESTARTS + 1} times" in line


@pytest.mark.parametrize("code", [EXIT_CODE, 137])
def test_a_job_whose_processes_never_connect_is_given_up(tmp_path, monkeypatch, capsys, code):
    """They reach their time limit, or a process is killed and Slurm kills the others."""
    attempts = []

    def wait_in_vain():
        attempts.append(os.environ["SLURM_RESTART_COUNT"])
        raise SystemExit(code)

    monkeypatch.setattr(processes, "join", wait_in_vain)
    joined = {"JAX_COORDINATOR_ADDRESS": "node0:1", "JAX_NUM_PROCESSES": "2"}
    for name, value in {**joined, "SLURM_JOB_ID": "17"}.items():
        monkeypatch.setenv(name, value)
    command = ["--config", "quickstart", f"output.dir={tmp_path / 'run'}"]

    def start(count, index):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(count))
        monkeypatch.setenv("JAX_PROCESS_ID", str(index))
        return bacr_jax.train.main(command)

    for count in range(MOST_RESTARTS + 1):
        for index in range(2):
            with pytest.raises(SystemExit, match=str(code)):
                start(count, index)
    assert attempts == [str(count) for count in range(MOST_RESTARTS + 1) for _ in range(2)]
    capsys.readouterr()
    for index in range(2):
        assert start(MOST_RESTARTS + 1, index) == GIVEN_UP
        (line,) = capsys.readouterr().err.splitlines()
        assert f"stopped, because Slurm restarted job 17 {MOST_RESTARTS + 1} times" in line


@pytest.mark.parametrize("check", ["platform", "folder", "trainer"])
def test_a_new_run_of_a_restarted_job_that_is_refused_leaves_no_folder(
    tmp_path, monkeypatch, check
):
    from bacr_jax.training import session

    def refuse(*_, **options):
        raise UserError("bad data")

    module, name = {
        "platform": (processes, "check_platform"),
        "folder": (bacr_jax.train, "open_run"),
        "trainer": (session, "Trainer"),
    }[check]
    monkeypatch.setattr(module, name, refuse)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    run = tmp_path / "a" / "run"
    assert bacr_jax.train.main(["--config", "quickstart", f"output.dir={run}"]) == 2
    assert not run.exists()


def test_a_job_that_is_refused_leaves_the_count_of_the_job_that_holds_the_folder(
    tmp_path, monkeypatch
):
    def start(job, count):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(count))
        return bacr_jax.train.joint_run(config, "auto", ())

    config = config_io.load(["quickstart"], [f"output.dir={tmp_path / 'run'}"])
    for count in range(1, MOST_RESTARTS + 1):
        with start("17", count) as folder:
            content = folder.restarts.read_bytes()
            with pytest.raises(UserError, match="is in use by process"):
                start("18", 1)
            assert folder.restarts.read_bytes() == content
    with pytest.raises(TrainingFailed) as given_up:
        start("17", MOST_RESTARTS + 1)
    # The folder is free again, although the traceback still refers to the opened folder.
    lock_if_free(folder.lock).close()
    assert f"restarted job 17 {MOST_RESTARTS + 1} times" in str(given_up.value)


def test_in_a_thread_a_call_says_that_it_hears_no_signal(tmp_path, monkeypatch, capsys):
    """Of what it raises nothing is lost: a thread would end of a SystemExit without a word."""
    polls, raised = [], []

    def train(config, folder, poll, callbacks):
        polls.append(poll)
        raise Preempted("rollout.urls: none of the servers responds any more")

    def call():
        try:
            bacr_jax.train("quickstart", [f"output.dir={tmp_path / 'run'}"])
        except Preempted as error:
            raised.append(str(error))

    monkeypatch.setattr("bacr_jax.training.session.train", train)
    handlers = [signal.getsignal(number) for number in SIGNALS]
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert polls == [None] and raised == ["rollout.urls: none of the servers responds any more"]
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
    assert (
        "called outside the main thread, where signals can't be handled" in capsys.readouterr().err
    )


def test_the_best_is_chosen_on_held_out_training_questions_and_has_its_checkpoint(finished):
    best = json.loads((finished / "best.json").read_text())
    assert best["set"] == "train_holdout"
    scores = {
        record["step"]: record["anytime"]["train_holdout"]["greedy"]
        for record in read_lines(finished / "eval.jsonl")
        if record["when"] != "before"
    }
    highest = max(scores.values(), key=lambda score: score["mean"])
    not_below = [step for step in scores if scores[step]["mean"] >= highest["mean_ci95"][0]]
    assert best["step"] in not_below
    assert best["accuracy"] == scores[best["step"]]["mean"]
    assert choose_step(finished).step == choose_step(finished, "best").step == best["step"]
    assert choose_step(finished, "newest").step == 4


def test_the_best_checkpoint_is_not_one_that_ruined_a_budget_and_a_resumed_run_chooses_it_again(
    config, finished, tmp_path, monkeypatch, capsys
):
    """Of 100 problems, 50 right before: 40 are below Wilson's interval of that, 45 are not."""
    from bacr_jax.train import main
    from bacr_jax.training import loop

    # Means .5, .625, .475 and .6; at 12 tokens the evaluations of steps 1 and 3 have declined.
    by_step = {0: (0.5, 0.5), 1: (0.85, 0.4), 2: (0.5, 0.45), 3: (0.85, 0.35)}
    append = loop.append_line

    def written(path, record):
        if path.name == "eval.jsonl":
            small, large = by_step[record["step"]]
            modes = record["sets"]["train_holdout"]
            for budget, accuracy in (("4", small), ("12", large)):
                modes["greedy"][budget] |= {
                    "accuracy": accuracy,
                    "closed_rate": 1.0,
                    "problems": 100,
                }
            record["anytime"]["train_holdout"]["greedy"]["mean"] = (small + large) / 2
        append(path, record)

    monkeypatch.setattr(loop, "append_line", written)
    run = tmp_path / "run"
    words = ["--config", str(config), f"output.dir={run}", f"warmup.dir={finished / 'warmup'}"]
    words += [*PLAIN, "train.steps=3", "eval.every=1", "checkpoint.keep=1"]
    with monkeypatch.context() as patch:
        StopAt(patch, run / "metrics.jsonl", 3, 1)
        assert main(words) == EXIT_CODE
    stopped = json.loads((run / "best.json").read_text())
    (run / "best.json").unlink()
    capsys.readouterr()
    assert main(words) == 0
    best = json.loads((run / "best.json").read_text())
    assert best == {
        "step": 2,
        "accuracy": pytest.approx(0.475),
        "set": "train_holdout",
        "worst": {"budget": "12", "before": 0.5, "after": 0.45},
        "declines": [],
    }
    assert best == stopped == json.loads((run / "summary.json").read_text())["best"]
    note = "the best checkpoint is step 2 (mean accuracy 47.5 % on train_holdout (validation, not a"
    out = capsys.readouterr().out
    assert note in out and "export, evaluate, generate and serve take it" in out
    assert choose_step(run).step == 2 and choose_step(run, "newest").step == 3
    # evaluate says so, and its folder is that of the best step.
    from bacr_jax import evaluate

    assert evaluate.main(["--run", str(run), "--size", "4", "--budgets", "4"]) == 0
    out = capsys.readouterr().out
    assert f"{run}: step 2, the best: mean accuracy 47.5 %" in out
    assert "--step newest takes step 3" in out
    assert [path.name for path in (run / "evaluation").iterdir()] == [
        "step-000002-budgets-4-size-4"
    ]
    assert (
        evaluate.main(["--run", str(run), "--step", "newest", "--size", "4", "--budgets", "4"]) == 0
    )
    assert f"{run}: step 3, the newest\n" in capsys.readouterr().out
    # A folder of one step is not continued with another.
    out = str(run / "evaluation" / "step-000003-budgets-4-size-4")
    assert evaluate.main(["--run", str(run), "--size", "4", "--budgets", "4", "--out", out]) == 2
    assert "policy.step (3 in the folder, 2 now); use --step 3, or --out" in capsys.readouterr().err


def test_an_evaluation_belongs_to_the_weights_of_its_checkpoint(finished, tmp_path, capsys):
    from bacr_jax import evaluate

    run = tmp_path / "run"
    shutil.copytree(finished, run)
    first, *_, last = steps_in(run / "checkpoints")
    options = ["--budgets", "4", "--size", "4", "--step", str(last), "--out", str(tmp_path / "ev")]
    assert evaluate.main(["--run", str(run), *options]) == 0
    # The run was allowed to become longer, and its checkpoint is the same.
    longer = config_io.override(read_config(run), ["train.steps=99"])
    write_config(run / "config.yaml", longer)
    assert evaluate.main(["--run", str(run), *options]) == 0
    # The same step of the same config has other weights.
    shutil.rmtree(run / "checkpoints" / str(last))
    shutil.copytree(run / "checkpoints" / str(first), run / "checkpoints" / str(last))
    capsys.readouterr()
    assert evaluate.main(["--run", str(run), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "different settings, namely policy.weights (" in line and "ev-2" in line


@pytest.mark.slow
def test_only_the_set_that_chooses_is_evaluated_in_between(config, finished, tmp_path):
    run = tmp_path / "run"
    warm = f"warmup.dir={finished / 'warmup'}"
    train(config, run, "eval.during=selection", warm, *PLAIN)
    sets = [list(record["sets"]) for record in read_lines(run / "eval.jsonl")]
    both = ["ledger", "train_holdout"]
    assert sets == [both, ["train_holdout"], both]
    # What is learned does not depend on what is evaluated.
    assert records(run) == records(finished)


@pytest.mark.slow
def test_methods_share_a_warm_up(config, finished, tmp_path):
    warm = f"warmup.dir={finished / 'warmup'}"
    folder = train(config, tmp_path / "grpo", "method=grpo", "train.steps=1", warm, *PLAIN)
    mine, theirs = (
        json.loads((f / "summary.json").read_text())["eval"]["before"] for f in (folder, finished)
    )
    assert mine == theirs
    assert not (folder / "warmup").exists()


# Those of an even number of parts: any three of the four are met in all eight ways.
@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 3, 5, 6, 9, 10, 12, 15])
def test_combinations_of_the_four_parts_run(config, finished, tmp_path, index):
    folder = train(
        config,
        tmp_path / "run",
        f"warmup.dir={finished / 'warmup'}",
        "train.steps=1",
        "eval.samples=0",
        *PLAIN,
        f"conditioning.budget_input={'embedding' if index & 1 else 'none'}",
        f"budget.prior={'curriculum' if index & 2 else 'uniform'}",
        f"reward.dense={str(bool(index & 4)).lower()}",
        f"advantage.baseline={'value' if index & 8 else 'group'}",
    )
    assert np.isfinite(records(folder)[0]["loss/total"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["budget.mim=8"], "budget.min"),
        (["rollout.group_size=two"], "group_size"),
        (["method=grop"], "grpo"),
        (["budget.min=99"], "budget"),
        (
            [
                "data.train=math:nowhere",
                "data.eval=[math:nowhere]",
                "warmup.steps=0",
                "model.tokenizer=nowhere",
            ],
            "nowhere",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(config, tmp_path, capsys, arguments, says):
    from bacr_jax.train import main

    assert main(["--config", str(config), f"output.dir={tmp_path / 'run'}", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and says in said.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ("bacr-robust", "['bacr-robust'] sets only the method, and no other config is given; "),
        ("methods/grpo", "first, for example ['quickstart', 'methods/grpo']"),
        (["grpo", "dapo"], "first, for example ['quickstart', 'grpo', 'dapo']"),
        ([], 'bacr_jax.train: no config is given; pass for example "quickstart"'),
        ((), "no config is given"),
    ],
)
def test_a_call_refuses_presets_without_a_config_as_the_command_does(
    tmp_path, monkeypatch, files, says
):
    from bacr_jax.train import main

    monkeypatch.setattr(bacr_jax.train, "joint_run", None)
    folder = tmp_path / "run"
    with pytest.raises(UserError) as error:
        bacr_jax.train(files, {"output.dir": str(folder)})
    assert says in str(error.value) and "\n" not in str(error.value)
    names = [files] if isinstance(files, str) else files
    options = [word for name in names for word in ("--config", name)]
    assert main([*options, f"output.dir={folder}"]) == 2
    assert not folder.exists()


def test_a_folder_with_another_run_is_refused_untouched(config, finished, capsys):
    from bacr_jax.train import main

    before = sorted((p, p.stat().st_mtime) for p in finished.rglob("*") if p.is_file())
    code = main(["--config", str(config), f"output.dir={finished}", "seed=7"])
    assert code == 2 and "seed" in capsys.readouterr().err
    after = sorted((p, p.stat().st_mtime) for p in finished.rglob("*") if p.is_file())
    assert [p for p, _ in before] == [p for p, _ in after]


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("tokenizer_fingerprint", "the vocabulary of its tokenizer differs"),
        ("template_fingerprint", "its chat template differs from the one"),
        ("prompts_fingerprint", "the prompts of data.train have different token ids"),
    ],
)
def test_a_run_that_is_asked_otherwise_does_not_go_on(
    config, finished, tmp_path, monkeypatch, capsys, function, says
):
    from bacr_jax.train import main

    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    before = (folder / "metrics.jsonl").read_bytes()
    module = task_data if function == "prompts_fingerprint" else fingerprints
    monkeypatch.setattr(module, function, lambda *_: "another")
    assert main(["--config", str(config), f"output.dir={folder}", *PLAIN]) == 2
    error = capsys.readouterr().err
    assert says in error and error.splitlines()[-1].startswith("error: ")
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_help_fits_a_screen_and_names_the_commands_that_list_the_rest(capsys, monkeypatch):
    from bacr_jax.train import main

    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 40
    assert "`bacr keys`" in " ".join(text.split()) and "bacr configs" in text


@pytest.mark.slow
def test_a_finished_run_that_goes_on_is_finished_no_more_and_its_best_is_one_that_is_there(
    config, finished, tmp_path, monkeypatch
):
    from bacr_jax.train import main
    from bacr_jax.training.evaluations import Evaluations

    append, scores = Evaluations._append, {2: 0.5, 3: 0.9, 4: 0.3}

    def scored(self, record):
        score = scores.get(record["step"], 0.1)
        for by_mode in record["anytime"].values():
            for entry in by_mode.values():
                entry["mean"] = score
                entry["mean_ci95"] = [score - 0.01, score + 0.01]
        append(self, record)

    monkeypatch.setattr(Evaluations, "_append", scored)
    run = tmp_path / "run"
    keep_one = ["checkpoint.keep=1", f"warmup.dir={finished / 'warmup'}", *PLAIN]
    train(config, run, *keep_one, "train.steps=3")
    assert json.loads((run / "best.json").read_text())["step"] == 3
    longer = ["train.steps=7", "--allow-change", "train.steps"]
    with monkeypatch.context() as patch:
        StopAt(patch, run / "metrics.jsonl", 5, 1)
        code = main(["--config", str(config), f"output.dir={run}", *keep_one, *longer])
        assert code == EXIT_CODE
    assert not (run / "summary.json").exists()
    train(config, run, *keep_one, *longer)
    assert choose_step(run, "best").step == 4


def test_the_command_ends_with_its_code_if_this_process_failed_and_others_did_not(monkeypatch):
    codes = []
    monkeypatch.setattr(peers, "exit_if_failed", codes.append)
    assert bacr_jax.train.main(["--config", "no such config"]) == 2
    assert codes == [2]
