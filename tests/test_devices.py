"""The quickstart model trained on eight devices, by one process and by two."""

import json
import re
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from devices_world import ROOT, environment, run_on_devices

GLOO = re.compile(r"\[Gloo\]|peer ranks|^$")
SHORT = (
    *(
        "warmup.steps=2",
        "warmup.target_accuracy=0",
        "warmup.short_accuracy=0",
        "warmup.hold_accuracy=0",
        "warmup.max_hold=0",
    ),
    *("train.steps=3", "budget.max=16", "curriculum.mu0=12", "curriculum.sigma=4"),
    *("rollout.questions=4", "rollout.group_size=4", "train.micro_batch_rows=8"),
    *("eval.size=8", "eval.samples=0", "eval.budgets=[16]", "value.warmup_iterations=1"),
    *("model.num_layers=1", "data.ledger.train_size=640"),
    *("output.tensorboard=false", "output.report=false"),
)


def start(folder, *overrides, devices, **more):
    """The train command in a process of its own with that many CPU devices."""
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "bacr_jax.train"),
            *("--config", str(ROOT / "configs" / "quickstart.yaml"), *SHORT),
            *(f"output.dir={folder}", *overrides),
        ],
        env=environment(devices) | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process, code=0):
    out, err = process.communicate(timeout=3000)
    assert process.returncode == code, err[-3000:]
    return out, err


def records(folder):
    from bacr_jax.runs.metrics import without_timings

    return without_timings(folder / "metrics.jsonl")


def joined_environment(processes=2):
    """What joins processes, their numbers aside."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    return {"JAX_COORDINATOR_ADDRESS": coordinator, "JAX_NUM_PROCESSES": str(processes)}


def start_all(folder, *overrides, apart=((), ()), devices=4):
    """Processes of one run, two unless more are told something `apart` from the others."""
    joined = joined_environment(len(apart))
    return [
        start(folder, *overrides, *own, devices=devices, **joined, JAX_PROCESS_ID=str(index))
        for index, own in enumerate(apart)
    ]


@pytest.mark.slow
def test_a_signal_to_one_process_stops_both_with_a_checkpoint(tmp_path):
    folder = tmp_path / "run"
    both = start_all(folder, "train.steps=500", "warmup.steps=0")
    metrics = folder / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_bytes().splitlines()) < 2:
        assert both[0].poll() is None, both[0].communicate()
        time.sleep(0.1)
    both[1].send_signal(signal.SIGTERM)
    for process in both:
        finish(process, code=75)
    steps = len(metrics.read_bytes().splitlines())
    assert max(int(path.name) for path in (folder / "checkpoints").iterdir()) == steps
    # The same command goes on.
    more = ["warmup.steps=0", f"train.steps={steps + 1}", "--allow-change", "train.steps"]
    for process in start_all(folder, *more):
        finish(process)
    assert [line["step"] for line in records(folder)] == list(range(1, steps + 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "lost", "by", "says"),
    [
        (2, 0, signal.SIGKILL, "closed its"),
        (2, 1, signal.SIGSTOP, "sent no heartbeat"),
        (4, 2, signal.SIGKILL, "sent no heartbeat"),
    ],
)
def test_a_process_that_is_gone_or_stopped_is_named_and_the_others_end_with_75(
    tmp_path, processes, lost, by, says
):
    folder, apart = tmp_path / "run", [()] * processes
    every = start_all(
        folder, "train.steps=500", "warmup.steps=0", apart=apart, devices=8 // processes
    )
    metrics = folder / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_bytes().splitlines()) < 2:
        assert every[0].poll() is None, every[0].communicate()
        time.sleep(0.1)
    every[lost].send_signal(by)
    began = time.monotonic()
    for left in (process for index, process in enumerate(every) if index != lost):
        _, err = finish(left, code=75)
        assert time.monotonic() - began < 60
        # On a busy machine, processes can wait for each other at the start.
        ignored = re.compile(rf"^waiting for the other processes|{GLOO.pattern}")
        (line,) = [line for line in err.splitlines() if line and not ignored.search(line)]
        named = rf"process {lost} on .* was lost at step \d+ \([\w ]+\): it {says}"
        assert re.match(named, line) and "run the same command to continue" in line
    if by == signal.SIGSTOP:
        every[lost].send_signal(signal.SIGCONT)
        finish(every[lost], code=75)
    every[lost].communicate()


EVERY_KEY = """
import sys
from bacr_jax.config import Config, io
from bacr_jax.errors import UserError
from bacr_jax.parallel import processes
from bacr_jax.runs import agreement

