"""The library's own paths on a tiny model, held against NumPy's float64 (`reference`)."""

import contextlib
import functools
import math
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bacr_doctor import reference
from bacr_doctor.children import MOST_SECONDS, Check, working
from bacr_doctor.records import Record, Subject, held
from bacr_jax.config import Config, derived
from bacr_jax.learner.batch import Batch, make_batch
from bacr_jax.learner.objective import Minibatch
from bacr_jax.learner.optimizer import policy_optimizer
from bacr_jax.learner.train_step import TrainState, init_state, score_batch, train_step
from bacr_jax.methods import load_method
from bacr_jax.model import adapters
from bacr_jax.parallel import peers, place, processes, row_sharding
from bacr_jax.prompts.decode_rules import decode_rules
from bacr_jax.prompts.stop_strings import no_stop_string
from bacr_jax.rollout import Rows, Sampler, generate, sampling_params
from bacr_jax.runs.checkpoint import Checkpoints
from bacr_jax.runs.digest import fingerprint
from bacr_jax.runs.health import MISMATCH, SYMPTOMS
from bacr_jax.runs.setup import Policy, make_policy, mesh_shape, model_shape
from bacr_jax.types import Params, Prompts
from bacr_plan.workload import planned_shape

# Largest error of a log-probability in nats, and its mean: rounding gives a seventh of them in
# float32 after thousands of tokens, a third in bfloat16.
_OFF = {"float32": (1e-3, 1.5e-4), "bfloat16": (0.5, 0.08)}
# Error of a slope along a random direction, of the gradient's norm; of a step of Adam, of its rate.
_SLOPE, _STEP = {"float32": 2e-3, "bfloat16": 0.25}, 1e-3
# Two layers round less than the dozens of a run, by which a run's own warning is set.
_MISMATCH = MISMATCH / 5
# Heads as wide as those of released models, which kernels are made for; all else is tiny. Phi is
# given. What a method credits does not matter: it is drawn.
_VOCABULARY = 32
_TINY = {
    "method": "bacr",
    "advantage.baseline": "constant",
    "model.num_layers": 2,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.head_dim": 64,
    "data.max_prompt_tokens": 5,
    "rollout.questions": 4,
    "rollout.group_size": 2,
    "rollout.slots": 4,
    "rollout.windows": 2,
    "rollout.refill": 1.0,
    "rollout.answer_tokens": 3,
    "budget.max": 72,
    "loss.entropy_coef": 0.0,
    "loss.aggregate": "token_mean",
    "optimizer.learning_rate": 0.01,
    "optimizer.conditioning_learning_rate": 0.02,
}
# What comes after the prompt of a long row; on a CPU, its most tokens and most scores of attention.
_AFTER_PROMPT, _LONGEST, _MOST_SCORES = 80, 4096, 2**26


