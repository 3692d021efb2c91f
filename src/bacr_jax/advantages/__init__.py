"""Advantages: from rewards per cut to a number per token.

The rewards of G traces of a question, each scored at M cuts, form one array [Q, G, M]. The thinking
tokens between two cuts form a segment; they can only influence the cuts at or after its end.
Budget-conditioned advantages (BCAE) are built as

    residual = bcae_advantage(R, V)                               # Eq. 10, [Q, G, M]
    thinking = thinking_credit(residual, weights, mode="to_go")   # one per segment
    answers  = answer_credit(r, R, V, p, weights, coefficient=.3, mode="to_go")
    scale    = advantage_scale(thinking, mode="batch_rms", floor=.1)
    tokens   = scatter_segments((thinking / scale).reshape(B, M), cuts, T)

and the group baselines (GRPO, RLOO, Dr.GRPO here, BRPO in `baselines`) work on the same arrays.
Advantages are constants to the policy gradient: gradients into rewards and values are stopped.
"""

from typing import Literal

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from bacr_jax.advantages.value_baselines import (
    estimate_prior_strength as estimate_prior_strength,
)
from bacr_jax.advantages.value_baselines import (
    history_advantage as history_advantage,
)
from bacr_jax.advantages.value_baselines import (
    history_moments as history_moments,
)
from bacr_jax.advantages.value_baselines import (
    history_surprise as history_surprise,
)
from bacr_jax.advantages.value_baselines import (
    prior_strength as prior_strength,
)
from bacr_jax.advantages.value_baselines import (
    residual_loo_baseline as residual_loo_baseline,
)
from bacr_jax.advantages.value_baselines import (
    residual_moments as residual_moments,
)
from bacr_jax.advantages.value_baselines import (
    shrink_baseline as shrink_baseline,
)
from bacr_jax.errors import UserError
from bacr_jax.masked import masked_rms, masked_std

Scalar = int | float | Array
Credit = Literal["to_go", "trajectory", "segment", "answer_literal"]


