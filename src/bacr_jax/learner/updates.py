"""All updates of an iteration: minibatches, micro-batches, old and reference scores.

Two ways to split an update: equal numbers of rows, scanned inside one program
(`train.micro_batch_rows`), or nearly equal numbers of tokens, one call each
(`train.micro_batch_tokens`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from bacr_jax.config import TrainConfig
from bacr_jax.learner import train_step as learning
from bacr_jax.learner.batch import Batch
from bacr_jax.learner.micro_batches import (
    Shapes,
    empty_micro_batches,
    has_advantage,
    micro_batches,
)
from bacr_jax.learner.objective import LearnerSpec, LossNormalizers, denominators
from bacr_jax.learner.train_step import Metrics, TrainState
from bacr_jax.oom import phase_memory
from bacr_jax.parallel import place, processes, row_shards, rows

_denominators = jax.jit(denominators, static_argnames=("spec",))


@dataclasses.dataclass
class Updates:
    """The learner's part of an iteration.

    Attributes:
      spec: what fixes the compiled forms.
      config: minibatches and micro-batches.
      policy_tx: optimizer of the policy.
      head_tx: optimizer of the value head.
      allowed_tokens: ids the sampler may draw.
    """

    spec: LearnerSpec
    config: TrainConfig
    policy_tx: optax.GradientTransformation
    head_tx: optax.GradientTransformation
    allowed_tokens: Any
    _metrics: tuple[str, ...] = ()

    def __call__(
        self,
        train: TrainState,
        batch: Batch,
        *,
        reference: Any = None,
        update_policy: bool = True,
    ) -> tuple[TrainState, Metrics]:
        """Eq. 16 on each minibatch, one Adam step each.

        Args:
          train: donated.
          batch: all rows of the iteration.
          reference: parameters of the reference policy, for a KL term.
          update_policy: False moves only the value head.

        Returns:
          The new state, and metrics averaged over minibatches.
        """
        batch = processes.to_host(batch)
        count = self.config.minibatches
        size = batch.trunk.shape[0] // count
        cut = lambda part: jax.tree.map(lambda x: x[part * size : (part + 1) * size], batch)
        parts = [cut(part) for part in range(count)]
        by_tokens = self.config.micro_batch_tokens is not None
        split = self._by_tokens if by_tokens else self._by_rows
        sizes = self._sizes(parts[0])
        if by_tokens and not self._metrics:
            with phase_memory("learner", **sizes):
                self._compile(train, batch, reference)
        with phase_memory("scoring", **sizes):
            # With one update the policy is still the one that sampled: its scores are the old ones.
            learn = [split(part, train if count > 1 else None, reference) for part in parts]
        history = []
        with phase_memory("learner", **sizes):
            for step in learn:
                train, metrics = step(train, update_policy)
                history.append(metrics)
            mean = jax.block_until_ready(jax.tree.map(lambda *x: sum(x) / len(x), *history))
        return train, {**mean, "policy/skipped": history[-1]["policy/skipped"]}

    def _sizes(self, part: Batch) -> dict[str, int]:
        """What the memory of an update goes with."""
        rows, width = part.trunk.shape
        config = self.config
        micro = {"micro_batch_rows": min(config.micro_batch_rows or rows, rows)}
        if config.micro_batch_tokens is not None:
            micro = {"micro_batch_tokens": config.micro_batch_tokens}
        positions = width + part.branches.shape[1] * part.branches.shape[2]
        return {"update_rows": rows, **micro, "positions": positions}

    def _place(self, batch: Batch) -> Batch:
        return batch if self.spec.mesh is None else place(batch, rows(self.spec.mesh))

    def _optimizers(self) -> dict[str, Any]:
        return {"spec": self.spec, "policy_tx": self.policy_tx, "head_tx": self.head_tx}

    def _by_rows(self, part: Batch, sampled_by: TrainState | None, reference: Any) -> Callable:
        size = part.trunk.shape[0]
        micro = max(size // (self.config.micro_batch_rows or size), 1)
        placed = self._place(part)
        score = lambda policy: learning.score_batch(
            policy, placed, self.allowed_tokens, spec=self.spec, micro_batches=micro
        )
        old = None if sampled_by is None else score(sampled_by.policy)
        of_reference = None if reference is None else score(reference)

        def step(train: TrainState, update_policy: bool) -> tuple[TrainState, Metrics]:
            return learning.train_step(
                train,
                placed,
                self.allowed_tokens,
                old,
                of_reference,
                **self._optimizers(),
                micro_batches=micro,
                update_policy=update_policy,
            )

        return step

    def _shapes(self) -> Shapes:
        tokens, mesh = self.config.micro_batch_tokens, self.spec.mesh
        assert tokens is not None
        return Shapes(tokens, self.config.length_buckets, 1 if mesh is None else row_shards(mesh))

    def _scored(
        self, micro: Batch, sampled_by: TrainState | None, reference: Any
    ) -> tuple[Batch, Any, Any]:
        micro = self._place(micro)
        score = lambda policy: learning.score_batch(
            policy, micro, self.allowed_tokens, spec=self.spec
        )
        old = None if sampled_by is None else score(sampled_by.policy)
        return micro, old, None if reference is None else score(reference)

    def _by_tokens(self, part: Batch, sampled_by: TrainState | None, reference: Any) -> Callable:
        # A value head learns from every row.
        drop = self.config.drop_zero_advantage and self.spec.value is None
        keep = has_advantage(part) if drop else None
        totals = self._totals(part, keep)
        scored = [
            self._scored(micro, sampled_by, reference)
            for micro in micro_batches(part, self._shapes(), keep=keep)
        ]

        def step(train: TrainState, update_policy: bool) -> tuple[TrainState, Metrics]:
            return self._step(train, scored, totals, update_policy)

        return step

    def _totals(self, part: Batch, keep: np.ndarray | None) -> LossNormalizers:
        """Those of all rows, so that rows left out change nothing; metrics are of rows kept."""
        whole = _denominators(part, spec=self.spec)
        if keep is None:
            return whole
        tokens = np.asarray(part.sampled) + np.asarray(part.answered).sum(1)
        return dataclasses.replace(whole, count=np.float32(max(tokens[keep].sum(), 1)))

    def _step(
        self,
        train: TrainState,
        scored: list[tuple[Batch, Any, Any]],
        totals: LossNormalizers,
        update_policy: bool,
    ) -> tuple[TrainState, Metrics]:
        found = self._zeros(train)
        for micro, old, reference in scored:
            given = (micro, self.allowed_tokens, old, reference, totals)
            found = learning.accumulate(found, train, *given, spec=self.spec)
        return learning.apply_gradients(
            train, found, **self._optimizers(), update_policy=update_policy
        )

    def _compile(self, train: TrainState, batch: Batch, reference: Any) -> None:
        """Runs every shape once on nothing, whichever of them this iteration needs."""
        several = self.config.minibatches > 1
        totals = self._totals(batch, None)
        for micro in empty_micro_batches(batch, self._shapes()):
            scored = self._scored(micro, train if several else None, reference)
            given = (train, scored[0], self.allowed_tokens, *scored[1:], totals)
            if not self._metrics:
                shapes = jax.eval_shape(
                    functools.partial(learning.gradients, spec=self.spec), *given
                )
                self._metrics = tuple(shapes.metrics)
            learning.accumulate(self._zeros(train), *given, spec=self.spec)

    def _zeros(self, train: TrainState) -> learning.Gradients:
        return learning.no_gradients(train.policy, train.head, names=self._metrics, spec=self.spec)