processes.join()
values = io.flatten(Config())
for key in values:
    other = values if processes.is_first() else values | {key: "another"}
    try:
        agreement.refuse_if_processes_differ(agreement.start_facts(other, {}))
        said = "free"
    except UserError as error:
        assert f"because these differ: {key} (" in str(error)
        assert str(error).count('"another" in process 1') == 1
        said = "refused"
    print("key", key, said, flush=True)
"""


@pytest.mark.slow
def test_every_key_that_two_processes_differ_in_is_refused_or_free_as_the_page_says(tmp_path):
    joined = joined_environment()
    both = [
        subprocess.Popen(
            [sys.executable, "-c", EVERY_KEY],
            env=environment(1) | joined | {"JAX_PROCESS_ID": str(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    page = (ROOT / "docs/configuration.md").read_text()
    expected = re.findall(r"^\| `([\w.]+)` \|.*\| (free|refused) \|$", page, re.MULTILINE)
    assert len(expected) > 200
    for process in both:
        out, _ = finish(process)
        assert sorted(re.findall(r"^key (\S+) (\w+)$", out, re.MULTILINE)) == sorted(expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("seed", ("seed=0", "seed=1")),
        ("train.steps", ("train.steps=3", "train.steps=4")),
        (
            "optimizer.learning_rate",
            ("optimizer.learning_rate=1e-4", "optimizer.learning_rate=2e-4"),
        ),
        ("the questions of data.train", ("data.dir=one", "data.dir=two")),
        ("", ("data.dir=one", "data.dir=none")),
    ],
)
def test_processes_that_differ_are_refused_by_name_before_they_train(tmp_path, key, values):
    for name, answer in (("one", 2), ("two", 3)):
        (tmp_path / name).mkdir()
        rows = [{"question": f"What is 1 + {i}?", "answer": str(answer)} for i in range(40)]
        (tmp_path / name / "own.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    shared = []
    if "data.dir" in values[0]:
        shared = ["data.train=jsonl:own.jsonl", "data.eval=[jsonl:own.jsonl]", "warmup.steps=0"]
        shared += ["eval.select=jsonl:own.jsonl", "data.prompt_format=characters"]
        shared += ["data.num_groups=1"]
        values = [value.replace("=", f"={tmp_path}/") for value in values]
    both = start_all(tmp_path / "run", *shared, apart=[[value] for value in values])
    for process in both:
        _, err = finish(process, code=2)
        line = [line for line in err.splitlines() if line.startswith("error: process 1 on ")]
        assert len(line) == 1 and "Traceback" not in err, err[-2000:]
        assert f"because these differ: {key} (" in line[0] if key else "own.jsonl" in line[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_two_processes_train_as_one_does_and_leave_one_run(tmp_path):
    both = start_all(tmp_path / "two")
    # The CPU's collectives announce themselves, several threads on one line at times.
    own = lambda text: [line for line in text.splitlines() if not GLOO.search(line)]
    first, second = (own(finish(process)[0]) for process in both)
    assert any(line.startswith("3 steps") for line in first) and second == []
    finish(start(tmp_path / "one", devices=8))
    one, two = records(tmp_path / "one"), records(tmp_path / "two")
    assert [line["step"] for line in two] == [1, 2, 3]
    for a, b in zip(one, two):
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_allclose(b[name], a[name], rtol=1e-5, atol=1e-5, err_msg=name)
    # The checkpoint of eight devices, in another layout of four, in one process.
    out, _ = finish(start(tmp_path / "two", "mesh.data=2", "mesh.fsdp=2", devices=4))
    assert "at step 3" in out
    assert records(tmp_path / "two") == two


@pytest.mark.slow
@pytest.mark.parametrize("needs_start", ["adapter.rank=2", "loss.kl_coef=0.1"])
def test_a_run_that_needs_its_first_weights_goes_on_with_two_devices(tmp_path, needs_start):
    """At this width the budget module that is drawn on two devices differs by rounding."""
    # One layer of width 24, with a budget module.
    own = ["model.hidden_size=24", "model.num_heads=2", "train.steps=1", needs_start]
    finish(start(tmp_path / "run", *own, devices=1))
    # Nothing is left to do, so the second command only resumes.
    out, _ = finish(start(tmp_path / "run", *own, devices=2))
    assert "at step 1" in out


@pytest.mark.slow
def test_one_device_and_eight_draw_the_same_samples_and_learn_the_same(tmp_path):
    for count in (1, 8):
        finish(start(tmp_path / str(count), "output.rollouts=16", devices=count))
    one, eight = records(tmp_path / "1"), records(tmp_path / "8")
    for a, b in zip(one, eight, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_allclose(b[name], a[name], rtol=1e-5, atol=1e-5, err_msg=name)
    traces = sorted(path.name for path in (tmp_path / "1" / "rollouts").iterdir())
    assert len(traces) == 3
    for name in traces:
        texts = [(tmp_path / str(n) / "rollouts" / name).read_text() for n in (1, 8)]
        assert texts[0] == texts[1] and texts[0].count("\n") == 16


def evaluate(run, out, *arguments, devices):
    """Samples and output of the evaluate command on that many CPU devices."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "bacr_jax.evaluate", "--run", str(run), "--out", str(out)),
            *("--size", "10", "--samples", "1", "--greedy", "--budgets", "4,16", "--slots", "10"),
            *arguments,
        ],
        env=environment(devices),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return (out / "samples.jsonl").read_text(), done.stdout


