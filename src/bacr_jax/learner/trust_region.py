"""Limits the KL divergence between the policies before and after an optimizer step.

A step whose divergence exceeds the limit is shortened. `learner.updates` wraps its steps with
`bounded` if `optimizer.max_update_kl` is set.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from bacr_jax import losses
from bacr_jax.learner.batch import Batch, joined
from bacr_jax.learner.objective import Metrics
from bacr_jax.learner.token_scores import TokenScores
from bacr_jax.learner.train_step import TrainState
from bacr_jax.types import Params

# Function that takes an optimizer step. Its arguments are the state, whose buffers it may donate,
# and False to leave the policy unchanged.
Step = Callable[[TrainState, bool], tuple[TrainState, Metrics]]
# The same, with the scores of the sampled tokens under the policy before the step, one entry per
# micro-batch. The forward pass of the gradients has computed them.
ScoringStep = Callable[[TrainState, bool], tuple[TrainState, Metrics, Sequence[TokenScores]]]
# Function that maps trained parameters to the log-probabilities of the sampled tokens, with one
# entry per micro-batch.
Scorer = Callable[[Params], Sequence[TokenScores]]

# A shortened step may exceed the bound by this factor, because the KL divergence is only
# approximately quadratic in the length of the step.
SLACK = 1.1
# Maximum number of times that a step is shortened before it is dropped. Shortening once is usually
# enough. A step whose KL divergence is far from quadratic in its length needs two or three times.
MOST_SHRINKS = 4
# The KL divergence is measured on about this many traces of a minibatch. It is a mean over tokens,
# so more traces would cost forward passes and hardly change it. With `train.micro_batch_rows`,
# traces without tokens count as well.
MEASURED_TRACES = 64


def num_measured(micro_batches: int, traces: int) -> int:
    """Returns the number of micro-batches that have about `MEASURED_TRACES` traces together.

    Args:
      micro_batches: number of all micro-batches.
      traces: number of traces in all micro-batches.
    """
    return min(math.ceil(MEASURED_TRACES * micro_batches / traces), micro_batches)


def measured_micro_batches(traces: Sequence[int], count: int | None = None) -> list[int]:
    """Chooses the micro-batches on which the KL divergence of a step is measured.

    The chosen micro-batches are evenly spaced, because micro-batches can be sorted by length.
    Micro-batches without a trace are only chosen if there are too few others.

    Args:
      traces: number of traces with sampled tokens in each micro-batch.
      count: number of micro-batches to choose. None chooses the micro-batches with a trace that
        have about `MEASURED_TRACES` traces together, or all micro-batches if there is no trace.

    Returns:
      Indices of the chosen micro-batches, in increasing order.
    """
    with_traces = [index for index, number in enumerate(traces) if number]
    if count is None:
        if not with_traces:
            return list(range(len(traces)))
        count = num_measured(len(with_traces), sum(traces))
    if count > len(with_traces):
        without_traces = [index for index, number in enumerate(traces) if not number]
        return sorted(with_traces + without_traces[: count - len(with_traces)])
    # The middles of `count` sections of equal size.
    middles = [(2 * i + 1) * len(with_traces) // (2 * count) for i in range(count)]
    return [with_traces[middle] for middle in middles]


def kl_sum(
    old: Float[Array, "B T"], new: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sums the k3 estimator of KL(old || new) over sampled tokens.

        k3_t = exp(d_t) - 1 - d_t,   d_t = log new(y_t) - log old(y_t)

    If y_t is sampled from the old policy, the mean of k3_t is an unbiased and nonnegative estimate
    of the KL divergence per token. k3_t is clipped to at most 10, so that a single token can't
    dominate a batch.

    Args:
      old: log-probabilities before the optimizer step, in nats.
      new: log-probabilities after the optimizer step, in nats.
      mask: True for sampled tokens.

    Returns:
      The sum of k3_t in nats, and the number of tokens. Both can be summed over micro-batches.
    """
    estimates = losses.kl_penalty(old, new, mask, kind="k3")
    return estimates.sum(), mask.sum(dtype=jnp.float32)


def step_scale(kl: float, bound: float) -> float:
    """Returns the factor that scales a step to a KL divergence of `bound`.

        s = min(1, sqrt(bound / KL)),   since KL(old || old + s step) ~ s^2 KL(old || old + step)

    Args:
      kl: KL divergence of the full step, in nats per token.
      bound: maximum KL divergence, in nats per token.

    Returns:
      The factor s in [0, 1]. It is 0 if `kl` is non-finite.
    """
    if not math.isfinite(kl):
        return 0.0
    if kl <= 0.0:
        return 1.0
    return min(1.0, math.sqrt(bound / kl))


