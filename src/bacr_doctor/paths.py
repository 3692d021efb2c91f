"""Checks the library's programs on a tiny model against a float64 implementation in NumPy.

The checks cover the learner's forward pass, decoding, updates with and without LoRA adapters,
checkpoints, long sequences, and an update that two processes share. `trial` builds the tiny runs,
and `reference` implements the model in NumPy.
"""

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bacr_doctor import reference
from bacr_doctor.children import MOST_SECONDS, Check, child_process
from bacr_doctor.records import MOST_PROBLEMS, Record, Subject, ok_or_broken
from bacr_doctor.trial import Trial, make_long_trial, make_trial
from bacr_jax.learner.batch import Batch
from bacr_jax.learner.train_step import TrainState, score_batch
from bacr_jax.model import adapters
from bacr_jax.parallel import peers, processes
from bacr_jax.runs.checkpoint import Checkpoints
from bacr_jax.runs.digest import fingerprint
from bacr_jax.runs.health import MISMATCH, SYMPTOMS
from bacr_jax.types import Params

# Maximum error of a log-probability in nats, by compute dtype. On sequences of thousands of tokens,
# rounding causes about 1/7 of this error in float32 and 1/3 in bfloat16.
_LARGEST_ERROR = {"float32": 1e-3, "bfloat16": 0.5}
# Maximum mean error of log-probabilities in nats. Rounding causes similar fractions of this error.
_MEAN_ERROR = {"float32": 1.5e-4, "bfloat16": 0.08}
# Maximum error of a directional derivative, relative to the gradient norm of the parameter array.
_SLOPE_ERROR = {"float32": 2e-3, "bfloat16": 0.25}
# Maximum error of an Adam step, relative to the learning rate.
_STEP_ERROR = 1e-3
# Default epsilon of Adam.
_EPSILON = 1e-8
# Step size of the central differences that estimate a directional derivative.
_DIFFERENCE = 1e-5
# Threshold of the `mismatch` check, in nats per token. It is lower than the threshold of a training
# run, because the rounding error of two layers is smaller than the error of dozens of layers.
_MISMATCH = MISMATCH / 5
# Maximum relative error of the loss and gradient norm when two processes share an update.
_SHARED_ERROR = 1e-3


def _compare_logprobs(trial: Trial, batch: Batch, thinking: Any, answers: Any) -> Record:
    """Compares the log-probabilities of all sampled tokens with the NumPy reference.

    Args:
      trial: the tiny run that computed the log-probabilities.
      batch: the batch with the sampled tokens.
      thinking: log-probabilities of the thinking tokens, [traces, tokens].
      answers: log-probabilities of the answer tokens, [traces, truncation points, tokens].
    """
    dtype = trial.policy.learner.dtype.name
    params = reference.to_float64(trial.params)
    right_thinking, right_answers = trial.expected(params, batch)
    thinking_errors = np.asarray(thinking, float) - right_thinking
    answer_errors = np.asarray(answers, float) - right_answers
    thinking_mask = np.asarray(batch.thinking_mask)
    answer_mask = np.asarray(batch.answer_mask)
    errors = np.concatenate(
        [
            np.abs(thinking_errors[thinking_mask]),
            np.abs(answer_errors[answer_mask]),
        ]
    )
    largest = float(errors.max())
    mean = float(errors.mean())
    row_length = batch.trunk.shape[1]
    measured = (
        f"{dtype}, {errors.size} tokens, rows up to {row_length}: "
        f"off by {mean:.1e} nats, at most {largest:.1e}"
    )
    problems = []
    is_near = largest <= _LARGEST_ERROR[dtype] and mean <= _MEAN_ERROR[dtype]
    # The condition is negated, because `is_near` is False if an error is NaN.
    if not is_near:
        problems.append("log-probabilities are not those of float64")
    return ok_or_broken(measured, problems, {"most": largest, "mean": mean})


