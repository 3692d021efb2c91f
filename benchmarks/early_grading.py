"""Measures the cost of grading in a step, with and without grading during sampling.

    python benchmarks/early_grading.py [--seconds 0.002] [--workers 2] [--steps 10] [--record FILE]

With early grading, answers are graded as soon as they have been sampled. Without it, grading starts
after the last answer. The benchmark runs the quickstart's model with a verifier that waits for
--seconds per answer without using the CPU, like a remote judge. A quarter of a step's traces are
sampled at a time. The two kinds of steps alternate. The script prints the seconds of each step. The
last line is one JSON object with the median seconds of sampling and grading together, and of
grading alone.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import record
from bacr_jax.config import io as config_io
from bacr_jax.prompts.task_data import TaskData
from bacr_jax.runs.folder import open_run
from bacr_jax.training.algorithm import iterate
from bacr_jax.training.loop import Trainer

ROOT = Path(__file__).resolve().parents[1]
VERIFIER = """
import time

def verify(question, answer, gold):
    time.sleep({seconds})
    return float(answer == gold)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=0.002, help="of the verifier, per answer")
    parser.add_argument("--workers", type=int, default=2, help="worker processes")
    parser.add_argument("--steps", type=int, default=10, help="of each kind, after one of each")
    record.add_option(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "v.py").write_text(VERIFIER.format(seconds=options.seconds))
        overrides = [
            f"output.dir={folder / 'run'}",
            f"grader={folder / 'v.py'}:verify",
            f"grading.workers={options.workers}",
            *("rollout.slots=64", "warmup.steps=150", "output.tensorboard=false"),
            *("warmup.target_accuracy=0", "warmup.short_accuracy=0", "warmup.hold_accuracy=0"),
            "curriculum.update_every=null",
        ]
        config = config_io.load([ROOT / "configs/quickstart.yaml"], overrides)
        with open_run(folder / "run", config) as opened:
            seconds = measure(Trainer(config, opened), options.steps)
    times = {
        f"{kind}_{name}": list(of_step)
        for kind, steps in seconds.items()
        for name, of_step in zip(("s", "grading_s"), zip(*steps[1:]))
    }
    record.write(options, record.seconds(times), {"ratio": ("late_s", "early_s")})
    result = {name: round(statistics.median(values), 3) for name, values in times.items()}
    print(json.dumps(result | {"ratio": round(result["late_s"] / result["early_s"], 2)}))
    return 0


def measure(trainer: Trainer, steps: int) -> dict[str, list[tuple[float, float]]]:
    """Runs steps of both kinds alternately.

    Returns:
      For each kind, pairs with the seconds of sampling plus grading, and of grading alone.
    """
    state, _ = trainer.start()
    kinds = {"early": contextlib.nullcontext, "late": waiting}
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for step in range(2 * (steps + 1)):
        kind = list(kinds)[step % 2]
        with kinds[kind]():
            state, done = iterate(trainer.run, state, step)
        parts = [float(done.metrics[f"time/{part}"]) for part in ("rollout", "verify")]
        answers = int(done.metrics["grader/graded"])
        print(f"{kind:5} rollout {parts[0]:.2f} s  verify {parts[1]:.2f} s  {answers} answers")
        found[kind].append((sum(parts), parts[1]))
    trainer.task_data.close()
    return found


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Disables early grading, so that no answer is graded before all have been sampled."""
    with mock.patch.object(TaskData, "early_grading", lambda *_: None):
        yield


if __name__ == "__main__":
    sys.exit(main())
