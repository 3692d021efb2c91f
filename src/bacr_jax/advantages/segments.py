"""How far the credit for an outcome reaches: advantages per segment, per answer, per token."""

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
    """Weighted sum over this cut and the later ones.

        G_s = sum_{j >= s} w_j x_j

    With x = R it is the return of a token in segment s: the part of sum_j w_j R_j that the token
    can still change.
    """
    chex.assert_axis_dimension(x, -1, weights.shape[0])
    return jnp.flip(jnp.cumsum(jnp.flip(weights * x, axis=-1), axis=-1), axis=-1)


def thinking_credit(
    residual: Float[Array, "Q G M"], weights: Float[Array, "M"], *, mode: CreditMode
) -> Float[Array, "Q G M"]:
    """Advantage of each thinking segment from the residuals at the cuts.

    "to_go" (and "answer_literal", which differs in the answers only): sum_{j >= s} w_j A_j, the
    policy gradient of sum_j w_j R_j. "trajectory": sum_j w_j A_j for all segments, one advantage a
    trace (paper Eq. 15 to the letter); the same expectation with more variance, since a token
    cannot change outcomes of earlier cuts. "segment": w_s A_s alone; biased, blind to what a
    segment does to later answers.

    Args:
      residual: A_j = R_j - V_j (`bcae_advantage`).
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
        f"mode: found {mode!r}; known are to_go, answer_literal, trajectory and segment"
    )


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
    """Advantage of the answer tokens at each cut.

        u_j (r_j - p_j), u from `rewards.outcome_coefficients`

    An answer decides its own outcome and nothing else, and u_j is all the weight which that outcome
    has in sum_j w_j R_j. "answer_literal" applies Eq. 10 to the answer as it stands,
    w_j (R_j - V_j), which overweighs the outcomes before the last and adds the noise of the
    previous one. "trajectory" gives answers what it gives the thinking, sum_j w_j A_j: the answers
    are part of the trace that Eq. 15 weighs as a whole.

    Args:
      r: outcomes, in [0, 1].
      rewards: R of Eq. 7.
      values: baseline of R.
      p: baseline of r: predicted probability of a correct answer, or the other traces' mean.
      weights: w, one per cut.
      coefficient: lambda of Eq. 7.
      mode: "answer_literal", "trajectory", or any other mode of `thinking_credit` for the first.

    Returns:
      One advantage per cut. `sum_reused` adds those that share an answer; under "trajectory", where
      the advantage is the trace's and no cut's, an answer counts once.
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
    """Segment of each thinking token: the first cut that includes it.

        s(t) = min { j : c_j >= t },  t counted from 1

    So tokens 1..c_1 are segment 0. With equal cuts the first of them owns the tokens.

    Args:
      positions: token numbers, the first thinking token being 1.
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
      cuts: cuts in tokens, nondecreasing along the last axis.
      num_tokens: T; entry t of the result belongs to thinking token t + 1.

    Returns:
      Advantages per token, 0 after the last cut. Tokens past a trace's natural end are not
      known here: the loss mask leaves them out.
    """
    chex.assert_rank([advantages, cuts], 2)
    chex.assert_equal_shape([advantages, cuts])
    positions = jnp.broadcast_to(jnp.arange(1, num_tokens + 1), (cuts.shape[0], num_tokens))
    padded = jnp.pad(advantages, ((0, 0), (0, 1)))
    return jnp.take_along_axis(padded, segment_index(positions, cuts), axis=1)


def sum_reused(
    advantages: Float[Array, "*batch M"], source: Int[Array, "*batch M"]
) -> Float[Array, "*batch M"]:
    """Adds up the advantages of the cuts that share one answer.

    The answer generated for cut i is scored at every j with source_j = i, and its gradient is the
    sum of those terms.

    Args:
      source: the cut whose answer serves cut j (`rewards.distinct_cuts`).

    Returns:
      One per generated answer; 0 at cuts that generated none.
    """
    chex.assert_equal_shape([advantages, source])
    serves = source[..., None, :] == jnp.arange(source.shape[-1])[:, None]
    return jnp.sum(jnp.where(serves, advantages[..., None, :], 0.0), axis=-1)
