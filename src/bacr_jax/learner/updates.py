"""All updates of an iteration: minibatches, micro-batches, old and reference scores.

Two ways to split an update: equal numbers of rows, scanned inside one program
(`train.micro_batch_rows`), or nearly equal numbers of tokens, one call each
(`train.micro_batch_tokens`).
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from bacr_jax.config import TrainConfig
from bacr_jax.learner.batch import Batch
from bacr_jax.learner.micro_batches import Shapes, empty_micro_batches, micro_batches
from bacr_jax.learner.objective import (
    LossNormalizers,
    Metrics,
    Minibatch,
    TokenScores,
    loss_normalizers,
)
from bacr_jax.learner.padding_free import Allowance, filled, padding_free
from bacr_jax.learner.spec import LearnerSpec
from bacr_jax.learner.train_step import (
    Gradients,
    TrainState,
    accumulate,
    apply_gradients,
    no_gradients,
    score_batch,
    train_step,
)
from bacr_jax.learner.trust_region import Step, bounded
from bacr_jax.oom import phase_memory
from bacr_jax.parallel import place, processes, row_sharding, row_shards
from bacr_jax.types import Params

_normalizers = jax.jit(loss_normalizers, static_argnames=("spec",))


def num_scored(old_logprobs: str, minibatches: int) -> int:
    """Minibatches, the last ones, whose old log-probabilities need a pass of their own."""
    if minibatches == 1 or old_logprobs == "sampler":
        return 0
    return minibatches - (old_logprobs == "learner")


@dataclasses.dataclass(frozen=True)
class Updates:
    """The learner's part of an iteration.

    Attributes:
      max_update_kl: bound of `trust_region`, in nats per token; None: steps are not measured.
    """

    spec: LearnerSpec
    config: TrainConfig
    policy_tx: optax.GradientTransformation
    head_tx: optax.GradientTransformation
    allowed_tokens: Any
    max_update_kl: float | None = None

    def __call__(
        self,
        state: TrainState,
        batch: Batch,
        *,
        reference: Params | None = None,
        frozen: Params | None = None,
        update_policy: bool = True,
    ) -> tuple[TrainState, Metrics]:
        """Eq. 16 on each minibatch, one Adam step each.

        Args:
          state: donated.
          reference: all parameters of the reference policy, for a KL term.
        """
        parts = self._minibatches(batch)
        split = self._by_rows if self.config.micro_batch_tokens is None else self._by_tokens
        sizes = self._sizes(parts[0])
        with phase_memory("scoring", **sizes):
            # In the first update the policy is still the one that sampled.
            policy = {**(frozen or {}), **state.policy}
            unscored = len(parts) - self._num_scored()
            steps = [
                split(part, None if index < unscored else policy, reference, frozen)
                for index, part in enumerate(parts)
            ]
        history = []
        with phase_memory("learner", **sizes):
            for step in steps:
                state, metrics = step(state, update_policy)
                history.append(metrics)
            metrics = jax.block_until_ready(averaged(history))
        return state, metrics

    def compile(
        self,
        state: TrainState,
        batch: Batch,
        *,
        reference: Params | None = None,
        frozen: Params | None = None,
        on_program: Callable[[int, int], None] | None = None,
    ) -> None:
        """Runs every shape of micro-batch once on nothing, whichever of them will be needed first.

        Without it a shape is compiled when it comes up. Equal numbers of rows have one shape, which
        the first update compiles.

        Args:
          batch: of the shapes to come; what is in it does not matter.
          on_program: called with (programs done, programs in all) before each and after the last;
            raises to leave the rest.
        """
        if self.config.micro_batch_tokens is None:
            return
        say = on_program or (lambda done, total: None)
        part, *_ = self._minibatches(batch)
        normalizers = _normalizers(part, spec=self.spec)
        policy = {**(frozen or {}), **state.policy}
        variants: list[Params | None] = [policy] if self._num_scored() else []
        variants += [None] if self._num_scored() < self.config.minibatches else []
        with phase_memory("learner", **self._sizes(part)):
            forms = [*itertools.product(self._micro_batches(part, empty=True), variants)]
            for done, (micro, sampled_by) in enumerate(forms):
                say(done, len(forms))
                scored = self._scored(micro, sampled_by, reference)
                if self.max_update_kl is not None:
                    self._score(policy, scored.batch, 1)
                jax.block_until_ready(self._add_up(state, [scored], normalizers, frozen))
            say(len(forms), len(forms))

    def _num_scored(self) -> int:
        return num_scored(self.spec.loss.old_logprobs, self.config.minibatches)

    def _minibatches(self, batch: Batch) -> list[Batch]:
        """Consecutive rows, on the host."""
        batch = processes.to_host(batch)
        size = batch.trunk.shape[0] // self.config.minibatches
        cut = lambda part: jax.tree.map(lambda x: x[part * size : (part + 1) * size], batch)
        return [cut(part) for part in range(self.config.minibatches)]

    def _sizes(self, part: Batch) -> dict[str, int]:
        """What the memory of an update goes with."""
        rows, width = part.trunk.shape
        config = self.config
        micro = {"micro_batch_rows": min(config.micro_batch_rows or rows, rows)}
        if config.micro_batch_tokens is not None:
            micro = {"micro_batch_tokens": config.micro_batch_tokens}
        positions = width + part.branches.shape[1] * part.branches.shape[2]
        return {"update_rows": rows, **micro, "positions": positions}

    def _optimizers(self) -> dict[str, Any]:
        return {"spec": self.spec, "policy_tx": self.policy_tx, "head_tx": self.head_tx}

    def _scored(
        self, rows: Batch, sampled_by: Params | None, reference: Params | None, parts: int = 1
    ) -> Minibatch:
        """Rows on their devices, scored `parts` micro-batches at a time."""
        mesh = self.spec.mesh
        rows = rows if mesh is None else place(rows, row_sharding(mesh))

        def score(policy: Params | None) -> TokenScores | None:
            return None if policy is None else self._score(policy, rows, parts)

        return Minibatch(rows, score(sampled_by), score(reference))

    def _score(self, policy: Params, rows: Batch, parts: int) -> TokenScores:
        """Scores rows on their devices under all parameters of a policy."""
        return score_batch(policy, rows, self.allowed_tokens, spec=self.spec, micro_batches=parts)

    def _by_rows(
        self,
        part: Batch,
        sampled_by: Params | None,
        reference: Params | None,
        frozen: Params | None,
    ) -> Step:
        size = part.trunk.shape[0]
        micro = max(size // (self.config.micro_batch_rows or size), 1)
        minibatch = self._scored(part, sampled_by, reference, micro)
        how = {"micro_batches": micro, **self._optimizers()}

        def step(state: TrainState, update_policy: bool) -> tuple[TrainState, Metrics]:
            return train_step(
                state, minibatch, self.allowed_tokens, frozen, update_policy=update_policy, **how
            )

        return self._bounded(step, [minibatch.batch], frozen, micro)

    def _by_tokens(
        self,
        part: Batch,
        sampled_by: Params | None,
        reference: Params | None,
        frozen: Params | None,
    ) -> Step:
        normalizers = _normalizers(part, spec=self.spec)
        micro = self._micro_batches(part)
        parts = [self._scored(one, sampled_by, reference) for one in micro]

        def step(state: TrainState, update_policy: bool) -> tuple[TrainState, Metrics]:
            grads = self._add_up(state, parts, normalizers, frozen)
            moves = {"update_policy": update_policy, "has_tokens": normalizers.has_tokens}
            return apply_gradients(state, grads, **self._optimizers(), **moves)

        return self._bounded(step, [one.batch for one in parts], frozen)

    def _bounded(
        self, step: Step, rows: Sequence[Batch], frozen: Params | None, parts: int = 1
    ) -> Step:
        """Keeps a step within `max_update_kl`, if that is set.

        Args:
          rows: the step's rows on their devices, scored `parts` micro-batches at a time.
        """
        if self.max_update_kl is None:
            return step

        def score(trained: Params) -> list[TokenScores]:
            policy = {**(frozen or {}), **trained}
            return [self._score(policy, one, parts) for one in rows]

        return bounded(step, score, rows, self.max_update_kl)

    def _micro_batches(self, part: Batch, *, empty: bool = False) -> Iterable[Batch]:
        """Micro-batches of so many tokens; `empty`: one without rows of each shape instead."""
        config, conditioning = self.config, self.spec.conditioning
        assert (tokens := config.micro_batch_tokens) is not None
        if config.padding_free:
            told = conditioning is not None and conditioning.positions != "response"
            allowance = Allowance(tokens, shares_prompts=not told)
            if empty:
                return [filled(part, np.zeros(0, int), allowance.rows(part), allowance)]
            return padding_free(part, allowance)
        shapes = Shapes(tokens, config.length_buckets, row_shards(self.spec.mesh))
        return empty_micro_batches(part, shapes) if empty else micro_batches(part, shapes)

    def _add_up(
        self,
        state: TrainState,
        parts: list[Minibatch],
        normalizers: LossNormalizers,
        frozen: Params | None,
    ) -> Gradients:
        """Gradients of all micro-batches of an update."""
        rest = (normalizers, self.allowed_tokens, frozen)
        grads = no_gradients(state, parts[0], *rest, spec=self.spec)
        for part in parts:
            grads = accumulate(grads, state, part, *rest, spec=self.spec)
        return grads


@jax.jit
def averaged(history: Sequence[Metrics]) -> Metrics:
    """Metrics of an iteration: means over the minibatches that had tokens in the loss, or zeros.

    The value head learns from every minibatch, so its metrics are means over all of them.

    Returns:
      One number by name; `policy/empty_minibatches` is a count, `policy/skipped` the last total.
    """
    empty = [one["policy/empty_minibatches"] for one in history]
    counted = [1.0 - x for x in empty]
    everything = [jnp.float32(1.0) for _ in history]

    def mean(name: str) -> Array:
        weights = everything if name.startswith("value/") else counted
        total = sum(jnp.where(w > 0, one[name], 0.0) for w, one in zip(weights, history))
        return jnp.asarray(total / jnp.maximum(sum(weights), 1.0))

    return {
        **{name: mean(name) for name in history[0]},
        "policy/empty_minibatches": jnp.asarray(sum(empty)),
        "policy/skipped": history[-1]["policy/skipped"],
    }
