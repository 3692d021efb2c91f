"""Compares memory allocators by running the same training steps on a CPU with each of them.

    python benchmarks/allocators.py --model models/smollm2-135m [--jemalloc FILE] [key=value ...]

A training step on a CPU allocates and frees gigabytes. glibc returns large blocks to the kernel
immediately, and the kernel zeroes their pages when they are allocated again. Each run is a separate
process with one of these settings of the environment variables:

    glibc       no variables
    huge pages  GLIBC_TUNABLES requests pages of 2 MiB
    one arena   glibc keeps all freed memory, in one arena
    jemalloc    LD_PRELOAD loads jemalloc, which keeps all freed memory (only with --jemalloc)

For each setting, the script prints medians over the steps of all rounds without the first step of
each run, the share of CPU time that was spent in the kernel, and the peak memory of a process. It
fails if any number in metrics.jsonl depends on the allocator. The last line is one JSON object.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import record

KEEP_ALL = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 36),
}
# Allocates all sizes in one arena, and never returns its free pages to the kernel.
JEMALLOC_OPTIONS = "oversize_threshold:0,dirty_decay_ms:-1,muzzy_decay_ms:-1,thp:always,narenas:1"
# Disables the warm-up and nearly all of the evaluation, so that a run mainly consists of training.
SETTINGS = (
    *("warmup.steps=0", "eval.size=4", "eval.budgets=[12]", "eval.samples=0", "eval.holdout=4"),
    *("output.report=false", "output.tensorboard=false", "output.rollouts=0"),
)


@dataclass
class Measurements:
    """Measurements of the runs with one allocator.

    Attributes:
      learn, rollout: seconds of each step.
      kernel_shares: share of each process's CPU time that was spent in the kernel.
      memory: peak memory of each process, in GB.
    """

    learn: list[float] = field(default_factory=list)
    rollout: list[float] = field(default_factory=list)
    kernel_shares: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """Returns the medians and the peak memory."""
        return {
            "learn_s": round(statistics.median(self.learn), 2),
            "rollout_s": round(statistics.median(self.rollout), 2),
            "kernel_share": round(statistics.median(self.kernel_shares), 3),
            "memory_gb": round(max(self.memory), 1),
        }


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="an imported SmolLM2-135M")
    parser.add_argument("--jemalloc", type=Path, help="libjemalloc.so.2 (Debian: libjemalloc2)")
    parser.add_argument("--config", default="smollm2-135m")
    parser.add_argument("--folder", type=Path, default=Path("runs/allocators"), help="a new folder")
    parser.add_argument("--steps", type=int, default=5, help="of each run; the first one compiles")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("keys", nargs="*", metavar="key=value", help="of the training's config")
    record.add_option(parser)
    return parser.parse_args()


def environments(jemalloc: Path | None) -> dict[str, dict[str, str]]:
    """Returns the environment variables for each allocator."""
    variables = {
        "glibc": {},
        "huge pages": {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
        "one arena": {**KEEP_ALL, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
    }
    if jemalloc is not None:
        variables["jemalloc"] = {
            "LD_PRELOAD": str(jemalloc.resolve(strict=True)),
            "MALLOC_CONF": JEMALLOC_OPTIONS,
        }
    return variables


def run(options: argparse.Namespace, variables: dict[str, str], folder: Path) -> os.struct_rusage:
    """Trains in a new process and returns its resource usage."""
    command = [
        *(sys.executable, "-m", "bacr_jax.train", "--config", options.config),
        *(f"model.path={options.model}", f"train.steps={options.steps}", f"output.dir={folder}"),
        f"output.compile_cache={options.folder / 'compiled'}",
        *SETTINGS,
        *options.keys,
    ]
    folder.mkdir(parents=True)
    with open(folder.with_suffix(".log"), "w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command, env={**os.environ, **variables}, stdout=log, stderr=subprocess.STDOUT
        )
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{folder.with_suffix('.log')}: the run failed")
    return usage


def without_times(step: dict[str, float]) -> dict[str, float]:
    """Returns the metrics of a step that must not depend on the allocator."""
    return {
        name: value for name, value in step.items() if not name.startswith(("time/", "process/"))
    }


def main() -> None:
    """Runs the allocators alternately and prints the results."""
    options = parse()
    allocators = environments(options.jemalloc)
    measurements = {name: Measurements() for name in allocators}
    expected: list[dict[str, float]] | None = None
    # The first run fills the compilation cache and is not measured.
    run(options, {}, options.folder / "compiling")
    for round_number in range(options.rounds):
        for name, variables in allocators.items():
            folder = options.folder / f"{name.replace(' ', '-')}-{round_number}"
            usage = run(options, variables, folder)
            lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            steps = [json.loads(line) for line in lines]
            result = measurements[name]
            result.learn += [step["time/learn"] for step in steps[1:]]
            result.rollout += [step["time/rollout"] for step in steps[1:]]
            result.kernel_shares.append(usage.ru_stime / (usage.ru_utime + usage.ru_stime))
            result.memory.append(usage.ru_maxrss / 1e6)
            numbers = [without_times(step) for step in steps]
            expected = expected or numbers
            if numbers != expected:
                raise SystemExit(f"{folder}: other metrics than under the first allocator")
            print(f"{name}, round {round_number}: {result.summary()}", flush=True)
    times: dict[str, list[float]] = {}
    for name, result in measurements.items():
        times |= {f"learning, {name}": result.learn, f"sampling, {name}": result.rollout}
    record.write(options, record.seconds(times))
    summary = {name: result.summary() for name, result in measurements.items()}
    print(f"\n{'':12}learn (s)  rollout (s)  kernel  memory (GB)")
    for name, row in summary.items():
        print(
            f"{name:12}{row['learn_s']:9.1f}{row['rollout_s']:13.1f}{row['kernel_share']:8.0%}"
            f"{row['memory_gb']:13.1f}"
        )
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
