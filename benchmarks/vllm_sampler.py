"""Compares quickstart runs sampled by vLLM with runs sampled by this package's decoder.

    python benchmarks/vllm_sampler.py --python serving/bin/python --seeds 1 2 3 4

The benchmark is for a CPU (docs/vllm-training.md). For each seed, four runs start from the same
warm-up:

* `own`: sampled by this package's decoder.
* `own again`: the same with another seed after the warm-up, which shows the difference between two
  equivalent runs.
* `vLLM`: sampled by a vLLM server.
* `one step ahead`: sampled by a vLLM server with rollout.async_steps=1.

All runs use truncated importance weights (`loss.importance_cap`), which are 1 if the policy itself
has sampled. Finished runs are reused. For each seed, the script prints a table, and the accuracies
of the last two runs that are outside the range of the 95 % intervals of the runs above them. The
last line is one JSON object. It also writes accuracy.png.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from bacr_jax.config.io import load
from bacr_jax.report import figures, table
from bacr_jax.runs.folder import RunPaths, WarmupPaths
from bacr_jax.training.warmup_folder import warmup_fingerprint
from quickstart import mean_of

OWN, AGAIN, VLLM, AHEAD = "own", "own again", "vLLM", "one step ahead"
MODEL_LENGTH, ROWS, CACHE_BYTES = 128, 256, 256 << 20


def train(folder: Path, *keys: str) -> list[str]:
    words = ["bacr_jax.train", "--config", "quickstart", f"output.dir={folder}"]
    return [sys.executable, "-m", *words, "loss.importance_cap=2", *keys]


def run(folder: Path, *keys: str) -> None:
    if not RunPaths(folder).summary.exists():
        subprocess.run(train(folder, *keys), check=True)


def reseeded(source: Path, target: Path, seed: int) -> Path:
    """Copies a finished warm-up so that a run with another seed can start from it."""
    if not target.exists():
        shutil.copytree(source, target)
        paths, config = WarmupPaths(target), load(["quickstart"], [f"seed={seed}"])
        record = json.loads(paths.identity.read_text())
        record["fingerprint"] = warmup_fingerprint(config)
        paths.identity.write_text(json.dumps(record))
    return target


def run_served(python: Path, folder: Path, *keys: str) -> None:
    """Trains a run, and starts a server for it as soon as the run has written its first policy."""
    if RunPaths(folder).summary.exists():
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    weights = folder.parent / f"{folder.name}-weights"
    keys += ("rollout.engine=vllm", f"rollout.urls=[http://127.0.0.1:{port}]")
    training = subprocess.Popen(train(folder, *keys, f"rollout.weights_dir={weights}"))
    first = weights / folder.name / "version-0"
    while not first.is_dir():
        if training.poll() is not None:
            raise SystemExit(f"{folder}: ended before its first policy")
        time.sleep(1)
    words = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", first]
    words += ["--host", "127.0.0.1", "--port", port, "--served-model-name", "policy"]
    words += ["--dtype", "float32", "--enforce-eager", "--logprobs-mode", "processed_logprobs"]
    words += ["--max-model-len", MODEL_LENGTH, "--max-num-seqs", ROWS]
    words += ["--kv-cache-memory-bytes", CACHE_BYTES, "--distributed-executor-backend", "uni"]
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1"}
    with (folder.parent / f"{folder.name}-server.log").open("wb") as log:
        server = subprocess.Popen(list(map(str, words)), env=environment, stdout=log, stderr=log)
    try:
        if code := training.wait():
            raise SystemExit(code)
    finally:
        server.terminate()
        server.wait()


def outside(arm: dict, spans: list[dict]) -> list[str]:
    """Returns the budgets at which the accuracy is outside the range of other runs' intervals."""
    found = []
    for budget, entry in arm["greedy"].items():
        intervals = [span["greedy"][budget]["ci95"] for span in spans]
        low, high = min(i[0] for i in intervals), max(i[1] for i in intervals)
        if not low <= entry["accuracy"] <= high:
            found.append(f"{budget} {'below' if entry['accuracy'] < low else 'above'}")
    return found


def arms(python: Path, out: Path, seed: int) -> dict[str, dict]:
    """Returns the summaries of the four runs of a seed, which share its warm-up."""
    folder = lambda name: out / f"{name.replace(' ', '-').lower()}-{seed}"
    run(folder(OWN), f"seed={seed}")
    warmup = RunPaths(folder(OWN)).warmup
    other = reseeded(warmup, out / f"warmup-{seed + 1000}", seed + 1000)
    run(folder(AGAIN), f"seed={seed + 1000}", f"warmup.dir={other}")
    keys = (f"seed={seed}", f"warmup.dir={warmup}")
    run_served(python, folder(VLLM), *keys)
    run_served(python, folder(AHEAD), *keys, "rollout.async_steps=1")
    read = lambda name: json.loads(RunPaths(folder(name)).summary.read_text())
    return {name: read(name) for name in (OWN, AGAIN, VLLM, AHEAD)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--python", type=Path, required=True, help="of an environment with vLLM and the plugin"
    )
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/vllm-sampler"))
    arguments = parser.parse_args()
    console, collected, outsiders = Console(width=120), {}, {VLLM: [], AHEAD: []}
    tokens, seconds = {}, {}
    for seed in arguments.seeds:
        summaries = arms(arguments.python, arguments.out, seed)
        policies = {name: summary["eval"]["after"] for name, summary in summaries.items()}
        before = {"warm-up": summaries[OWN]["eval"]["before"]}
        title = f"seed {seed}: accuracy (%), 95 % interval"
        console.print(table.comparison_table(title, before | policies))
        for name, others in ((VLLM, (OWN, AGAIN)), (AHEAD, (OWN, AGAIN, VLLM))):
            found = outside(policies[name], [policies[other] for other in others])
            outsiders[name] += [f"seed {seed}: {one}" for one in found]
        for name, policy in (before | policies).items():
            collected.setdefault(name, []).append(policy)
        for name, summary in summaries.items():
            tokens.setdefault(name, []).append(summary["generated_tokens"])
            seconds.setdefault(name, []).append(round(summary["wall_seconds"]))
    means = {name: mean_of(policies) for name, policies in collected.items()}
    title = f"mean (and range) over {len(arguments.seeds)} seeds"
    console.print(table.comparison_table(title, means))
    figures.accuracy_picture(arguments.out / "accuracy.png", means, f"ledger: {title}")
    print(json.dumps({"outside": outsiders, "generated_tokens": tokens, "wall_seconds": seconds}))


if __name__ == "__main__":
    main()
