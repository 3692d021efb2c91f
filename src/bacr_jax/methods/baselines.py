"""Rewards and advantages of the published methods that BACR is compared with.

AnytimeReasoner's BRPO (arXiv 2505.13438), DAPO (arXiv 2503.14476), HAPO (arXiv 2505.11225) and
SelfBudgeter (arXiv 2505.11274), on the same arrays as `rewards` and `advantages`. The group
baselines GRPO, Dr.GRPO and RLOO are in `advantages`.
"""

from typing import Literal

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Num, Shaped

from bacr_jax.errors import UserError

Scalar = int | float | Array

# HAPO: history entry of a question that was never answered correctly.
HAPO_NO_HISTORY = np.iinfo(np.int32).max


# --- AnytimeReasoner: budget-relative policy optimisation -----------------------------------------


def brpo_prior(
    kind: Literal["base", "uniform", "linear"], budgets: Num[Array, "M"]
) -> Float[Array, "M"]:
    """Weight of each budget in the anytime objective (arXiv 2505.13438, section 3).

        base: all on the largest.   uniform: 1/M.   linear: P_j ~ b_j

    Args:
      kind: which prior.
      budgets: increasing budgets, in tokens.

    Returns:
      P, summing to 1.

    Raises:
      UserError: an unknown name.
    """
    chex.assert_rank(budgets, 1)
    budgets = budgets.astype(jnp.float32)
    if kind == "base":
        return jnp.zeros_like(budgets).at[-1].set(1.0)
    if kind == "uniform":
        return jnp.full_like(budgets, 1.0 / budgets.shape[0])
    if kind == "linear":
        return budgets / jnp.sum(budgets)
    raise UserError(f"brpo prior: found {kind!r}; write base, uniform or linear")


def brpo_advantage(
    r: Float[Array, "Q G M"],
    prior: Float[Array, "M"],
    *,
    decay: float = 0.5,
    mode: Literal["brpo", "v1", "v2", "none"] = "brpo",
    loo: bool = False,
) -> Float[Array, "Q G M"]:
    """Thinking advantage of AnytimeReasoner (arXiv 2505.13438, Eq. 7-9).

    With s = 0..M-1 the segment, and both baselines scaled to the remaining prior mass,

        V1[g,s] = sum_{k<s} d^{s-k} r[g,k] / sum_{k<s} d^{s-k} * sum_{k>=s} P_k      (0 at s = 0)
        V2[s]   = mean_g sum_{k>=s} P_k r[g,k]
        A[g,s]  = sum_{k>=s} P_k r[g,k] - (s/M) V1[g,s] - ((M-s)/M) V2[s]

    V1 predicts a trace's later outcomes from its own earlier ones, V2 from the group.

    Args:
      r: outcomes, averaged over the answers of each (trace, budget), in [0, 1].
      prior: P (`brpo_prior`).
      decay: d.
      mode: both baselines mixed, one of them alone, or none.
      loo: leave the trace itself out of V2, which removes the gradient shrinkage by
        1 - (M-s)/(M G); False is the published form.

    Returns:
      One advantage per segment. No division by a deviation.

    Raises:
      UserError: an unknown mode.
    """
    chex.assert_rank([r, prior], [3, 1])
    chex.assert_axis_dimension(r, 2, prior.shape[0])
    r = jax.lax.stop_gradient(r)
    group, cuts = r.shape[1:]
    index = np.arange(cuts)
    remaining = jnp.flip(jnp.cumsum(jnp.flip(prior)))
    returns = jnp.flip(jnp.cumsum(jnp.flip(prior * r, axis=-1), axis=-1), axis=-1)

    lag = index[:, None] - index[None, :]
    past = np.where(lag > 0, float(decay) ** np.maximum(lag, 0), 0.0)
    average = jnp.asarray(past / np.maximum(past.sum(-1, keepdims=True), 1e-30), r.dtype)
    v1 = jnp.einsum("sk,qgk->qgs", average, r, precision="highest") * remaining

    if group == 1:
        v2 = jnp.zeros_like(returns)
    elif loo:
        v2 = (jnp.sum(returns, axis=1, keepdims=True) - returns) / (group - 1)
    else:
        v2 = jnp.broadcast_to(jnp.mean(returns, axis=1, keepdims=True), returns.shape)

    mix = jnp.asarray(index / cuts, r.dtype)
    if mode == "brpo":
        return returns - mix * v1 - (1.0 - mix) * v2
    if mode == "v1":
        return returns - v1
    if mode == "v2":
        return returns - v2
    if mode == "none":
        return returns
    raise UserError(f"brpo mode: found {mode!r}; write brpo, v1, v2 or none")


