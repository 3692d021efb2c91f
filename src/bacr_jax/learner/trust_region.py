"""Bounds the KL divergence of one optimizer step, and shortens a step that is longer.

`learner.updates` wraps its steps with `bounded` if `optimizer.max_update_kl` is set. The module
does not compute log-probabilities itself.
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
from bacr_jax.learner.objective import Metrics, TokenScores
from bacr_jax.learner.train_step import TrainState
from bacr_jax.types import Params

Step = Callable[[TrainState, bool], tuple[TrainState, Metrics]]
# Scores the sampled tokens under trained parameters, micro-batch by micro-batch.
Scorer = Callable[[Params], Sequence[TokenScores]]

# A shortened step may exceed the bound by this factor, since KL is quadratic only near 0.
SLACK = 1.1
# Times that a step is shortened before it is dropped. One is usual; steps whose KL is far from
# quadratic take two or three.
MOST_SHRINKS = 4


def kl_sum(
    old: Float[Array, "B T"], new: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sums the k3 estimate of KL(old || new) over sampled tokens.

        k3_t = exp(d_t) - 1 - d_t,   d_t = log new(y_t) - log old(y_t)

    With y_t sampled from old, the mean of k3_t is an unbiased estimate of the divergence per token
    and never below 0. k3_t is at most 10, so that one token cannot decide for a batch.

    Args:
      old: log-probabilities before the optimizer step, nats.
      new: log-probabilities after it, nats.
      mask: the sampled tokens.

    Returns:
      The sum of k3_t, in nats, and the number of tokens; both add up over micro-batches.
    """
    estimates = losses.kl_penalty(old, new, mask, kind="k3")
    return estimates.sum(), mask.sum(dtype=jnp.float32)


def step_scale(kl: float, bound: float) -> float:
    """Returns the factor by which a step is multiplied to have a KL of `bound`.

        s = min(1, sqrt(bound / KL)),   since KL(old || old + s step) ~ s^2 KL(old || old + step)

    Args:
      kl: KL of the full step, in nats per token.
      bound: largest allowed KL, in nats per token.

    Returns:
      The factor s in [0, 1]; 0 if `kl` is not finite.
    """
    if not math.isfinite(kl):
        return 0.0
    if kl <= 0.0:
        return 1.0
    return min(1.0, math.sqrt(bound / kl))


@functools.partial(jax.jit, donate_argnums=(1,))
def interpolated(old: Params, new: Params, scale: Float[Array, ""]) -> Params:
    """Returns old + scale (new - old); exactly old if `scale` is 0. `new` is donated."""

    def between(x: Array, y: Array) -> Array:
        # A new value may be infinite, and 0 times infinity is NaN.
        is_zero = scale == 0.0
        moved = x + scale.astype(x.dtype) * (y - x)
        return jnp.where(is_zero, x, moved)

    return jax.tree.map(between, old, new)


def shortened(
    old: Params, new: Params, kl_of: Callable[[Params], float], bound: float
) -> tuple[Params, float, float]:
    """Shortens a step until its KL is at most `SLACK` times the bound.

    The step is dropped if `MOST_SHRINKS` factors of `step_scale` do not suffice.

    Args:
      old: trained parameters before the step.
      new: trained parameters after the step; donated if the step is shortened.
      kl_of: measures KL(old || parameters), in nats per token.
      bound: largest allowed KL, in nats per token.

    Returns:
      The parameters to use, the KL of the full step, and the factor of the step in [0, 1].
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
    """`kl_sum` over the thinking and the answers of a micro-batch."""
    return kl_sum(
        joined(old.thinking, old.answers),
        joined(new.thinking, new.answers),
        joined(rows.thinking_mask, rows.answer_mask),
    )


def mean_kl(
    old: Sequence[TokenScores], new: Sequence[TokenScores], parts: Sequence[Batch]
) -> float:
    """Averages k3 over the sampled tokens of all micro-batches; 0 without any token."""
    sums = []
    for old_scores, new_scores, rows in zip(old, new, parts, strict=True):
        sums.append(_kl_of_rows(old_scores, new_scores, rows))
    total = sum(float(kl) for kl, _ in sums)
    count = sum(float(tokens) for _, tokens in sums)
    return total / max(count, 1.0)


def _measured(metrics: Metrics, kl: float, scale: float) -> Metrics:
    """Adds the KL and the factor of a step to its metrics."""
    return {
        **metrics,
        "policy/update_kl": jnp.float32(kl),
        "policy/update_scale": jnp.float32(scale),
    }


def bounded(step: Step, score: Scorer, parts: Sequence[Batch], bound: float) -> Step:
    """Returns an optimizer step that moves the policy by a KL of at most `SLACK` times the bound.

    The value head and the optimizer's moments take the full step. A step costs two additional
    forward passes over its rows, one before and one after, and one for each time it is shortened.

    Args:
      step: the optimizer step; it may donate its state.
      score: scores the rows of the step.
      parts: these rows, as micro-batches on their devices.
      bound: `optimizer.max_update_kl`.
    """

    def limited(state: TrainState, update_policy: bool) -> tuple[TrainState, Metrics]:
        if not update_policy:
            state, metrics = step(state, update_policy)
            return state, _measured(metrics, 0.0, 1.0)
        # The step donates the state's parameters.
        before = jax.tree.map(lambda x: x.copy(), state.policy)
        old_scores = score(before)
        state, metrics = step(state, update_policy)
        policy, kl, scale = shortened(
            before, state.policy, lambda new: mean_kl(old_scores, score(new), parts), bound
        )
        state = dataclasses.replace(state, policy=policy)
        return state, _measured(metrics, kl, scale)

    return limited
