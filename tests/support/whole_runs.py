"""Stops a training run at a chosen poll, and asserts that two runs have equal results."""

import jax
import numpy as np
import orbax.checkpoint as ocp

from bacr_jax.files import read_lines
from bacr_jax.parallel.preemption import Preempted
from bacr_jax.runs.metrics import without_timings

# Config of a complete run that takes a minute, with warm-up, evaluations and checkpoints. It
# compiles few programs for decoding. Tests in test_loop.py also refill decoding slots.
WHOLE_RUN = """
model: {compute_dtype: float32, hidden_size: 16, intermediate_size: 32, num_layers: 1,
        scan_layers: false, remat: none}
data: {ledger: {train_size: 64}}
warmup: {steps: 12, target_accuracy: 0.0, short_accuracy: 0.0, hold_accuracy: 0.0}
budget: {min: 4, max: 12}
curriculum: {mu0: 8, sigma: 4, update_every: 2}
rollout: {questions: 4, group_size: 4, answer_tokens: 2, chunk: 6, windows: 1, refill: 1.0}
value: {hidden_size: 8, inner_steps: 2, warmup_iterations: 1}
optimizer: {learning_rate: 1.0e-3}
train: {steps: 4, minibatches: 2}
eval: {every: 2, budgets: [4, 12], size: 16, samples: 1, temperature: 1.0, top_p: 1.0}
checkpoint: {every: 2}
"""


class StopAt:
    """Interrupts a run like a SIGTERM, at its n-th poll after a number of steps has been logged."""

    def __init__(self, monkeypatch, metrics, steps, at):
        """Replaces the poll of runs in this process.

        Args:
          metrics: path of the run's metrics.jsonl.
          steps: number of steps that must have been logged.
          at: n, counted from 1.
        """
        self.metrics, self.steps, self.left = metrics, steps, at
        monkeypatch.setattr(
            "bacr_jax.parallel.preemption.PreemptionHandler.poll", lambda _: self.poll()
        )

    def poll(self):
        logged = len(read_lines(self.metrics))
        self.left -= logged >= self.steps
        if self.left == 0:
            raise Preempted("SIGTERM")


def state_of(folder, step):
    """Returns all arrays of the checkpoint at a step as nested dicts of NumPy arrays."""
    path = folder.absolute() / "checkpoints" / str(step) / "state"
    reader = ocp.PyTreeCheckpointer()
    to_numpy = lambda _: ocp.RestoreArgs(restore_type=np.ndarray)
    arguments = jax.tree.map(to_numpy, reader.metadata(path).item_metadata.tree)
    return reader.restore(path, restore_args=arguments)


def assert_same_run(one, other, step, *, also=("best.json",)):
    """Asserts that two runs have exactly equal checkpoints, metrics, evaluations and traces.

    Durations in the metrics may differ.

    Args:
      one: folder of the first run.
      other: folder of the second run.
      step: step of the compared checkpoints.
      also: further files that must be equal.
    """
    assert without_timings(one / "metrics.jsonl") == without_timings(other / "metrics.jsonl")
    jax.tree.map(np.testing.assert_array_equal, state_of(one, step), state_of(other, step))
    files = lambda folder: sorted(path.name for path in (folder / "rollouts").iterdir())
    assert files(one) == files(other)
    for name in ("eval.jsonl", *also, *(f"rollouts/{name}" for name in files(one))):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
