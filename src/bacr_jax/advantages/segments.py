"""Credit assignment: turns residuals at the cuts into advantages per segment, answer and token."""

from typing import Literal

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bacr_jax.advantages.value import bcae_advantage
from bacr_jax.rewards import outcome_coefficients
from bacr_jax.types import Scalar

CreditMode = Literal["to_go", "trajectory", "segment", "answer_literal"]


def to_go(x: Float[Array, "*batch M"], weights: Float[Array, "M"]) -> Float[Array, "*batch M"]:
    """Returns the weighted sum of x over each cut and the later cuts.

        G_s = sum_{j >= s} w_j x_j

    If x = R, G_s is the return of a token in segment s: the part of sum_j w_j R_j that the token
    can still change.
    """
    chex.assert_axis_dimension(x, -1, weights.shape[0])
    from_last = jnp.flip(weights * x, axis=-1)
    sums = jnp.cumsum(from_last, axis=-1)
    return jnp.flip(sums, axis=-1)


def thinking_credit(
    residual: Float[Array, "Q G M"], weights: Float[Array, "M"], *, mode: CreditMode
) -> Float[Array, "Q G M"]:
    """Returns the advantage of each thinking segment from the residuals at the cuts.

        to_go, answer_literal:  sum_{j >= s} w_j A_j
        trajectory:             sum_j w_j A_j, the same for all segments of a trace
        segment:                w_s A_s

    "to_go" gives the policy gradient of sum_j w_j R_j. "answer_literal" differs from it only in the
    answers (`answer_credit`). "trajectory" is paper Eq. 15 to the letter. It has the same
    expectation with more variance, because a token cannot change outcomes of earlier cuts.
    "segment" is biased, because it ignores the effect of a segment on later answers.

    Args:
      residual: A_j = R_j - V_j (`bcae_advantage`).

    Raises:
      ValueError: the mode is unknown.
    """
    chex.assert_rank([residual, weights], [3, 1])
    if mode in ("to_go", "answer_literal"):
        return to_go(residual, weights)
    if mode == "trajectory":
        total = jnp.sum(weights * residual, axis=-1, keepdims=True)
        return jnp.broadcast_to(total, residual.shape)
    if mode == "segment":
        return weights * residual
    raise ValueError(f"mode: found {mode!r}; write to_go, answer_literal, trajectory or segment")


def answer_credit(
    r: Float[Array, "Q G M"],
    rewards: Float[Array, "Q G M"],
    values: Float[Array, "Q G M"],
    p: Float[Array, "Q G M"],
    weights: Float[Array, "M"],
    *,
    coefficient: Scalar,
    mode: CreditMode,
) -> Float[Array, "Q G M"]:
    """Returns the advantage of the answer tokens at each cut.

        to_go, segment:  u_j (r_j - p_j), u from `rewards.outcome_coefficients`
        answer_literal:  w_j (R_j - V_j)
        trajectory:      sum_j w_j (R_j - V_j)

    An answer only decides the outcome at its cut, and u_j is the total weight of that outcome in
    sum_j w_j R_j. "answer_literal" applies Eq. 10 to the answer unchanged. It overweighs the
    outcomes before the last and adds the noise of the previous outcome. "trajectory" gives answers
    the same advantage as the thinking, because Eq. 15 weighs the trace, with its answers, as one.

    Args:
      r: outcomes, in [0, 1].
      rewards: R of Eq. 7.
      values: baseline of R.
      p: baseline of r: predicted probability of a correct answer, or the other traces' mean.
      weights: w, one per cut.
      coefficient: lambda of Eq. 7.

    Returns:
      One advantage per cut. If cuts share an answer, `sum_reused` adds up their advantages. Under
      "trajectory" an answer must count once instead, because the advantage belongs to the trace.
    """
    chex.assert_rank([r, rewards, values, p], 3)
    chex.assert_equal_shape([r, rewards, values, p])
    if mode == "answer_literal":
        return weights * bcae_advantage(rewards, values)
    if mode == "trajectory":
        return thinking_credit(bcae_advantage(rewards, values), weights, mode=mode)
    u = outcome_coefficients(weights, coefficient=coefficient)
    return u * jax.lax.stop_gradient(r - p)


def segment_index(
    positions: Int[Array, "*batch T"], cuts: Int[Array, "*batch M"]
) -> Int[Array, "*batch T"]:
    """Returns the segment of each thinking token: the index of the first cut that includes it.

        s(t) = min { j : c_j >= t },  t counted from 1

    Tokens 1 to c_1 are segment 0. If several cuts are equal, the tokens belong to the first.

    Args:
      positions: token numbers; the first thinking token is 1.
      cuts: cuts in tokens, nondecreasing along the last axis.

    Returns:
      Indices in [0, M]; M for tokens after the last cut.
    """
    before = cuts[..., None, :] < positions[..., :, None]
    return jnp.sum(before, axis=-1, dtype=jnp.int32)


def scatter_segments(
    advantages: Float[Array, "B M"], cuts: Int[Array, "B M"], num_tokens: int
) -> Float[Array, "B T"]:
    """Gives every thinking token the advantage of its segment.

    Args:
      advantages: one per segment.
      cuts: cuts in tokens, nondecreasing along the last axis.
      num_tokens: T; entry t of the result belongs to thinking token t + 1.

    Returns:
      Advantages per token, 0 after the last cut. This function does not read trace lengths: the
      loss mask leaves out the tokens past a trace's natural end.
    """
    chex.assert_rank([advantages, cuts], 2)
    chex.assert_equal_shape([advantages, cuts])
    num_traces = cuts.shape[0]
    positions = jnp.broadcast_to(jnp.arange(1, num_tokens + 1), (num_traces, num_tokens))
    # One more segment, of advantage 0, for the tokens after the last cut.
    padded = jnp.pad(advantages, ((0, 0), (0, 1)))
    segments = segment_index(positions, cuts)
    return jnp.take_along_axis(padded, segments, axis=1)


def sum_reused(
    advantages: Float[Array, "*batch M"], source: Int[Array, "*batch M"]
) -> Float[Array, "*batch M"]:
    """Adds up the advantages of the cuts that share one answer.

    The answer generated for cut i is scored at every cut j with source_j = i, so its gradient is
    the sum of the terms of these cuts.

    Args:
      source: for each cut, the cut whose answer it uses (`rewards.distinct_cuts`).

    Returns:
      One advantage per generated answer; 0 at cuts that use the answer of another cut.
    """
    chex.assert_equal_shape([advantages, source])
    generating_cut = jnp.arange(source.shape[-1])[:, None]
    uses_answer = source[..., None, :] == generating_cut
    return jnp.sum(jnp.where(uses_answer, advantages[..., None, :], 0.0), axis=-1)