def answer_advantage(r: Float[Array, "Q G M A"]) -> Float[Array, "Q G M A"]:
    """Answer advantage of AnytimeReasoner: against the other answers from the same cut.

        A = r[g,j,a] - mean_a r[g,j,a],   or with one answer per cut   r[g,j] - mean_g r[g,j]

    Args:
      r: outcome of each of the A answers given at cut j of trace g.

    Returns:
      One advantage per answer. No division by a deviation.
    """
    chex.assert_rank(r, 4)
    r = jax.lax.stop_gradient(r)
    return r - jnp.mean(r, axis=-1 if r.shape[-1] > 1 else 1, keepdims=True)


# --- DAPO -----------------------------------------------------------------------------------------


def overlong_penalty(
    lengths: Num[Array, "*batch"], *, max_length: Scalar, buffer: Scalar, factor: Scalar = 1.0
) -> Float[Array, "*batch"]:
    """Soft overlong punishment, added to the task reward (DAPO, arXiv 2503.14476, Eq. 13).

        0 up to L_max - L_c tokens, then linearly down to -factor at L_max, -factor beyond

    Args:
      lengths: response lengths in tokens.
      max_length: L_max, in tokens.
      buffer: L_c, in tokens (4096 of 20480 in the publication).
      factor: largest punishment.

    Returns:
      Penalty in [-factor, 0].
    """
    excess = (lengths - (max_length - buffer)) / buffer
    return -factor * jnp.clip(excess, 0.0, 1.0)


def dynamic_keep(correct: Float[Array, "Q G"]) -> Bool[Array, "Q"]:
    """Questions that dynamic sampling keeps: some but not all traces right (DAPO Eq. 11).

    Outcomes are those before any length penalty. Groups of one are kept, there being nothing to
    compare.

    Args:
      correct: outcomes of the G traces.

    Returns:
      True where the outcomes differ.
    """
    chex.assert_rank(correct, 2)
    if correct.shape[1] == 1:
        return jnp.ones(correct.shape[0], bool)
    return jnp.max(correct, axis=1) > jnp.min(correct, axis=1)


# --- HAPO -----------------------------------------------------------------------------------------


def hapo_init(num_problems: int) -> Int[Array, "n"]:
    """History before training: no question has a correct response.

    Args:
      num_problems: number of training questions n.

    Returns:
      HAPO_NO_HISTORY for each, int32.
    """
    return jnp.full(num_problems, HAPO_NO_HISTORY, jnp.int32)