@functools.partial(jax.jit, donate_argnums=(1,))
def interpolated(old: Params, new: Params, scale: Float[Array, ""]) -> Params:
    """Returns old + scale (new - old), or exactly old if `scale` is 0. `new` is donated."""

    def between(x: Array, y: Array) -> Array:
        # The new value may be infinite, and 0 times infinity is NaN.
        is_zero = scale == 0.0
        moved = x + scale.astype(x.dtype) * (y - x)
        return jnp.where(is_zero, x, moved)

    return jax.tree.map(between, old, new)


def shortened(
    old: Params, new: Params, kl_of: Callable[[Params], float], bound: float
) -> tuple[Params, float, float]:
    """Shortens a step until its KL divergence is at most `SLACK` times the bound.

    The step is scaled by `step_scale` up to `MOST_SHRINKS` times. If the divergence is still too
    large, the step is dropped.

    Args:
      old: trained parameters before the step.
      new: trained parameters after the step. Donated if the step is shortened.
      kl_of: function that measures KL(old || parameters), in nats per token.
      bound: maximum KL divergence, in nats per token.

    Returns:
      The resulting parameters, the KL divergence of the full step, and the factor in [0, 1] by
      which the step was scaled.
    """
    full_kl = kl_of(new)
    if full_kl <= bound:
        return new, full_kl, 1.0
    kl = full_kl
    scale = 1.0
    for _ in range(MOST_SHRINKS):
        factor = step_scale(kl, bound)
        new = interpolated(old, new, jnp.float32(factor))
        scale = scale * factor
        if factor == 0.0:
            break
        kl = kl_of(new)
        if kl <= SLACK * bound:
            return new, full_kl, scale
    return interpolated(old, new, jnp.float32(0.0)), full_kl, 0.0


@jax.jit
def _kl_of_rows(
    old: TokenScores, new: TokenScores, rows: Batch
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Computes `kl_sum` over the thinking and the answers of a micro-batch."""
    return kl_sum(
        joined(old.thinking, old.answers),
        joined(new.thinking, new.answers),
        joined(rows.thinking_mask, rows.answer_mask),
    )


def mean_kl(
    old: Sequence[TokenScores], new: Sequence[TokenScores], parts: Sequence[Batch]
) -> float:
    """Returns the mean of the k3 estimator (`kl_sum`) over the sampled tokens of all micro-batches.

    The result is in nats per token. It is 0 if there are no tokens.

    Args:
      old: scores before the optimizer step, one entry per micro-batch.
      new: scores after the optimizer step.
      parts: the micro-batches.
    """
    sums = []
    for old_scores, new_scores, rows in zip(old, new, parts, strict=True):
        sums.append(_kl_of_rows(old_scores, new_scores, rows))
    total = sum(float(kl) for kl, _ in sums)
    count = sum(float(tokens) for _, tokens in sums)
    return total / max(count, 1.0)


def _measured(metrics: Metrics, kl: float, scale: float) -> Metrics:
    """Adds the KL divergence and the scale of a step to its metrics."""
    return {
        **metrics,
        "policy/update_kl": jnp.float32(kl),
        "policy/update_scale": jnp.float32(scale),
    }


def bounded(step: ScoringStep, score: Scorer, parts: Sequence[Batch], bound: float) -> Step:
    """Wraps an optimizer step so that KL(old policy || new policy) is at most `SLACK` x `bound`.

    Only the step of the policy is shortened. The value head and the optimizer moments are always
    updated with the full step. The wrapper needs one additional forward pass over `parts`, and
    another pass each time the step is shortened.

    Args:
      step: the optimizer step. Its scores are those of `parts`.
      score: function that computes the log-probabilities of the traces in `parts`.
      parts: traces on which the KL divergence is measured, as micro-batches on their devices.
      bound: value of `optimizer.max_update_kl`, in nats per token.
    """

    def limited(state: TrainState, update_policy: bool) -> tuple[TrainState, Metrics]:
        if not update_policy:
            state, metrics, _ = step(state, update_policy)
            return state, _measured(metrics, 0.0, 1.0)
        # Copy the parameters, because the step donates them.
        before = jax.tree.map(lambda x: x.copy(), state.policy)
        state, metrics, old_scores = step(state, update_policy)
        policy, kl, scale = shortened(
            before, state.policy, lambda new: mean_kl(old_scores, score(new), parts), bound
        )
        state = dataclasses.replace(state, policy=policy)
        return state, _measured(metrics, kl, scale)

    return limited
