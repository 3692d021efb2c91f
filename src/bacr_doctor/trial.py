"""Builds tiny training runs with random parameters, random prompts and random advantages.

A tiny run (`Trial`) uses some settings of the run for which the machine is checked, such as remat
and the head shape. The checks in `paths`, `draws` and `rates` create a trial with `make_trial` or
`make_long_trial` and compare its results. This module does not compare results.
"""

import contextlib
import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float

from bacr_doctor import reference
from bacr_doctor.records import Subject
from bacr_jax.config import Config
from bacr_jax.config.derived import largest_evaluated
from bacr_jax.config.settings import resolve
from bacr_jax.learner.batch import Batch, make_batch
from bacr_jax.learner.objective import Minibatch
from bacr_jax.learner.optimizer import policy_optimizer
from bacr_jax.learner.train_step import TrainState, init_state, train_step
from bacr_jax.methods import load_method
from bacr_jax.model import adapters
from bacr_jax.parallel import place, row_sharding
from bacr_jax.prompts.decode_rules import DecodeRules, decode_rules
from bacr_jax.prompts.stop_strings import no_stop_string
from bacr_jax.rollout import Rollout, RolloutRequest, SamplingSetup, generate, sampling_params
from bacr_jax.runs.setup import Policy, make_policy, mesh_shape, model_shape
from bacr_jax.types import Params, Prompts
from bacr_plan.workload import planned_shape

_VOCABULARY = 32
# All sizes are tiny except the head width, which matches released models because attention kernels
# are written for these widths. The budget is passed to the model as an embedding. The choice of
# method does not matter, because the advantages are random.
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
# Number of tokens for thinking and the answer in a long sequence. All other tokens are the prompt.
_AFTER_PROMPT = 80
# Length in tokens of a long sequence if the command line contains no config. Also the maximum
# length on a CPU.
_LONGEST = 4096
# Maximum number of attention scores of a long sequence on a CPU, summed over all heads.
_MOST_SCORES = 2**26