# --- cuts and tokens ---------------------------------------------------------------------------


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
      advantages: one per segment.
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
      advantages: one per cut.
      source: the cut whose answer serves cut j (`rewards.distinct_cuts`).

    Returns:
      One per generated answer; 0 at cuts that generated none.
    """
    chex.assert_equal_shape([advantages, source])
    serves = source[..., None, :] == jnp.arange(source.shape[-1])[:, None]
    return jnp.sum(jnp.where(serves, advantages[..., None, :], 0.0), axis=-1)


def to_go(x: Float[Array, "*batch M"], weights: Float[Array, "M"]) -> Float[Array, "*batch M"]:
    """Weighted sum over this cut and the later ones.

        G_s = sum_{j >= s} w_j x_j

    With x = R it is the return of a token in segment s: the part of sum_j w_j R_j that the token
    can still change.

    Args:
      x: one value per cut.
      weights: w, one per cut.

    Returns:
      G, one per segment.
    """
    chex.assert_axis_dimension(x, -1, weights.shape[0])
    return jnp.flip(jnp.cumsum(jnp.flip(weights * x, axis=-1), axis=-1), axis=-1)


# --- group baselines ---------------------------------------------------------------------------


def group_advantage(rewards: Float[Array, "..."], *, axis: int = -1) -> Float[Array, "..."]:
    """Reward minus the group's mean (Dr.GRPO, arXiv 2503.20783).

        A_i = R_i - mean_G R

    The mean includes R_i, which shrinks the expected gradient by 1 - 1/G and leaves its
    signal-to-noise ratio that of RLOO. A group of equal rewards gives exact zeros.

    Args:
      rewards: rewards of the group's traces along `axis`.
      axis: the group axis.

    Returns:
      A, the shape of `rewards`.
    """
    rewards = jax.lax.stop_gradient(rewards)
    # Shifting by one member first makes equal rewards cancel exactly in float32.
    shifted = rewards - jax.lax.slice_in_dim(rewards, 0, 1, axis=axis)
    return shifted - jnp.mean(shifted, axis=axis, keepdims=True)


def grpo_advantage(
    rewards: Float[Array, "..."],
    *,
    std: bool = True,
    ddof: int = 1,
    eps: float = 1e-6,
    axis: int = -1,
) -> Float[Array, "..."]:
    """Group-normalised reward (GRPO, arXiv 2402.03300).

        A_i = (R_i - mean_G R) / (std_G R + eps)

    Dividing by the group's own deviation weighs questions by 1/std and depends on R_i nonlinearly.
    A group of one has no statistics: its advantage is its reward, as in common implementations.

    Args:
      rewards: rewards of the group's traces along `axis`.
      std: divide by the standard deviation.
      ddof: 1 divides squares by G - 1, 0 by G.
      eps: added to the standard deviation.
      axis: the group axis.

    Returns:
      A, the shape of `rewards`.
    """
    if rewards.shape[axis] == 1:
        return jax.lax.stop_gradient(rewards)
    centred = group_advantage(rewards, axis=axis)
    if not std:
        return centred
    spread = masked_std(centred, jnp.ones((), bool), axis, ddof=ddof, keepdims=True)
    return centred / (spread + eps)


def rloo_advantage(rewards: Float[Array, "..."], *, axis: int = -1) -> Float[Array, "..."]:
    """Reward minus the mean of the others in the group (RLOO, arXiv 2402.14740).

        A_i = R_i - mean_{k != i} R_k = G / (G - 1) (R_i - mean_G R)

    Args:
      rewards: rewards of the group's traces along `axis`.
      axis: the group axis.

    Returns:
      A, the shape of `rewards`; 0 in a group of one.
    """
    size = rewards.shape[axis]
    return group_advantage(rewards, axis=axis) * (size / max(size - 1, 1))


# --- budget-conditioned baselines --------------------------------------------------------------


def value_from_correctness(
    p: Float[Array, "*batch M"], *, coefficient: Scalar
) -> Float[Array, "*batch M"]:
    """Expected dense reward from the probability of a correct answer at each cut.

        V_j = (1 + lambda) p_j - lambda p_{j-1},  p_0 = 0

    Eq. 7 is linear in the outcomes, so a head that predicts P(r_j = 1) gives V by the same map.

    Args:
      p: probabilities of a correct answer.
      coefficient: lambda of Eq. 7.

    Returns:
      V, the expectation of R.
    """
    previous = jnp.pad(p[..., :-1], [(0, 0)] * (p.ndim - 1) + [(1, 0)])
    return (1.0 + coefficient) * p - coefficient * previous


def correctness_from_value(
    values: Float[Array, "*batch M"], *, coefficient: Scalar
) -> Float[Array, "*batch M"]:
    """Inverse of `value_from_correctness`: the probabilities that a value of R implies.

        p_j = (V_j + lambda p_{j-1}) / (1 + lambda),  p_0 = 0

    Args:
      values: V, predictions of R.
      coefficient: lambda of Eq. 7.

    Returns:
      p, not clipped: a value regressed on R can imply numbers outside [0, 1].
    """
    lag = jnp.arange(values.shape[-1])[:, None] - jnp.arange(values.shape[-1])[None, :]
    decay = jnp.asarray(coefficient / (1.0 + coefficient), values.dtype)
    unrolled = jnp.where(lag >= 0, decay ** jnp.maximum(lag, 0), 0.0) / (1.0 + coefficient)
    return jnp.einsum("ji,...i->...j", unrolled, values, precision="highest")


def bcae_advantage(
    rewards: Float[Array, "Q G M"], values: Float[Array, "Q G M"]
) -> Float[Array, "Q G M"]:
    """Reward minus the value predicted for the question, the budget and the cut, paper Eq. 10.

        A = R(q, t, b_j) - V_psi(q, b, b_j)

    It leaves the gradient unbiased as long as V was not fitted on these rewards: values are those
    of the head before this batch's update.

    Args:
      rewards: R of Eq. 7.
      values: V, or any other baseline of R (`residual_loo_baseline`, `shrink_baseline`).

    Returns:
      Residuals per cut; `thinking_credit` and `answer_credit` turn them into advantages.
    """
    chex.assert_rank([rewards, values], 3)
    chex.assert_equal_shape([rewards, values])
    return jax.lax.stop_gradient(rewards - values)


# --- credit ------------------------------------------------------------------------------------


def thinking_credit(
    residual: Float[Array, "Q G M"], weights: Float[Array, "M"], *, mode: Credit
) -> Float[Array, "Q G M"]:
    """Advantage of each thinking segment from the residuals at the cuts.

    "to_go" (and "answer_literal", which differs in the answers only): sum_{j >= s} w_j A_j, the
    policy gradient of sum_j w_j R_j. "trajectory": sum_j w_j A_j for all segments; the same
    expectation with more variance, since a token cannot change outcomes of earlier cuts.
    "segment": w_s A_s alone; biased, blind to what a segment does to later answers.

    Args:
      residual: A_j = R_j - V_j (`bcae_advantage`).
      weights: w, one per cut.
      mode: how far credit reaches.

    Returns:
      One advantage per segment.

    Raises:
      UserError: an unknown mode.
    """
    chex.assert_rank([residual, weights], [3, 1])
    if mode in ("to_go", "answer_literal"):
        return to_go(residual, weights)
    if mode == "trajectory":
        total = jnp.sum(weights * residual, axis=-1, keepdims=True)
        return jnp.broadcast_to(total, residual.shape)
    if mode == "segment":
        return weights * residual
    raise UserError(
        f"advantage.credit: found {mode!r}; write to_go, answer_literal, trajectory or segment"
    )


def outcome_coefficients(weights: Float[Array, "M"], *, coefficient: Scalar) -> Float[Array, "M"]:
    """Total weight of each outcome r_j in the objective sum_j w_j R_j.

        u_j = (1 + lambda) w_j - lambda w_{j+1},  w_{M+1} = 0

    r_j enters R_j as outcome and progress, and R_{j+1} as lost progress. With uniform weights that
    is 1/M, and (1 + lambda)/M for the last. A weight that grows from one cut to the next by more
    than a factor (1 + lambda)/lambda makes u_j negative: the objective pays for a wrong answer at
    j. "final_heavy" over 4 cuts does so from lambda = 1/6 up.

    Args:
      weights: w, one per cut.
      coefficient: lambda of Eq. 7.

    Returns:
      u, one per cut.
    """
    following = jnp.append(weights[1:], 0.0)
    return (1.0 + coefficient) * weights - coefficient * following


def answer_credit(
    r: Float[Array, "Q G M"],
    rewards: Float[Array, "Q G M"],
    values: Float[Array, "Q G M"],
    p: Float[Array, "Q G M"],
    weights: Float[Array, "M"],
    *,
    coefficient: Scalar,
    mode: Credit,
) -> Float[Array, "Q G M"]:
    """Advantage of the answer tokens at each cut.

        u_j (r_j - p_j), u from `outcome_coefficients`

    An answer decides its own outcome and nothing else, and u_j is all the weight which that outcome
    has in sum_j w_j R_j. "answer_literal" applies Eq. 10 to the answer as it stands,
    w_j (R_j - V_j), which overweighs the outcomes before the last and adds the noise of the
    previous one.

    Args:
      r: outcomes, in [0, 1].
      rewards: R of Eq. 7.
      values: baseline of R.
      p: baseline of r: predicted probability of a correct answer, or the other traces' mean.
      weights: w, one per cut.
      coefficient: lambda of Eq. 7.
      mode: "answer_literal", or any other mode of `thinking_credit` for the exact form.

    Returns:
      One advantage per cut; `sum_reused` adds those that share an answer.
    """
    chex.assert_rank([r, rewards, values, p], 3)
    chex.assert_equal_shape([r, rewards, values, p])
    if mode == "answer_literal":
        return weights * bcae_advantage(rewards, values)
    u = outcome_coefficients(weights, coefficient=coefficient)
    return u * jax.lax.stop_gradient(r - p)


# --- scale -------------------------------------------------------------------------------------


def advantage_scale(
    advantages: Float[Array, "Q ..."],
    *,
    mode: Literal["group", "batch_rms", "none"],
    floor: Scalar,
    mask: Shaped[Array, "Q ..."] | None = None,
) -> Float[Array, "..."]:
    """The number advantages are divided by, paper Eq. 14.

        group:      max(std over a question's G x M advantages, floor)
        batch_rms:  max(root mean square over all advantages, floor)

    Advantages with a learned baseline are not centred, so a question whose traces all agree has a
    deviation of 0 and an advantage that is not; the floor must be of the order of .1, not 1e-6.

    Args:
      advantages: question axis first.
      mode: "group" (paper), "batch_rms" or "none".
      floor: epsilon of Eq. 14, the smallest divisor.
      mask: entries that count, all by default.

    Returns:
      The divisor, broadcastable against `advantages`.

    Raises:
      UserError: an unknown mode.
    """
    keep = jnp.ones_like(advantages, bool) if mask is None else mask
    if mode == "none":
        return jnp.ones((), advantages.dtype)
    if mode == "batch_rms":
        return jnp.maximum(masked_rms(advantages, keep), floor)
    if mode == "group":
        axes = tuple(range(1, advantages.ndim))
        return jnp.maximum(masked_std(advantages, keep, axes, keepdims=True), floor)
    raise UserError(f"advantage.normalise: found {mode!r}; write batch_rms, group or none")


def normalize(
    advantages: Float[Array, "Q ..."],
    *,
    mode: Literal["group", "batch_rms", "none"],
    floor: Scalar,
    mask: Shaped[Array, "Q ..."] | None = None,
) -> Float[Array, "Q ..."]:
    """Advantages divided by `advantage_scale`, paper Eq. 14. Nothing is subtracted.

    Args:
      advantages: question axis first.
      mode: "group" (paper), "batch_rms" or "none".
      floor: epsilon of Eq. 14, the smallest divisor.
      mask: entries that count for the scale, all by default.

    Returns:
      Scaled advantages, same shape.
    """
    return advantages / advantage_scale(advantages, mode=mode, floor=floor, mask=mask)