@pytest.mark.slow
def test_an_evaluation_on_many_devices_gives_the_samples_of_one(tmp_path):
    finish(start(tmp_path / "run", "model.num_kv_heads=2", "train.steps=1", devices=1))
    one, said = evaluate(tmp_path / "run", tmp_path / "one", devices=1)
    assert one.count("\n") == 40 and "devices" not in said
    four, said = evaluate(tmp_path / "run", tmp_path / "four", "mesh.decode_tensor=2", devices=4)
    assert "10 rows at a time on 4 devices, 2 of which share a copy of the policy" in said
    eight, said = evaluate(tmp_path / "run", tmp_path / "eight", devices=8)
    assert "16 rows at a time on 8 devices\n" in said
    assert one == four == eight


RESTORE = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from bacr_jax import parallel
from bacr_jax.runs.checkpoint import Checkpoints

def on(*sizes):
    mesh = parallel.make_mesh(parallel.MeshShape(*sizes, 1), jax.devices()[: np.prod(sizes)])
    kernel = np.arange(2 * 16 * 8, dtype=np.float32).reshape(2, 16, 8)
    state = {"layers": {"q_kernel": kernel}, "updates": np.int32(3)}
    placed = parallel.place(state, parallel.shardings(state, mesh))
    return {"train": placed, "schedule": jnp.arange(3.0), "tokens": 2**40}

saved = on(1, 8, 1)
checkpoints = Checkpoints(Path(sys.argv[1]), keep=1)
checkpoints.save(1, saved, {})
checkpoints.close()
checkpoints = Checkpoints(Path(sys.argv[1]), keep=1)
for sizes in ((1, 4, 2), (2, 4, 1), (1, 2, 2), (1, 1, 1)):
    like = on(*sizes)
    _, state, _ = checkpoints.restore(jax.tree.map(lambda x: x * 0, like))
    jax.tree.map(np.testing.assert_array_equal, state, saved)
    kernel = state["train"]["layers"]["q_kernel"]
    assert kernel.sharding == like["train"]["layers"]["q_kernel"].sharding
    assert kernel.addressable_shards[0].data.shape == (2, 16 // sizes[1], 8 // sizes[2])
    # An array on no device in particular can still be mixed with those of all.
    jax.jit(lambda a, b: a.sum() + b.sum())(kernel, state["schedule"])
checkpoints.close()
print("fine")
"""


@pytest.mark.slow
def test_a_checkpoint_is_restored_onto_another_mesh(tmp_path):
    assert run_on_devices(RESTORE, tmp_path / "checkpoints") == "fine"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["mesh.data=3"], "mesh.data x mesh.fsdp x mesh.tensor: found 3 x -1 x 1"),
        (
            ["rollout.questions=3", "train.micro_batch_rows=4"],
            "rollout.questions=3 x rollout.group_size=4 = 12 traces",
        ),
    ],
)
def test_what_does_not_fit_the_devices_is_one_line(tmp_path, overrides, says):
    out, err = finish(start(tmp_path / "run", *overrides, devices=8), code=2)
    assert out == "" and err.count("\n") == 1 and says in err, err
    assert not (tmp_path / "run").exists()