@dataclass(frozen=True)
class Trial:
    """A tiny run with random parameters, whose results are compared with a NumPy implementation.

    The run can sample one rollout and apply one update. The advantages of the update are random,
    because the check of the update needs no rewards.

    Attributes:
      config: settings of the tiny run.
      devices: number of devices over which the parameters and the batch are sharded.
    """

    config: Config
    devices: int = 1

    @functools.cached_property
    def policy(self) -> Policy:
        """Builds the static settings of the compiled programs."""
        settings = resolve(self.config)
        layout = None
        if self.devices > 1:
            shape = model_shape(self.config.model, _VOCABULARY)
            layout = mesh_shape(settings.policy, shape, self.devices)
        method = load_method(settings.method)
        return make_policy(settings.policy, method, _VOCABULARY, layout)

    @functools.cached_property
    def params(self) -> Params:
        """Generates random parameters as NumPy arrays."""
        model = self.policy.learner.model
        return reference.random_params(model, self.config.adapter.rank)

    @functools.cached_property
    def rules(self) -> DecodeRules:
        """Builds decoding rules that allow every token.

        The last token of the vocabulary is the end-of-turn token. A long trial has no end-of-turn
        token, because its only two traces must not end early.
        """
        never = no_stop_string(_VOCABULARY)
        is_long = len(self.rows.budgets) <= 2
        return decode_rules(
            allowed_tokens=np.ones(_VOCABULARY, bool),
            eos_ids=[] if is_long else [_VOCABULARY - 1],
            think_close=never,
            answer_close=never,
            forced_suffix=[2, 3],
            natural_suffix=[3],
        )

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """Builds the optimizer of the run, without learning-rate warm-up."""
        return policy_optimizer(self.config.optimizer, 1)

    def matmul_precision(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context that disables TF32 if the run computes in float32.

        By default, GPUs multiply float32 matrices in TF32.
        """
        exact = self.config.model.compute_dtype == "float32"
        precision = "highest" if exact else "default"
        return jax.default_matmul_precision(precision)

    @functools.cached_property
    def rows(self) -> RolloutRequest:
        """Generates the budget and two truncation points (cuts) of each trace.

        Budgets fall from the maximum to 0, and most of them are large. The cuts are at half the
        budget and at the full budget.
        """
        rollout = self.config.rollout
        count = rollout.questions * rollout.group_size
        shares = np.sqrt(np.linspace(1, 0, count))
        budgets = self.config.budget.max * shares
        budgets = budgets.astype(np.int32)
        cuts = np.stack([budgets // 2, budgets], axis=1)
        return RolloutRequest(budgets, cuts)

    def prompts(self) -> Prompts:
        """Generates random prompts, with lengths that fall from the maximum to one token."""
        rng = np.random.default_rng(3)
        width = self.config.data.max_prompt_tokens
        count = len(self.rows.budgets)
        lengths = np.linspace(width, 1, count).astype(np.int32)
        tokens = rng.integers(4, _VOCABULARY - 1, (count, width))
        is_padding = np.arange(width) >= lengths[:, None]
        tokens[is_padding] = 0
        return Prompts(
            jnp.asarray(tokens, jnp.int32),
            jnp.asarray(lengths),
            jnp.zeros(count, jnp.int32),
            jnp.asarray(lengths),
        )

    def rollout(self) -> Rollout:
        """Samples responses to the prompts."""
        params = jax.tree.map(jnp.asarray, self.params)
        with self.matmul_precision():
            phi = self.policy.phi_of(params)
            copy = self.policy.decode_params(params)
            sampler = SamplingSetup(
                self.policy.rollout,
                self.rules,
                sampling_params(1.0),
                phi,
            )
            key = jax.random.key(4)
            return generate(copy, self.prompts(), self.rows, key, sampler)

    @functools.cached_property
    def batch(self) -> Batch:
        """Samples a rollout and builds a batch with normally distributed advantages and returns."""
        rollout = self.rollout()
        rng = np.random.default_rng(5)

        def normal(shape: tuple[int, ...]) -> np.ndarray:
            values = rng.normal(size=shape)
            return values.astype(np.float32)

        cuts = self.rows.cuts
        return make_batch(
            self.prompts(),
            rollout.trunks,
            rollout.branches,
            cuts=cuts,
            thinking_advantages=normal(rollout.trunks.logprobs.shape),
            answer_advantages=normal(cuts.shape),
            value_targets=normal(cuts.shape),
        )

    def expected(
        self, params: Params, batch: Batch
    ) -> tuple[Float[np.ndarray, "B T"], Float[np.ndarray, "B K A"]]:
        """Computes the reference log-probabilities of the sampled thinking and answer tokens.

        Each answer is scored as a separate sequence, together with the prompt and the thinking
        that it continues. Entries without a sampled token are 0.

        Args:
          params: float64 parameters with merged adapters, as returned by `reference.to_float64`.
          batch: the batch with the sampled tokens.

        Returns:
          Log-probabilities of thinking tokens, [traces, tokens], and of answer tokens, [traces,
          truncation points, tokens].
        """
        score = functools.partial(
            reference.logprobs,
            params,
            config=self.policy.learner.model,
        )
        thinking = np.zeros(batch.thinking_logprobs.shape)
        answers = np.zeros(batch.answer_logprobs.shape)
        for i, (trunk, start) in enumerate(zip(batch.trunk, batch.prompt_lengths)):
            budget = int(batch.budgets[i])
            sampled = int(batch.sampled[i])
            if sampled:
                sequence = trunk[: start + sampled]
                thinking[i, :sampled] = score(sequence, budget, sampled)
            for j in np.flatnonzero(batch.answered[i]):
                answered = int(batch.answered[i, j])
                branch_length = batch.forced[i, j] + answered
                branch = batch.branches[i, j, :branch_length]
                context = trunk[: batch.context[i, j]]
                sequence = np.concatenate([context, branch])
                answers[i, j, :answered] = score(sequence, budget, answered)
        return thinking, answers

    def start(self) -> TrainState:
        """Builds the train state before the first step."""
        # Copy the arrays, because a train step donates its input buffers.
        _, trained = adapters.split(self.params)
        trained = jax.tree.map(jnp.array, trained)
        state = init_state(trained, None, self.optimizer, self.optimizer)
        return self.policy.place(state)

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Any]:
        """Runs one update and returns the new state and the metrics."""
        spec = self.policy.learner
        frozen, _ = adapters.split(self.params)
        if spec.mesh is not None:
            batch = place(batch, row_sharding(spec.mesh))
        with self.matmul_precision():
            state, metrics, _ = train_step(
                state,
                Minibatch(batch),
                self.rules.allowed_tokens,
                frozen,
                spec=spec,
                policy_tx=self.optimizer,
                head_tx=self.optimizer,
            )
            return state, metrics


@functools.cache
def make_trial(subject: Subject, dtype: str, devices: int = 1, **keys: Any) -> Trial:
    """Builds a tiny run with the attention heads, kernels, remat and layer scan of a given run.

    Args:
      subject: the given run, for which the machine is checked.
      dtype: compute dtype. With float32, the default attention kernels are used, because the
        kernels of the run may not support float32.
      devices: number of devices over which the parameters and the batch are sharded.
      **keys: additional config overrides, by dotted key.
    """
    config = subject.config
    run_keys: dict[str, Any] = {
        "model.remat": config.model.remat,
        "model.scan_layers": config.model.scan_layers,
    }
    if dtype == "bfloat16":
        run_keys["model.attention"] = config.model.attention
        run_keys["rollout.attention"] = config.rollout.attention
    if subject.named:
        shape, _ = planned_shape(config.data, config.model)
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            run_keys[f"model.{name}"] = getattr(shape, name)
    all_keys = {
        **_TINY,
        "model.compute_dtype": dtype,
        **run_keys,
        **keys,
    }
    tiny = Subject(Config()).with_keys(all_keys)
    return Trial(tiny.config, devices)


def run_dtype(subject: Subject) -> str:
    """Returns the compute dtype of the run, or bfloat16 on a GPU if no config was passed."""
    if jax.default_backend() == "gpu" and not subject.named:
        return "bfloat16"
    return subject.config.model.compute_dtype


def make_long_trial(subject: Subject) -> Trial:
    """Builds a trial whose first sequence is as long as the longest sequence of the run.

    On a CPU, the length is limited to `_LONGEST` tokens and `_MOST_SCORES` attention scores.
    """
    config = subject.config
    dtype = run_dtype(subject)
    longest = _LONGEST
    if subject.named:
        most_thinking = max(config.budget.max, largest_evaluated(config.budget, config.eval))
        most_thinking += config.budget.grace
        longest = config.data.max_prompt_tokens + most_thinking + config.rollout.answer_tokens
    if jax.default_backend() == "cpu":
        heads = make_trial(subject, dtype).config.model.num_heads
        # A sequence has heads x tokens^2 attention scores.
        most_tokens = math.isqrt(_MOST_SCORES // heads)
        longest = min(longest, _LONGEST, most_tokens)
    keys = {
        "rollout.questions": 2,
        "rollout.group_size": 1,
        "rollout.slots": 2,
        "data.max_prompt_tokens": max(longest - _AFTER_PROMPT, 5),
        "model.num_layers": 1,
    }
    return make_trial(subject, dtype, **keys)