def hapo_length_reward(
    history: Int[Array, "*#batch"],
    lengths: Int[Array, "*#batch"],
    correct: Shaped[Array, "*#batch"],
    *,
    floor: float = -0.7,
    kind: Literal["cosine", "linear"] = "cosine",
    tolerance: float = 0.1,
) -> Float[Array, "..."]:
    """Length reward relative to the shortest correct response so far (HAPO, arXiv 2505.11225).

    With x = length / history,

        cosine:  f = cos(min(x, 2) pi/2);        correct: max(floor, f);  wrong: min(0, f)
        linear:  correct: 1 - x if x < 1; 0 up to 1 + tolerance; then max(floor, -(x-1-tolerance))
                 wrong: 0 up to 1 + tolerance; then max(-1, -(x-1-tolerance))

    0 where there is no history. The floor keeps a long right answer above every wrong one.

    Args:
      history: shortest correct length per question in tokens, broadcast against the rollouts.
      lengths: response lengths in tokens.
      correct: 0/1 or boolean.
      floor: least reward of a correct response.
      kind: shape of the reward.
      tolerance: width of the linear form's flat part, as a fraction of the history.

    Returns:
      Length reward in [-1, 1].

    Raises:
      UserError: an unknown kind.
    """
    right = jnp.asarray(correct).astype(jnp.float32) > 0.5
    x = lengths.astype(jnp.float32) / jnp.maximum(history, 1).astype(jnp.float32)
    if kind == "cosine":
        f = jnp.cos(jnp.minimum(x, 2.0) * (np.pi / 2.0))
        reward = jnp.where(right, jnp.maximum(floor, f), jnp.minimum(0.0, f))
    elif kind == "linear":
        over = -jnp.maximum(x - (1.0 + tolerance), 0.0)
        when_right = jnp.where(x < 1.0, 1.0 - x, jnp.maximum(floor, over))
        reward = jnp.where(right, when_right, jnp.maximum(-1.0, over))
    else:
        raise UserError(f"hapo kind: found {kind!r}; write cosine or linear")
    return jnp.where(history == HAPO_NO_HISTORY, 0.0, reward)


def hapo_reward(
    history: Int[Array, "*#batch"],
    lengths: Int[Array, "*#batch"],
    correct: Shaped[Array, "*#batch"],
    *,
    weight: Scalar = 1.0,
    floor: float = -0.7,
    kind: Literal["cosine", "linear"] = "cosine",
    tolerance: float = 0.1,
) -> Float[Array, "..."]:
    """Total reward of HAPO: correctness plus the weighted `hapo_length_reward`.

    Args:
      history: shortest correct length per question, from before this batch.
      lengths: response lengths in tokens.
      correct: 0/1 or boolean.
      weight: weight of the length reward.
      floor: least length reward of a correct response.
      kind: shape of the length reward.
      tolerance: see `hapo_length_reward`.

    Returns:
      Reward in [-weight, 1 + weight].
    """
    length_reward = hapo_length_reward(
        history, lengths, correct, floor=floor, kind=kind, tolerance=tolerance
    )
    return jnp.asarray(correct).astype(jnp.float32) + weight * length_reward


def hapo_update(
    history: Int[Array, "n"],
    problem: Int[Array, "Q"],
    lengths: Int[Array, "Q G"],
    correct: Shaped[Array, "Q G"],
) -> Int[Array, "n"]:
    """History after a batch: the minimum with the batch's shortest correct lengths.

    Args:
      history: shortest correct length of each training question.
      problem: index of each question of the batch; repeats are fine.
      lengths: response lengths in tokens.
      correct: 0/1 or boolean.

    Returns:
      The new history; it never grows.
    """
    chex.assert_rank([history, problem, lengths, correct], [1, 1, 2, 2])
    right = jnp.asarray(correct).astype(jnp.float32) > 0.5
    shortest = jnp.min(jnp.where(right, lengths, HAPO_NO_HISTORY), axis=1)
    return history.at[problem].min(shortest.astype(history.dtype))


# --- SelfBudgeter ---------------------------------------------------------------------------------


def alpha_schedule(fraction: Scalar, *, start: float = 6.0, end: float = 0.1) -> Float[Array, ""]:
    """SelfBudgeter's tolerance, tightened linearly over training (arXiv 2505.11274).

    Args:
      fraction: share of training done, in [0, 1].
      start: tolerance at 0, as a fraction of the declared budget.
      end: tolerance at 1.

    Returns:
      alpha.
    """
    return jnp.asarray(start + (end - start) * jnp.clip(fraction, 0.0, 1.0), jnp.float32)


