"""Assigns credit: computes advantages per segment, answer and token from residuals at the cuts.

A cut is a truncation point of the thinking, at which an answer is graded. A segment is the thinking
between two cuts. A residual is the reward at a cut minus its baseline.
"""

from typing import Literal

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bacr_jax.advantages.value import bcae_advantage
from bacr_jax.rewards import outcome_coefficients
from bacr_jax.static_arguments import static_arguments
from bacr_jax.types import Scalar

CreditMode = Literal["to_go", "trajectory", "segment", "answer_literal"]


def to_go(x: Float[Array, "*batch M"], weights: Float[Array, "M"]) -> Float[Array, "*batch M"]:
    """Computes the weighted sum of x over the current truncation point (cut) and all later cuts.

        G_s = sum_{j >= s} w_j x_j

    For the rewards x = R, G_s is the return of a token in thinking segment s, which ends at cut s:
    the part of sum_j w_j R_j that the token can still influence.
    """
    chex.assert_axis_dimension(x, -1, weights.shape[0])
    from_last = jnp.flip(weights * x, axis=-1)
    sums = jnp.cumsum(from_last, axis=-1)
    return jnp.flip(sums, axis=-1)


@static_arguments("mode")
def thinking_credit(
    residual: Float[Array, "Q G M"], weights: Float[Array, "M"], *, mode: CreditMode
) -> Float[Array, "Q G M"]:
    """Computes the advantage of each thinking segment from the residuals at the truncation points.

        to_go, answer_literal:  sum_{j >= s} w_j A_j
        trajectory:             sum_j w_j A_j, the same for all segments of a trace
        segment:                w_s A_s

    "to_go" gives the policy gradient of sum_j w_j R_j. "answer_literal" is identical here and only
    differs in `answer_credit`. "trajectory" is Eq. 15 exactly as in the paper. It has the same
    expected gradient but a higher variance, because a token cannot influence the outcomes of
    earlier cuts. "segment" is biased, because it ignores the effect of a segment on later answers.

    Args:
      residual: A_j = R_j - V_j at each truncation point j (`bcae_advantage`).
      weights: weight w_j of each truncation point.
      mode: selects the formula, see above.

    Raises:
      ValueError: If the mode is unknown.
    """
    chex.assert_rank([residual, weights], [3, 1])
    if mode in ("to_go", "answer_literal"):
        return to_go(residual, weights)
    if mode == "trajectory":
        total = jnp.sum(weights * residual, axis=-1, keepdims=True)
        return jnp.broadcast_to(total, residual.shape)
    if mode == "segment":
        return weights * residual
    raise ValueError(
        "the credit assignment must be to_go, answer_literal, trajectory or segment, but `mode` "
        f"is {mode!r}"
    )


@static_arguments("mode")
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
    """Computes the advantage of the answer tokens at each truncation point (cut).

        to_go, segment:  u_j (r_j - p_j), u from `rewards.outcome_coefficients`
        answer_literal:  w_j (R_j - V_j)
        trajectory:      sum_j w_j (R_j - V_j)

    An answer only determines the outcome at its cut, and u_j is the total weight of that outcome in
    sum_j w_j R_j. "answer_literal" applies Eq. 10 to the answer unchanged. It overweights all
    outcomes except the last and adds the noise of the previous outcome. "trajectory" gives answers
    the same advantage as the thinking, because Eq. 15 treats the trace and its answers as one
    sequence.

    Args:
      r: outcomes, in [0, 1].
      rewards: R of Eq. 7.
      values: baseline of R.
      p: baseline of r, either the predicted probability of a correct answer or the mean over the
        other traces.
      weights: weight w of each cut.
      coefficient: lambda of Eq. 7.
      mode: selects the formula, see above.

    Returns:
      One advantage per cut. Use `sum_reused` to add up the advantages of cuts that share an answer.
      In mode "trajectory", count each shared answer once instead, because the advantage belongs to
      the trace.
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
    """Returns the index of the segment that contains each thinking token.

        s(t) = min { j : c_j >= t },  t counted from 1

    c_j is truncation point (cut) j, the end of segment j. Segment 0 starts at token 1. If several
    cuts are equal, their tokens belong to the first of these cuts.

    Args:
      positions: token positions, where the first thinking token has position 1.
      cuts: number of thinking tokens before each cut, nondecreasing along the last axis.

    Returns:
      Indices in [0, M]. Tokens after the last cut have index M.
    """
    before = cuts[..., None, :] < positions[..., :, None]
    return jnp.sum(before, axis=-1, dtype=jnp.int32)


@static_arguments("num_tokens")
def scatter_segments(
    advantages: Float[Array, "B M"], cuts: Int[Array, "B M"], num_tokens: int
) -> Float[Array, "B T"]:
    """Expands advantages per segment to advantages per thinking token.

    A segment is the thinking between two truncation points (cuts).

    Args:
      advantages: advantage of each segment.
      cuts: number of thinking tokens before each cut, nondecreasing along the last axis.
      num_tokens: T. Entry t of the result belongs to thinking token t + 1.

    Returns:
      Advantage of each token, 0 after the last cut. Trace lengths are ignored, so the loss mask
      must exclude the tokens past the natural end of a trace.
    """
    chex.assert_rank([advantages, cuts], 2)
    chex.assert_equal_shape([advantages, cuts])
    num_traces = cuts.shape[0]
    positions = jnp.broadcast_to(jnp.arange(1, num_tokens + 1), (num_traces, num_tokens))
    # Add a segment with advantage 0, because tokens after the last cut have index M.
    padded = jnp.pad(advantages, ((0, 0), (0, 1)))
    segments = segment_index(positions, cuts)
    return jnp.take_along_axis(padded, segments, axis=1)


def sum_reused(
    advantages: Float[Array, "*batch M"], source: Int[Array, "*batch M"]
) -> Float[Array, "*batch M"]:
    """Sums the advantages of truncation points (cuts) that share an answer.

    The answer generated at cut i is graded at every cut j with source_j = i, so its gradient is the
    sum of the gradients at these cuts.

    Args:
      advantages: advantage of the answer at each cut.
      source: for each cut, the index of the cut whose answer it uses (`rewards.distinct_cuts`).

    Returns:
      One advantage per generated answer, and 0 for cuts that use the answer of another cut.
    """
    chex.assert_equal_shape([advantages, source])
    generating_cut = jnp.arange(source.shape[-1])[:, None]
    uses_answer = source[..., None, :] == generating_cut
    return jnp.sum(jnp.where(uses_answer, advantages[..., None, :], 0.0), axis=-1)