def forward(subject: Subject, dtype: str) -> Record:
    """Compares the learner's log-probabilities with the NumPy reference.

    The batch is sampled in float32. It contains prompts with their thinking, and answers that
    continue the thinking from truncation points.

    Args:
      subject: the run for which the machine is checked.
      dtype: compute dtype of the learner.
    """
    trial = make_trial(subject, dtype)
    batch = make_trial(subject, "float32").batch
    params = jax.tree.map(jnp.asarray, trial.params)
    with trial.matmul_precision():
        scores = score_batch(
            params,
            batch,
            trial.rules.allowed_tokens,
            spec=trial.policy.learner,
        )
    return _compare_logprobs(trial, batch, scores.thinking, scores.answers)


def decode(subject: Subject, dtype: str | None) -> Record:
    """Compares the sampler's log-probabilities with the NumPy reference.

    Args:
      subject: the run for which the machine is checked.
      dtype: compute dtype. If None, the check uses the compute dtype and the sequence length of the
        run.
    """
    trial = make_long_trial(subject) if dtype is None else make_trial(subject, dtype)
    batch = trial.batch
    return _compare_logprobs(trial, batch, batch.thinking_logprobs, batch.answer_logprobs)


def mismatch(subject: Subject) -> Record:
    """Compares the log-probabilities of the sampler and the learner in bfloat16.

    Importance weights correct for this difference during training. The status is `warn` if the mean
    absolute difference is above a fifth of the threshold at which a training run warns.
    """
    trial = make_trial(subject, "bfloat16")
    _, metrics = trial.step(trial.start(), trial.batch)
    values = {name: float(metrics[f"mismatch/{name}"]) for name in ("absolute", "k1", "k3")}
    absolute = values["absolute"]
    measured = f"{absolute:.4f} nats a token in bfloat16, k3 {values['k3']:.1e}"
    if absolute <= _MISMATCH:
        return Record("ok", measured, values=values)
    keys = {"loss.importance_cap": 2.0}
    return Record("warn", measured, SYMPTOMS["mismatch"].message, keys, values)


def _surrogate(trial: Trial, params: Params, batch: Batch) -> float:
    """Computes the policy-gradient loss in float64 from the log-probabilities of `reference`.

    The loss is the sum of -advantage x log-probability over all sampled tokens, divided by their
    number. Its gradient is the policy gradient at importance ratio 1.
    """
    float64_params = reference.to_float64(params)
    thinking, answers = trial.expected(float64_params, batch)
    thinking_advantages = np.asarray(batch.thinking_advantages)
    answer_advantages = np.asarray(batch.answer_advantages)
    total = (thinking_advantages * thinking).sum()
    total += (answer_advantages[..., None] * answers).sum()
    thinking_count = int(np.sum(batch.sampled))
    answer_count = int(np.sum(batch.answered))
    return float(-total / (thinking_count + answer_count))


def _slope(
    trial: Trial,
    params: Params,
    batch: Batch,
    leaf_path: Any,
    direction: np.ndarray,
) -> float:
    """Estimates the directional derivative of the surrogate loss by central differences.

    Args:
      trial: the tiny run.
      params: parameters at which the derivative is estimated.
      batch: the batch on which the loss is computed.
      leaf_path: path of the parameter array that is varied.
      direction: direction of the change, in the shape of the parameter array.
    """

    def surrogate_at(distance: float) -> float:
        def move(path: Any, leaf: np.ndarray) -> np.ndarray:
            if path != leaf_path:
                return leaf
            return leaf + distance * direction

        moved = jax.tree_util.tree_map_with_path(move, params)
        return _surrogate(trial, moved, batch)

    above = surrogate_at(_DIFFERENCE)
    below = surrogate_at(-_DIFFERENCE)
    return (above - below) / (2 * _DIFFERENCE)


def _moments(state: TrainState, name: str) -> dict[Any, np.ndarray]:
    """Returns Adam's first moment (`mu`) or second moment (`nu`) of every parameter array, by path.

    The moments, which are running means of the gradient and of its square, are collected from
    several Adam states, because each parameter group has a separate state.
    """
    moments = {}
    trees = optax.tree_utils.tree_get_all_with_path(state.policy_opt, name)
    for _, tree in trees:
        leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
        for path, leaf in leaves:
            moments[path] = np.asarray(leaf, np.float64)
    return moments