def budget_match_reward(
    lengths: Num[Array, "*batch"],
    budgets: Num[Array, "*batch"],
    *,
    alpha: Scalar,
    best: Num[Array, "*batch"],
    low: Scalar,
    high: Scalar,
) -> Float[Array, "*batch"]:
    """Precise-budget reward of SelfBudgeter: how near the length is to the declared budget.

        low                                                          if |l - b| > alpha b
        low + (high - low) (1 + cos(pi |l - best| / (2 alpha b))) / 2    otherwise

    The published description gives the two ends and the best point; the cosine of width
    2 alpha b is the only one that starts at `high` in one end and reaches `low` in the other.

    Args:
      lengths: solution lengths l, in tokens.
      budgets: declared budgets b, in tokens.
      alpha: tolerance as a fraction of b (`alpha_schedule`).
      best: length that earns `high`, in tokens.
      low: reward at and beyond the far end.
      high: reward at `best`.

    Returns:
      Reward between `low` and `high`.
    """
    budgets = jnp.maximum(budgets, 1).astype(jnp.float32)
    # Lengths exactly at the tolerance count as inside; 1e-6 absorbs the rounding of alpha * b.
    inside = jnp.abs(lengths - budgets) <= (alpha + 1e-6) * budgets
    bend = jnp.cos(np.pi * jnp.minimum(jnp.abs(lengths - best) / (2.0 * alpha * budgets), 1.0))
    return jnp.where(inside, low + (high - low) * 0.5 * (1.0 + bend), low)


def selfbudgeter_reward(
    well_formed: Shaped[Array, "*batch"],
    correct: Shaped[Array, "*batch"],
    lengths: Num[Array, "*batch"],
    budgets: Num[Array, "*batch"],
    limits: Num[Array, "*batch"],
    *,
    alpha: Scalar,
    correct_range: tuple[float, float] = (0.5, 1.0),
    wrong_range: tuple[float, float] = (-0.5, 0.0),
    budget_penalty: float = -0.4,
    format_penalty: float = -1.0,
) -> Float[Array, "*batch"]:
    """Reward of SelfBudgeter (arXiv 2505.11274).

    Malformed responses get `format_penalty`. Others get `budget_match_reward`, best at
    (1 - alpha) b when correct and (1 + alpha) b when wrong, plus `budget_penalty` if the declared
    budget exceeds the question's limit. The constants keep the publication's constraint that a
    correct answer is never worse than a wrong one, correct_low + penalty >= wrong_high, but their
    values are not published in full: treat them as settings.

    Args:
      well_formed: the response could be parsed, 0/1 or boolean.
      correct: 0/1 or boolean.
      lengths: solution lengths in tokens.
      budgets: budgets that the responses declared, in tokens; anything where malformed.
      limits: length of the base model's response to the question if it was correct, else inf.
      alpha: tolerance (`alpha_schedule`).
      correct_range: (low, high) for correct responses.
      wrong_range: (low, high) for wrong ones.
      budget_penalty: added when the declared budget exceeds the limit, < 0.
      format_penalty: reward of malformed responses.

    Returns:
      Reward, float32.
    """
    chex.assert_equal_shape([well_formed, correct, lengths, budgets, limits])
    b = budgets.astype(jnp.float32)
    right = budget_match_reward(
        lengths, b, alpha=alpha, best=(1.0 - alpha) * b, low=correct_range[0], high=correct_range[1]
    )
    wrong = budget_match_reward(
        lengths, b, alpha=alpha, best=(1.0 + alpha) * b, low=wrong_range[0], high=wrong_range[1]
    )
    is_right = jnp.asarray(correct).astype(jnp.float32) > 0.5
    over = jnp.where(b > limits, budget_penalty, 0.0)
    parsed = jnp.asarray(well_formed).astype(bool)
    return jnp.where(parsed, jnp.where(is_right, right, wrong) + over, format_penalty)
