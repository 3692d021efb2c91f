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


def _others_mean(x: Array, axis: int) -> Array:
    """Mean over the other members of the group; 0 in a group of one."""
    size = x.shape[axis]
    return (jnp.sum(x, axis=axis, keepdims=True) - x) / max(size - 1, 1)


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


def residual_loo_baseline(
    rewards: Float[Array, "..."], values: Float[Array, "..."], *, axis: int = -1
) -> Float[Array, "..."]:
    """Value plus the mean residual of the other traces of the group.

        c_i = V_i + mean_{k != i} (R_k - V_k)

    Any error of V that the traces of a question share cancels; budgets may differ inside the group,
    since each trace is compared with its own V. Constant V gives the RLOO baseline.

    Args:
      rewards: R, group along `axis`.
      values: V, same shape.
      axis: the group axis (1 for [Q, G, M]).

    Returns:
      Baseline c; V itself in a group of one.
    """
    chex.assert_equal_shape([rewards, values])
    return jax.lax.stop_gradient(values + _others_mean(rewards - values, axis))


def shrink_baseline(
    rewards: Float[Array, "..."],
    values: Float[Array, "..."],
    *,
    prior_strength: Scalar,
    axis: int = -1,
) -> Float[Array, "..."]:
    """Value corrected by the other traces' residuals as far as these can be trusted.

        c_i = V_i + sum_{k != i} (R_k - V_k) / (n0 + G - 1)

    For equal V in the group this is (n0 V + sum_{k != i} R_k) / (n0 + G - 1): V counts as n0
    observations. n0 = sigma^2 / v^2, with sigma^2 the variance of R and v^2 the mean squared error
    of V, is the best choice; its excess variance is at most that of V alone (n0 = inf) and of the
    leave-one-out mean alone (n0 = 0).

    Args:
      rewards: R, group along `axis`.
      values: V, same shape.
      prior_strength: n0 >= 0, see `prior_strength`.
      axis: the group axis (1 for [Q, G, M]).

    Returns:
      Baseline c; V itself in a group of one.
    """
    chex.assert_equal_shape([rewards, values])
    others = rewards.shape[axis] - 1
    mean = _others_mean(rewards - values, axis)
    trust = others / jnp.maximum(prior_strength + others, jnp.finfo(jnp.float32).tiny)
    return jax.lax.stop_gradient(values + trust * mean)


def residual_moments(
    rewards: Float[Array, "..."], values: Float[Array, "..."], *, axis: int = -1
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Variance of R around its mean, and mean squared error of V, over a batch of groups.

    sigma^2 is the mean variance of residuals inside groups; v^2 is the mean square of the groups'
    mean residuals less sigma^2 / G, the part that sampling alone explains, so that it can come out
    negative. Average both over steps before `prior_strength`: one number for many groups and
    several batches makes its dependence on a single trace negligible.

    Args:
      rewards: R, group along `axis` with at least 2 members.
      values: V, same shape.
      axis: the group axis.

    Returns:
      sigma^2 and v^2.
    """
    chex.assert_equal_shape([rewards, values])
    residual = jax.lax.stop_gradient(rewards - values)
    size = residual.shape[axis]
    sigma2 = jnp.mean(jnp.var(residual, axis=axis, ddof=1))
    error2 = jnp.mean(jnp.square(jnp.mean(residual, axis=axis))) - sigma2 / size
    return sigma2, error2


def prior_strength(sigma2: Scalar, error2: Scalar) -> Float[Array, ""]:
    """How many observations V is worth: n0 = sigma^2 / v^2.

    Args:
      sigma2: variance of R around its mean.
      error2: v^2, mean squared error of V.

    Returns:
      n0, capped at 1e6 (V exact, as far as the moments can tell).
    """
    sigma2, error2 = jnp.asarray(sigma2), jnp.asarray(error2)
    return jnp.where(error2 > 1e-6 * sigma2, sigma2 / jnp.maximum(error2, 1e-30), 1e6)


def estimate_prior_strength(
    rewards: Float[Array, "..."], values: Float[Array, "..."], *, axis: int = -1
) -> Float[Array, ""]:
    """n0 of one batch: `prior_strength` of its `residual_moments`.

    Args:
      rewards: R, group along `axis` with at least 2 members.
      values: V, same shape.
      axis: the group axis.

    Returns:
      n0, capped at 1e6.
    """
    return prior_strength(*residual_moments(rewards, values, axis=axis))


# --- history: an extension ---------------------------------------------------------------------


def history_surprise(
    r: Float[Array, "Q G M"], p: Float[Array, "Q G M"]
) -> Float[Array, "Q G M"]:
    """What the answer before each segment revealed: x_s = r_{s-1} - p_{s-1}, x_0 = 0.

    A segment's own tokens come after that answer's cut, so x_s may enter their baseline.

    Args:
      r: outcomes.
      p: predictions of the outcomes, made without this trace's r.

    Returns:
      x, one per segment.
    """
    chex.assert_equal_shape([r, p])
    surprise = jax.lax.stop_gradient(r - p)[..., :-1]
    return jnp.pad(surprise, ((0, 0), (0, 0), (1, 0)))


def history_moments(
    credit: Float[Array, "Q G M"], surprise: Float[Array, "Q G M"]
) -> tuple[Float[Array, "M"], Float[Array, "M"]]:
    """Moments of the regression of a segment's return on the surprise before it.

    Args:
      credit: reward-to-go less its baseline, one per segment (`thinking_credit`).
      surprise: x (`history_surprise`).

    Returns:
      mean x A and mean x^2, per segment; their ratio is the slope. Average both over steps.
    """
    chex.assert_equal_shape([credit, surprise])
    return jnp.mean(credit * surprise, axis=(0, 1)), jnp.mean(jnp.square(surprise), axis=(0, 1))


def history_advantage(
    credit: Float[Array, "Q G M"], surprise: Float[Array, "Q G M"], slope: Float[Array, "M"]
) -> Float[Array, "Q G M"]:
    """Advantage against a value that has also seen the trace's previous outcome.

        A_s - k_s x_s,   k_s = E[x_s A_s] / E[x_s^2]

    It is the linear form of a value V(q, b, b_j, r_{<j}), an extension of the paper's V(q, b): where
    outcomes persist along a trace, the previous one predicts most of what is to come. The slope
    must come from earlier batches for the gradient to stay unbiased.

    Args:
      credit: A, reward-to-go less its baseline (`thinking_credit`).
      surprise: x (`history_surprise`).
      slope: k, one per segment.

    Returns:
      Advantages per segment.
    """
    chex.assert_equal_shape([credit, surprise])
    return credit - jax.lax.stop_gradient(slope) * surprise


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