@dataclass(frozen=True)
class Trial:
    """A small run: its settings, and one rollout and update of it with made-up credit."""

    config: Config
    devices: int = 1

    @functools.cached_property
    def policy(self) -> Policy:
        """Its compiled-form settings, on all devices or on one."""
        config, shape = self.config, model_shape(self.config, _VOCABULARY)
        layout = mesh_shape(config, shape, self.devices) if self.devices > 1 else None
        return make_policy(config, load_method(config), _VOCABULARY, layout)

    @functools.cached_property
    def params(self) -> Params:
        """Random parameters, on the host."""
        return reference.random_params(self.policy.learner.model, self.config.adapter.rank)

    @functools.cached_property
    def rules(self) -> Any:
        """Every token may be drawn; the last one ends the turn, but not of the few long rows."""
        never, ends = no_stop_string(_VOCABULARY), len(self.rows.budgets) > 2
        return decode_rules(
            allowed_tokens=np.ones(_VOCABULARY, bool),
            eos_ids=[_VOCABULARY - 1] if ends else [],
            think_close=never,
            answer_close=never,
            forced_suffix=[2, 3],
            natural_suffix=[3],
        )

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """A run's own, at its peak from the first step on."""
        return policy_optimizer(self.config.optimizer, 1)

    def precisely(self) -> contextlib.AbstractContextManager[Any]:
        """A GPU takes TF32 for products in float32, if nobody asks for more."""
        exact = self.config.model.compute_dtype == "float32"
        return jax.default_matmul_precision("highest" if exact else "default")

    @functools.cached_property
    def rows(self) -> Rows:
        """Budgets from the largest to none, most of them large, with two cuts each."""
        count = self.config.rollout.questions * self.config.rollout.group_size
        shares = np.sqrt(np.linspace(1, 0, count))
        budgets = (self.config.budget.max * shares).astype(np.int32)
        return Rows(budgets, np.stack([budgets // 2, budgets], axis=1))

    def rollout(self) -> tuple[Prompts, Any]:
        """Prompts, the first one as long as any may be, and what the model says to them."""
        draw, width = np.random.default_rng(3), self.config.data.max_prompt_tokens
        lengths = np.linspace(width, 1, len(self.rows.budgets)).astype(np.int32)
        tokens = draw.integers(4, _VOCABULARY - 1, (len(lengths), width)).astype(np.int32)
        fields: Any = tokens * (np.arange(width) < lengths[:, None]), lengths, 0 * lengths, lengths
        params, prompts = jax.tree.map(jnp.asarray, self.params), Prompts(*fields)
        with self.precisely():
            phi, copy = self.policy.phi_of(params), self.policy.decode_params(params)
            sampler = Sampler(self.policy.rollout, self.rules, sampling_params(1.0), phi)
            return prompts, generate(copy, prompts, self.rows, jax.random.key(4), sampler)

    @functools.cached_property
    def batch(self) -> Batch:
        """A rollout with advantages drawn from a normal distribution."""
        (prompts, made), draw = self.rollout(), np.random.default_rng(5)

        def normal(*shape: int) -> np.ndarray:
            return np.asarray(draw.normal(size=shape), np.float32)

        return make_batch(
            prompts,
            made.trunks,
            made.branches,
            cuts=self.rows.cuts,
            thinking_advantages=normal(*made.trunks.logprobs.shape),
            answer_advantages=normal(*self.rows.cuts.shape),
            returns=normal(*self.rows.cuts.shape),
        )

    def expected(self, params: Params, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities by `reference`, each branch a sequence of its own; 0 elsewhere."""
        of = functools.partial(reference.logprobs, params, config=self.policy.learner.model)
        both = np.zeros(batch.thinking_logprobs.shape), np.zeros(batch.answer_logprobs.shape)
        for i, (trunk, start) in enumerate(zip(batch.trunk, batch.prompt_lengths)):
            budget = int(batch.budgets[i])
            if count := int(batch.sampled[i]):
                both[0][i, :count] = of(trunk[: start + count], budget, count)
            for j in np.flatnonzero(batch.answered[i]):
                count = int(batch.answered[i, j])
                branch = batch.branches[i, j, : batch.forced[i, j] + count]
                whole = np.concatenate([trunk[: batch.context[i, j]], branch])
                both[1][i, j, :count] = of(whole, budget, count)
        return both

    def start(self) -> TrainState:
        """The state before any step."""
        # A step is given its arrays for good: they are copies.
        trained = jax.tree.map(jnp.array, adapters.split(self.params)[1])
        return self.policy.place(init_state(trained, None, self.optimizer, self.optimizer))

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Any]:
        """The state after an update, and its metrics."""
        spec, tx, frozen = self.policy.learner, self.optimizer, adapters.split(self.params)[0]
        batch = batch if spec.mesh is None else place(batch, row_sharding(spec.mesh))
        given = (state, Minibatch(batch), self.rules.allowed_tokens, frozen)
        with self.precisely():
            return train_step(*given, spec=spec, policy_tx=tx, head_tx=tx)


@functools.cache
def trial(subject: Subject, dtype: str, devices: int = 1, **keys: Any) -> Trial:
    """A trial with the heads, kernels, remat and loop over layers of the run to be started."""
    config = subject.config
    own: dict[str, Any] = {"model.remat": config.model.remat}
    own["model.scan_layers"] = config.model.scan_layers
    if dtype == "bfloat16":  # Kernels may not know float32.
        own["model.attention"] = config.model.attention
        own["rollout.attention"] = config.rollout.attention
    if subject.named:
        shape = planned_shape(config)[0]
        names = ("num_heads", "num_kv_heads", "head_dim")
        own |= {f"model.{name}": getattr(shape, name) for name in names}
    made = Subject(Config()).under({**_TINY, "model.compute_dtype": dtype, **own, **keys})
    return Trial(made.config, devices)


def run_dtype(subject: Subject) -> str:
    """What the run computes in; on a GPU, without a run, what runs there would."""
    guessed = jax.default_backend() == "gpu" and not subject.named
    return "bfloat16" if guessed else subject.config.model.compute_dtype


def long_trial(subject: Subject) -> Trial:
    """One whose first row is as long as the run's longest, as far as a CPU can do that."""
    config, dtype, longest = subject.config, run_dtype(subject), _LONGEST
    if subject.named:
        thinking = max(config.budget.max, derived.largest_evaluated(config)) + config.budget.grace
        longest = config.data.max_prompt_tokens + thinking + config.rollout.answer_tokens
    if jax.default_backend() == "cpu":
        heads = trial(subject, dtype).config.model.num_heads
        longest = min(longest, _LONGEST, math.isqrt(_MOST_SCORES // heads))
    rows = {"rollout.questions": 2, "rollout.group_size": 1, "rollout.slots": 2}
    prompt = {"data.max_prompt_tokens": max(longest - _AFTER_PROMPT, 5), "model.num_layers": 1}
    return trial(subject, dtype, **rows, **prompt)


def _agreement(tried: Trial, batch: Batch, found: tuple[Any, Any]) -> Record:
    """Log-probabilities of all sampled tokens, held against the reference's."""
    dtype = tried.policy.learner.dtype.name
    expected = tried.expected(reference.doubled(tried.params), batch)
    masks = np.asarray(batch.thinking_mask), np.asarray(batch.answer_mask)
    parts = [(np.asarray(x, float) - y)[mask] for x, y, mask in zip(found, expected, masks)]
    off = np.abs(np.concatenate(parts))
    most, mean = float(off.max()), float(off.mean())
    seen = f"{dtype}, {off.size} tokens, rows up to {batch.trunk.shape[1]}: off by {mean:.1e} nats"
    good = most <= _OFF[dtype][0] and mean <= _OFF[dtype][1]
    wrong = [] if good else ["log-probabilities are not those of float64"]
    return held(f"{seen}, at most {most:.1e}", wrong, {"most": most, "mean": mean})


def forward(subject: Subject, dtype: str) -> Record:
    """The learner's pass over trunks and branches."""
    tried, batch = trial(subject, dtype), trial(subject, "float32").batch
    params, allowed = jax.tree.map(jnp.asarray, tried.params), tried.rules.allowed_tokens
    with tried.precisely():
        of = score_batch(params, batch, allowed, spec=tried.policy.learner)
    return _agreement(tried, batch, (of.thinking, of.answers))


def decode(subject: Subject, dtype: str | None) -> Record:
    """What the sampler says of its tokens; without a type, of those after a long prompt."""
    tried = long_trial(subject) if dtype is None else trial(subject, dtype)
    batch = tried.batch
    return _agreement(tried, batch, (batch.thinking_logprobs, batch.answer_logprobs))


def mismatch(subject: Subject) -> Record:
    """Sampler against learner in bfloat16: what importance weights of a run would see."""
    tried = trial(subject, "bfloat16")
    metrics = tried.step(tried.start(), tried.batch)[1]
    found = {name: float(metrics[f"mismatch/{name}"]) for name in ("absolute", "k1", "k3")}
    seen = f"{found['absolute']:.4f} nats a token in bfloat16, k3 {found['k3']:.1e}"
    if found["absolute"] <= _MISMATCH:
        return Record("ok", seen, values=found)
    keys = {"loss.importance_cap": 2.0}
    return Record("warn", seen, SYMPTOMS["mismatch"].message, keys, found)


def _surrogate(tried: Trial, params: Params, batch: Batch) -> float:
    """What an update descends where the ratio is 1: advantages times log-probabilities."""
    thinking, answers = tried.expected(reference.doubled(params), batch)
    credit = np.asarray(batch.thinking_advantages) * thinking
    total = credit.sum() + (np.asarray(batch.answer_advantages)[..., None] * answers).sum()
    return float(-total / (int(np.sum(batch.sampled)) + int(np.sum(batch.answered))))


def _slope(tried: Trial, params: Params, batch: Batch, path: Any, along: np.ndarray) -> float:
    """Of the surrogate, by central differences, as the leaf at a path moves along a direction."""

    def moved(by: float) -> float:
        move = lambda at, leaf: leaf + by * along if at == path else leaf
        return _surrogate(tried, jax.tree_util.tree_map_with_path(move, params), batch)

    return (moved(1e-5) - moved(-1e-5)) / 2e-5


def _moments(state: TrainState, name: str) -> dict[Any, np.ndarray]:
    """A moment of every leaf, by its path; each group of leaves has an Adam of its own."""
    trees = [tree for _, tree in optax.tree_utils.tree_get_all_with_path(state.policy_opt, name)]
    leaves = [pair for tree in trees for pair in jax.tree_util.tree_flatten_with_path(tree)[0]]
    return {path: np.asarray(leaf, np.float64) for path, leaf in leaves}


def _taken(
    tried: Trial, params: Params, state: TrainState, norm: float
) -> Iterator[tuple[Any, np.ndarray, np.ndarray, bool]]:
    """What the first step from some parameters did to each leaf.

    Its path, its numbers before, the gradient that its first moment holds, and whether second
    moment and step are what Adam makes of that.
    """
    asked, first, second = tried.config.optimizer, _moments(state, "mu"), _moments(state, "nu")
    leaves = jax.tree_util.tree_flatten_with_path(adapters.split(params)[1])[0]
    for (path, leaf), after in zip(leaves, jax.tree.leaves(state.policy)):
        mean, square = first[path] / (1 - asked.b1), second[path] / (1 - asked.b2)
        is_phi = path[0].key == "budget"
        rate = asked.conditioning_learning_rate if is_phi else asked.learning_rate
        step, expected = leaf - np.asarray(after, float), mean / (np.sqrt(square) + 1e-8)
        good = np.allclose(square, mean**2, rtol=_STEP, atol=_STEP * float(square.max()))
        good &= np.allclose(step / rate, expected, rtol=_STEP, atol=_STEP)
        yield path, leaf, mean * max(1.0, norm / asked.grad_clip), bool(good)


def update(subject: Subject, dtype: str | None, rank: int | None = None) -> Record:
    """The gradient of each leaf, phi's too, against slopes of the reference; Adam's step by it.

    Without a type it is the run's, with a long row; `rank` is of adapters on a frozen base.
    """
    keys = {"adapter.rank": rank} if rank else {}
    tried = long_trial(subject) if dtype is None else trial(subject, dtype, **keys)
    batch = tried.batch if dtype is None else trial(subject, "float32", **keys).batch
    dtype, draw, wrong, worst = tried.policy.learner.dtype.name, np.random.default_rng(7), [], 0.0
    state, metrics = tried.step(tried.start(), batch)
    norm, gap = float(metrics["policy/grad_norm"]), float(metrics["mismatch/absolute"])
    if metrics["policy/skipped"]:
        return held(f"norm {norm}", [f"{dtype}: the gradient is not finite"], {})
    if not gap <= _OFF[dtype][1]:
        wrong.append(f"log-probabilities are off by {gap:.1e} nats")
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), tried.params)
    for path, leaf, grad, stepped in _taken(tried, params, state, norm):
        along = draw.normal(size=leaf.shape)
        slope, mine = _slope(tried, params, batch, path, along), float((grad * along).sum())
        off = abs(mine - slope) / max(float(np.linalg.norm(grad)), 1e-6)
        # NumPy's maximum of NaN is NaN, and that is not below anything.
        worst, name = float(np.maximum(worst, off)), jax.tree_util.keystr(path, simple=True)
        if not off <= _SLOPE[dtype]:
            wrong.append(f"{name} has slope {mine:.2e} and not {slope:.2e}")
        if not stepped:
            wrong.append(f"{name} has another step than Adam's")
    seen = f"{dtype}, rows up to {batch.trunk.shape[1]}: slopes off by {worst:.1e} of the norm"
    return held(seen, wrong[:3], {"worst": worst, "norm": norm, "gap": gap})


def checkpoint(subject: Subject) -> Record:
    """A train state saved, read back and restored where the run is to write."""
    state = {"train": trial(subject, "float32").start(), "step": np.int32(1)}
    with TemporaryDirectory(prefix=".bacr-doctor-", dir=subject.folder) as made:
        kept = Checkpoints(Path(made) / "checkpoints", keep=1)
        kept.save(1, state, {})
        kept.wait()
        restored = kept.restore(jax.tree.map(jnp.zeros_like, state))[1]
        kept.close()
    wrong = [] if fingerprint(restored) == fingerprint(state) else ["what was restored differs"]
    return held(f"{len(jax.tree.leaves(state))} arrays saved, read back, restored", wrong, {})


def two_processes(subject: Subject) -> Record:
    """An update whose rows and parameters two processes share, against that of one."""
    tried = trial(subject, "float32")
    metrics = tried.step(tried.start(), tried.batch)[1]
    gpus = jax.default_backend() == "gpu" and jax.local_device_count() > 1
    batch = jax.tree.map(np.asarray, tried.batch)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    halves = [Check("half", half, (batch, address, index, gpus)) for index in range(2)]
    with contextlib.ExitStack() as opened:
        both = [opened.enter_context(working([one], subject)) for one in halves]
        until = time.monotonic() + MOST_SECONDS
        found = [following(one, until) for one, following in zip(halves, both)]
    records = [one for one in found if one is not None]
    if len(records) < len(found):
        raise TimeoutError("a process has not ended")
    if broken := [one.measured for one in records if one.status == "broken"]:
        raise RuntimeError(broken[0])
    off = [one.values[name] / float(metrics[name]) - 1 for one in records for name in one.values]
    most = float(np.abs(off).max())
    seen = f"two {'GPUs' if gpus else 'CPU processes'}: loss and gradient off by {most:.1e}"
    return held(seen, [] if most < 1e-3 else ["not the update of one process"], records[0].values)


def half(subject: Subject, batch: Batch, address: str, index: int, gpus: bool) -> Record:
    """This process's part of an update."""
    told = {"COORDINATOR_ADDRESS": address, "NUM_PROCESSES": "2", "PROCESS_ID": str(index)}
    os.environ.update({f"JAX_{name}": value for name, value in told.items()})
    os.environ["CUDA_VISIBLE_DEVICES"] = str(index) if gpus else ""
    if not gpus:
        jax.config.update("jax_platforms", "cpu")
    processes.join()
    tried = trial(subject, "float32", jax.device_count())
    with peers.watched() as tell:
        tell("update", 1)
        metrics = tried.step(tried.start(), batch)[1]
        values = {name: float(metrics[name]) for name in ("loss/total", "policy/grad_norm")}
    return Record("ok", "", values=values)
