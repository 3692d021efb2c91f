"""Runs all policy updates of an iteration.

A batch is split into minibatches with one optimizer step each. A minibatch is split into
micro-batches in one of two ways. With `train.micro_batch_rows`, micro-batches have equal numbers of
rows (traces), and one program scans over them. With `train.micro_batch_tokens`, they have similar
numbers of tokens, and a program is called for each micro-batch. `training/stages.py` calls
`Updates`.
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Int

from bacr_jax.config import TrainConfig
from bacr_jax.learner.batch import Batch
from bacr_jax.learner.micro_batches import Shapes, empty_micro_batches, micro_batches
from bacr_jax.learner.objective import LossNormalizers, Metrics, Minibatch, loss_normalizers
from bacr_jax.learner.padding_free import Allowance, filled, padding_free
from bacr_jax.learner.spec import LearnerSpec
from bacr_jax.learner.teacher import Teacher
from bacr_jax.learner.token_scores import TokenScores
from bacr_jax.learner.train_step import (
    Gradients,
    TrainState,
    accumulate,
    apply_gradients,
    no_gradients,
    score_batch,
    train_step,
)
from bacr_jax.learner.trust_region import (
    ScoringStep,
    Step,
    bounded,
    measured_micro_batches,
    num_measured,
)
from bacr_jax.out_of_memory import phase_memory
from bacr_jax.parallel import place, processes, row_sharding, row_shards
from bacr_jax.types import Params

_normalizers = jax.jit(loss_normalizers, static_argnames=("spec",))


def num_scored(old_logprobs: str, minibatches: int) -> int:
    """Returns the number of minibatches whose old log-probabilities need a forward pass.

    Old log-probabilities are the log-probabilities under the policy that sampled the batch. The
    minibatches that need a forward pass are the last ones of the batch.

    Args:
      old_logprobs: value of `loss.old_logprobs`.
      minibatches: number of minibatches per batch.
    """
    if minibatches == 1 or old_logprobs == "sampler":
        return 0
    return minibatches - (old_logprobs == "learner")


def _has_tokens(batch: Batch) -> Bool[np.ndarray, "B"]:
    """Returns a mask on the host that is True for traces with sampled tokens."""
    return (np.asarray(batch.sampled) > 0) | (np.asarray(batch.answered) > 0).any(axis=1)


# Inside jit, because several processes can't index an array that they share otherwise.
@jax.jit
def _scores_of_rows(scores: TokenScores, rows: Int[Array, "R"]) -> TokenScores:
    """Returns the scores of some traces, given by their indices."""
    return jax.tree.map(lambda x: x[rows], scores)


@dataclasses.dataclass(frozen=True)
class Earlier:
    """The policies under which the tokens of a minibatch are scored before its update.

    Attributes:
      policy: all parameters of the policy that sampled the minibatch.
      scores_policy: False if no scores under this policy are needed.
      reference: all parameters of the reference policy. None without a KL penalty.
    """

    policy: Params
    scores_policy: bool
    reference: Params | None = None


@dataclasses.dataclass(frozen=True)
class Updates:
    """The optimizer updates of an iteration, as a callable with static settings.

    Attributes:
      spec: static settings of the learner.
      config: section `train` of the config.
      policy_tx, head_tx: optimizers of the policy and of the value head.
      allowed_tokens: True for ids that can be sampled.
      max_update_kl: maximum KL divergence of an optimizer step in nats per token (`trust_region`).
        None disables the limit and its measurement.
      teacher: teacher of on-policy distillation. None without distillation.
    """

    spec: LearnerSpec
    config: TrainConfig
    policy_tx: optax.GradientTransformation
    head_tx: optax.GradientTransformation
    allowed_tokens: Any
    max_update_kl: float | None = None
    teacher: Teacher | None = None

    def __call__(
        self,
        state: TrainState,
        batch: Batch,
        *,
        reference: Params | None = None,
        frozen: Params | None = None,
        update_policy: bool = True,
    ) -> tuple[TrainState, Metrics]:
        """Takes one Adam step on the loss (paper Eq. 16) for each minibatch.

        Args:
          state: train state. Donated.
          batch: the traces of the iteration, with their advantages.
          reference: all parameters of the reference policy, for a KL penalty. None without a KL
            penalty.
          frozen: parameters of the policy that are not trained. None if all are trained.
          update_policy: False updates only the value head.

        Returns:
          The new state, and the metrics averaged over the minibatches.
        """
        parts = self._minibatches(batch)
        make_step = self._step_by_rows
        if self.config.micro_batch_tokens is not None:
            make_step = self._step_by_tokens
        sizes = self._sizes(parts[0])
        with phase_memory("scoring", **sizes):
            # In the first update, the policy is still the policy that sampled the batch. The ratio
            # is then 1, and no old scores are needed.
            policy = {**(frozen or {}), **state.policy}
            unscored = len(parts) - self._num_scored()
            steps = []
            for index, part in enumerate(parts):
                earlier = Earlier(policy, index >= unscored, reference)
                steps.append(make_step(part, earlier, frozen))
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
        """Compiles the update for every shape of micro-batch, by running it on empty micro-batches.

        Without this call, each shape is compiled when it first occurs. With
        `train.micro_batch_rows`, nothing is compiled here, because there is only one shape, which
        the first update compiles.

        Args:
          state: train state. It is not changed.
          batch: batch with the same shapes as later batches. Its values are not used.
          reference, frozen: as for `__call__`.
          on_program: callback that is called with (number of finished programs, total number of
            programs) before each program and after the last one. It may raise an exception to skip
            the remaining programs.
        """
        if self.config.micro_batch_tokens is None:
            return
        report = on_program or (lambda finished, total: None)
        part = self._minibatches(batch)[0]
        normalizers = _normalizers(part, spec=self.spec)
        policy = {**(frozen or {}), **state.policy}
        variants = []
        if self._num_scored():
            variants.append(Earlier(policy, True, reference))
        if self._num_scored() < self.config.minibatches:
            variants.append(Earlier(policy, False, reference))
        with phase_memory("learner", **self._sizes(part)):
            micro_batches = self._micro_batches(part, empty=True)
            programs = list(itertools.product(micro_batches, variants))
            for finished, (micro_batch, earlier) in enumerate(programs):
                report(finished, len(programs))
                scored = self._scored(micro_batch, earlier)
                if self.max_update_kl is not None:
                    self._score(policy, scored.batch, 1)
                grads, _ = self._sum_gradients(state, [scored], normalizers, frozen)
                jax.block_until_ready(grads)
            report(len(programs), len(programs))

    def _num_scored(self) -> int:
        """Returns `num_scored` for this configuration."""
        return num_scored(self.spec.loss.old_logprobs, self.config.minibatches)

    def _minibatches(self, batch: Batch) -> list[Batch]:
        """Splits a batch into minibatches of consecutive traces, on the host."""
        batch = processes.to_host(batch)
        size = batch.trunk.shape[0] // self.config.minibatches
        minibatches = []
        for index in range(self.config.minibatches):
            rows = slice(index * size, (index + 1) * size)
            minibatches.append(jax.tree.map(lambda x, rows=rows: x[rows], batch))
        return minibatches

    def _sizes(self, part: Batch) -> dict[str, int]:
        """Returns the sizes on which an update's memory depends, for out-of-memory messages.

        The sizes are the number of traces, the size of a micro-batch in traces or tokens, and the
        number of positions per trace.
        """
        rows, width = part.trunk.shape
        _, cuts, branch_width = part.branches.shape
        sizes = {"update_rows": rows}
        if self.config.micro_batch_tokens is None:
            sizes["micro_batch_rows"] = min(self.config.micro_batch_rows or rows, rows)
        else:
            sizes["micro_batch_tokens"] = self.config.micro_batch_tokens
        sizes["positions"] = width + cuts * branch_width
        return sizes

    def _optimizers(self) -> dict[str, Any]:
        """Returns the static arguments of the update programs: settings and optimizers."""
        return {"spec": self.spec, "policy_tx": self.policy_tx, "head_tx": self.head_tx}

    def _scored(self, rows: Batch, earlier: Earlier, parts: int = 1) -> Minibatch:
        """Moves traces to their devices and scores them under earlier policies and the teacher.

        Args:
          rows: the traces.
          earlier: the earlier policies.
          parts: number of micro-batches into which the traces are split for scoring.
        """
        rows = self._placed(rows)
        old = self._score(earlier.policy, rows, parts) if earlier.scores_policy else None
        reference = None
        if earlier.reference is not None:
            reference = self._score(earlier.reference, rows, parts)
        teacher = None
        if self.teacher is not None:
            teacher = self.teacher.scores(earlier.policy, rows, self.allowed_tokens, parts)
        return Minibatch(rows, old, reference, teacher)

    def _placed(self, rows: Batch) -> Batch:
        """Moves traces to their devices."""
        mesh = self.spec.mesh
        return rows if mesh is None else place(rows, row_sharding(mesh))

    def _score(self, policy: Params, rows: Batch, parts: int) -> TokenScores:
        """Computes the log-probabilities of the traces' tokens, in `parts` micro-batches.

        Args:
          policy: all parameters of the policy.
        """
        return score_batch(policy, rows, self.allowed_tokens, spec=self.spec, micro_batches=parts)

    def _step_by_rows(self, part: Batch, earlier: Earlier, frozen: Params | None) -> Step:
        """Scores a minibatch and returns the function that takes its optimizer step.

        The step is a single program that scans over micro-batches with equal numbers of traces.

        Args:
          part: the minibatch.
          earlier: the policies that score the minibatch.
          frozen: as for `__call__`.
        """
        size = part.trunk.shape[0]
        num_parts = max(size // (self.config.micro_batch_rows or size), 1)
        minibatch = self._scored(part, earlier, num_parts)
        inputs = (minibatch, self.allowed_tokens, frozen)
        settings = {"micro_batches": num_parts, **self._optimizers()}

        def unlimited(state: TrainState, update_policy: bool) -> tuple[TrainState, Metrics]:
            state, metrics, _ = train_step(state, *inputs, update_policy=update_policy, **settings)
            return state, metrics

        if self.max_update_kl is None:
            return unlimited
        rows_of_parts = np.arange(size).reshape(num_parts, -1)
        has_tokens = _has_tokens(part)
        traces = [int(has_tokens[rows].sum()) for rows in rows_of_parts]
        # The number of measured micro-batches does not depend on the tokens of the batch, because
        # each number is compiled separately.
        chosen = measured_micro_batches(traces, num_measured(num_parts, size))
        rows = rows_of_parts[chosen].ravel()
        is_subset = len(chosen) < num_parts
        measured = minibatch.batch
        if is_subset:
            measured = self._placed(jax.tree.map(lambda x: x[rows], part))

        def step(
            state: TrainState, update_policy: bool
        ) -> tuple[TrainState, Metrics, list[TokenScores]]:
            state, metrics, scores = train_step(
                state, *inputs, update_policy=update_policy, keep_scores=True, **settings
            )
            assert scores is not None
            if is_subset:
                scores = _scores_of_rows(scores, rows)
            return state, metrics, [scores]

        return self._bounded(step, [measured], self.max_update_kl, frozen, len(chosen))

    def _step_by_tokens(self, part: Batch, earlier: Earlier, frozen: Params | None) -> Step:
        """Scores a minibatch and returns the function that takes its optimizer step.

        The step calls a program for each micro-batch. The micro-batches have similar numbers of
        tokens. The arguments are as for `_step_by_rows`.
        """
        normalizers = _normalizers(part, spec=self.spec)
        micro_batches = list(self._micro_batches(part))
        scored = [self._scored(rows, earlier) for rows in micro_batches]
        traces = [int(_has_tokens(rows).sum()) for rows in micro_batches]
        chosen = measured_micro_batches(traces)

        def step(
            state: TrainState, update_policy: bool
        ) -> tuple[TrainState, Metrics, list[TokenScores]]:
            grads, scores = self._sum_gradients(state, scored, normalizers, frozen, keep=chosen)
            state, metrics = apply_gradients(
                state,
                grads,
                update_policy=update_policy,
                has_tokens=normalizers.has_tokens,
                **self._optimizers(),
            )
            return state, metrics, scores

        def unlimited(state: TrainState, update_policy: bool) -> tuple[TrainState, Metrics]:
            state, metrics, _ = step(state, update_policy)
            return state, metrics

        if self.max_update_kl is None:
            return unlimited
        measured = [scored[index].batch for index in chosen]
        return self._bounded(step, measured, self.max_update_kl, frozen)

    def _bounded(
        self,
        step: ScoringStep,
        rows: Sequence[Batch],
        bound: float,
        frozen: Params | None,
        parts: int = 1,
    ) -> Step:
        """Limits how far an optimizer step may move the policy.

        Args:
          step: function that takes an optimizer step and returns the scores of `rows` before it.
          rows: traces of the minibatch, as arrays on their devices. The KL divergence between the
            policies before and after the step is measured on them.
          bound: maximum KL divergence, in nats per token.
          frozen: parameters of the policy that are not trained. None if all are trained.
          parts: number of micro-batches into which each entry of `rows` is split for scoring.
        """

        def score(trained: Params) -> list[TokenScores]:
            policy = {**(frozen or {}), **trained}
            return [self._score(policy, batch, parts) for batch in rows]

        return bounded(step, score, rows, bound)

    def _micro_batches(self, part: Batch, *, empty: bool = False) -> Iterable[Batch]:
        """Splits a minibatch into micro-batches of at most `micro_batch_tokens` tokens.

        Args:
          empty: if True, return an empty micro-batch of each possible shape instead.
        """
        config = self.config
        conditioning = self.spec.conditioning
        tokens = config.micro_batch_tokens
        assert tokens is not None
        if config.padding_free:
            shares_prompts = conditioning is None or conditioning.positions == "response"
            allowance = Allowance(tokens, shares_prompts)
            if empty:
                no_rows = np.zeros(0, int)
                return [filled(part, no_rows, allowance.rows(part), allowance)]
            return padding_free(part, allowance)
        shapes = Shapes(tokens, config.length_buckets, row_shards(self.spec.mesh))
        if empty:
            return empty_micro_batches(part, shapes)
        return micro_batches(part, shapes)

    def _sum_gradients(
        self,
        state: TrainState,
        parts: list[Minibatch],
        normalizers: LossNormalizers,
        frozen: Params | None,
        keep: Collection[int] = (),
    ) -> tuple[Gradients, list[TokenScores]]:
        """Sums the gradients of all micro-batches of an update.

        Args:
          parts: the micro-batches, with scores under earlier policies.
          normalizers: denominators of the losses, computed on all micro-batches together.
          frozen: parameters of the policy that are not trained. None if all are trained.
          keep: indices of the micro-batches whose scores are returned.

        Returns:
          The gradients, and the scores of the chosen micro-batches under the policy of `state`. No
          scores are returned if the KL divergence of updates is not limited.
        """
        constants = (normalizers, self.allowed_tokens, frozen)
        grads = no_gradients(state, parts[0], *constants, spec=self.spec)
        kept_scores = []
        for index, part in enumerate(parts):
            grads, scores = accumulate(
                grads,
                state,
                part,
                *constants,
                spec=self.spec,
                # The same for all micro-batches, so that only one program is compiled.
                keep_scores=self.max_update_kl is not None,
            )
            if scores is not None and index in keep:
                kept_scores.append(scores)
        return grads, kept_scores


@jax.jit
def averaged(history: Sequence[Metrics]) -> Metrics:
    """Averages metrics over the minibatches with at least one token in the policy loss.

    If there is no such minibatch, the averages are 0. Metrics of the value head are averaged over
    all minibatches, because the value head learns from each of them.

    Args:
      history: metrics of each minibatch.

    Returns:
      Metrics by name. `policy/empty_minibatches` is a count, and `policy/skipped` is the latest
      total.
    """
    empty = [metrics["policy/empty_minibatches"] for metrics in history]
    has_tokens = [1.0 - x for x in empty]
    ones = [jnp.float32(1.0) for _ in history]

    def mean(name: str) -> Array:
        weights = ones if name.startswith("value/") else has_tokens
        total = sum(
            jnp.where(weight > 0, metrics[name], 0.0) for weight, metrics in zip(weights, history)
        )
        return jnp.asarray(total / jnp.maximum(sum(weights), 1.0))

    return {
        **{name: mean(name) for name in history[0]},
        "policy/empty_minibatches": jnp.asarray(sum(empty)),
        "policy/skipped": history[-1]["policy/skipped"],
    }