@dataclass(frozen=True)
class LeafStep:
    """The first optimizer step of one parameter array.

    Attributes:
      path: path of the array in the parameter tree.
      before: parameter values before the step.
      gradient: gradient before clipping, recovered from Adam's first moment.
      is_adam: True if the second moment and the step are the ones that Adam computes from this
        gradient.
    """

    path: Any
    before: np.ndarray
    gradient: np.ndarray
    is_adam: bool


def _leaf_steps(
    trial: Trial, params: Params, state: TrainState, grad_norm: float
) -> Iterator[LeafStep]:
    """Yields the first optimizer step of every trained parameter array.

    Args:
      trial: the tiny run.
      params: float64 parameters before the step.
      state: train state after the step.
      grad_norm: global gradient norm before clipping.
    """
    settings = trial.config.optimizer
    first_moments = _moments(state, "mu")
    second_moments = _moments(state, "nu")
    _, trained = adapters.split(params)
    leaves_before, _ = jax.tree_util.tree_flatten_with_path(trained)
    leaves_after = jax.tree.leaves(state.policy)
    for (path, before), after in zip(leaves_before, leaves_after):
        # After the first step, the moments are (1 - b1) times the gradient and (1 - b2) times its
        # square.
        mean = first_moments[path] / (1 - settings.b1)
        square = second_moments[path] / (1 - settings.b2)
        rate = settings.learning_rate
        if path[0].key == "budget":
            rate = settings.conditioning_learning_rate
        step = before - np.asarray(after, float)
        expected_step = mean / (np.sqrt(square) + _EPSILON)
        square_atol = _STEP_ERROR * float(square.max())
        square_is_right = np.allclose(
            square,
            mean**2,
            rtol=_STEP_ERROR,
            atol=square_atol,
        )
        step_is_right = np.allclose(
            step / rate,
            expected_step,
            rtol=_STEP_ERROR,
            atol=_STEP_ERROR,
        )
        unclipped = mean * max(1.0, grad_norm / settings.grad_clip)
        yield LeafStep(path, before, unclipped, square_is_right and step_is_right)


def update(subject: Subject, dtype: str | None, rank: int | None = None) -> Record:
    """Checks the gradients and the optimizer step of one update for each parameter array.

    The gradient's component along a random direction must equal a finite difference of the loss
    computed by the NumPy reference. The step must be the one that Adam computes from the gradient.

    Args:
      subject: the run for which the machine is checked.
      dtype: compute dtype. If None, the check uses the compute dtype and the sequence length of the
        run.
      rank: rank of LoRA adapters on frozen parameters. If None, all parameters are trained.
    """
    keys = {"adapter.rank": rank} if rank else {}
    if dtype is None:
        trial = make_long_trial(subject)
        batch = trial.batch
    else:
        trial = make_trial(subject, dtype, **keys)
        batch = make_trial(subject, "float32", **keys).batch
    dtype = trial.policy.learner.dtype.name
    state, metrics = trial.step(trial.start(), batch)
    grad_norm = float(metrics["policy/grad_norm"])
    gap = float(metrics["mismatch/absolute"])
    if metrics["policy/skipped"]:
        problem = f"{dtype}: the gradient is not finite"
        return ok_or_broken(f"norm {grad_norm}", [problem], {})
    problems = []
    if not gap <= _MEAN_ERROR[dtype]:
        problems.append(f"log-probabilities are off by {gap:.1e} nats")
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), trial.params)
    rng = np.random.default_rng(7)
    worst = 0.0
    for leaf_step in _leaf_steps(trial, params, state, grad_norm):
        direction = rng.normal(size=leaf_step.before.shape)
        expected = _slope(trial, params, batch, leaf_step.path, direction)
        slope = float((leaf_step.gradient * direction).sum())
        leaf_norm = float(np.linalg.norm(leaf_step.gradient))
        error = abs(slope - expected) / max(leaf_norm, 1e-6)
        # np.maximum propagates NaN, but the built-in max may not.
        worst = float(np.maximum(worst, error))
        name = jax.tree_util.keystr(leaf_step.path, simple=True)
        if not error <= _SLOPE_ERROR[dtype]:
            problems.append(f"{name} has slope {slope:.2e} and not {expected:.2e}")
        if not leaf_step.is_adam:
            problems.append(f"{name} has another step than Adam's")
    row_length = batch.trunk.shape[1]
    measured = f"{dtype}, rows up to {row_length}: slopes off by {worst:.1e} of the norm"
    values = {"worst": worst, "norm": grad_norm, "gap": gap}
    return ok_or_broken(measured, problems[:MOST_PROBLEMS], values)


