"""Training runs whose traces a server samples: each update reaches it, and budgets hold."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from vllm_world import free_port, server_of

ROOT = Path(__file__).resolve().parents[3]
SETTINGS = [
    "warmup.steps=60",
    "warmup.target_accuracy=0",
    "warmup.short_accuracy=0",
    "warmup.hold_accuracy=0",
    "train.steps=4",
    # Every step moves the policy.
    "value.warmup_iterations=0",
    "train.micro_batch_rows=16",
    "rollout.questions=4",
    "rollout.group_size=4",
    "eval.size=16",
    "eval.samples=0",
    "output.tensorboard=false",
    "output.report=false",
    "rollout.engine=vllm",
]


@pytest.mark.parametrize("ahead", [0, 1])
def test_four_steps_of_the_quickstart(tmp_path, ahead):
    port, weights = free_port(), tmp_path / "weights"
    words = [os.environ["BACR_PYTHON"], "-m", "bacr_jax.train", "--config", "quickstart"]
    words += ["--config", str(ROOT / "configs" / "methods" / "bacr-robust.yaml"), *SETTINGS]
    words += [f"rollout.ahead={ahead}", "loss.importance_cap=2"]
    words += [f"rollout.urls=[http://127.0.0.1:{port}]", f"rollout.weights_dir={weights}"]
    words += [f"output.dir={tmp_path / 'run'}"]
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}
    first = weights / "run" / "version-0"
    with (tmp_path / "log").open("wb") as log:
        run = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
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
    stale = [step["step"] > 1 and ahead == 1 for step in steps]
    for step, is_stale in zip(steps, stale):
        # The policy that sampled is that which learns, or the one before.
        assert (step["mismatch/absolute"] > 1e-4) == is_stale
        assert step.get("rollout/staleness", 0) == is_stale
        assert step["policy/grad_norm"] > 0
        assert step["rollout/excess_mean"] == 0 and step["rollout/thinking_max"] <= 64