def checkpoint(subject: Subject) -> Record:
    """Checks that a train state is unchanged after it is saved and restored."""
    trial = make_trial(subject, "float32")
    state = {"train": trial.start(), "step": np.int32(1)}
    empty_state = jax.tree.map(jnp.zeros_like, state)
    with subject.temporary_folder() as folder:
        checkpoints = Checkpoints(folder / "checkpoints", keep=1)
        checkpoints.save(1, state, {})
        checkpoints.wait()
        restored = checkpoints.restore(empty_state)[1]
        checkpoints.close()
    problems = []
    if fingerprint(restored) != fingerprint(state):
        problems.append("the restored state differs")
    count = len(jax.tree.leaves(state))
    measured = f"{count} arrays saved, read back, restored"
    return ok_or_broken(measured, problems, {})


def two_processes(subject: Subject) -> Record:
    """Compares an update that two processes share with the same update in one process.

    The processes use one GPU each if the machine has at least two GPUs, and the CPU otherwise.

    Raises:
      TimeoutError: if a process does not finish.
      RuntimeError: if a process fails. The message contains its error.
    """
    trial = make_trial(subject, "float32")
    _, metrics = trial.step(trial.start(), trial.batch)
    use_gpus = jax.default_backend() == "gpu" and jax.local_device_count() > 1
    batch = jax.tree.map(np.asarray, trial.batch)
    address = _free_address()
    halves = [Check("half", half, (batch, address, index, use_gpus)) for index in range(2)]
    records = []
    with contextlib.ExitStack() as stack:
        waits = [stack.enter_context(child_process([check], subject)) for check in halves]
        deadline = time.monotonic() + MOST_SECONDS
        for check, next_record in zip(halves, waits):
            record = next_record(check, deadline)
            if record is None:
                raise TimeoutError("one of the two processes did not end in time")
            records.append(record)
    for record in records:
        if record.status == "broken":
            raise RuntimeError(record.measured)
    errors = []
    for record in records:
        for name, value in record.values.items():
            errors.append(value / float(metrics[name]) - 1)
    largest = float(np.abs(errors).max())
    kind = "GPUs" if use_gpus else "CPU processes"
    measured = f"two {kind}: loss and gradient off by {largest:.1e}"
    problems = [] if largest < _SHARED_ERROR else ["not the update of one process"]
    return ok_or_broken(measured, problems, records[0].values)


def _free_address() -> str:
    """Returns `localhost:PORT` with a port that is currently unused."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        _, port = free.getsockname()
        return f"localhost:{port}"


def half(
    subject: Subject,
    batch: Batch,
    address: str,
    index: int,
    use_gpus: bool,
) -> Record:
    """Runs one of the two processes of a shared update.

    Args:
      subject: the run for which the machine is checked.
      batch: the batch of the whole update.
      address: host and port of the JAX coordinator.
      index: index of this process, 0 or 1.
      use_gpus: True to use the visible GPU with this index, False to use the CPU.

    Returns:
      A record with the loss and the gradient norm in its values.
    """
    os.environ["JAX_COORDINATOR_ADDRESS"] = address
    os.environ["JAX_NUM_PROCESSES"] = "2"
    os.environ["JAX_PROCESS_ID"] = str(index)
    gpu = ""
    if use_gpus:
        # Only use the GPUs that this job may use.
        visible_gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpu = visible_gpus.split(",")[index].strip() if visible_gpus else str(index)
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    if not use_gpus:
        jax.config.update("jax_platforms", "cpu")
    processes.join()
    trial = make_trial(subject, "float32", jax.device_count())
    with peers.watched() as report_progress:
        report_progress("update", 1)
        _, metrics = trial.step(trial.start(), batch)
        values = {name: float(metrics[name]) for name in ("loss/total", "policy/grad_norm")}
    return Record("ok", "", values=values)
