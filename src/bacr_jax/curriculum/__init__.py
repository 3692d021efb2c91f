"""Curriculum-aware budgets: which questions to ask, and how many tokens to give them.

One iteration of the schedule, for K difficulty groups:

    weights = group_weights(state.pass_rate)                              # Eq. 6
    index   = sample_questions(key, weights, group_of, num=Q)
    mu      = scheduled_mean(state, alpha=.6, beta=.3, b_min=256, b_max=4096)   # Eq. 5
    budgets = sample_budgets(key, mu, group_of[index], ...)               # Eq. 4
    ...                                                                   # roll out, grade
    state   = record_outcomes(state, group_of[index], correct, ema_decay=.9)
    state   = update_pass_rates(state, source="ema")                      # every few steps

The schedule knows nothing about where outcomes come from. Fed with the training rollouts it
follows the policy as it trains, at the budgets that the schedule itself chose; fed with the
outcomes of a fixed set of probe questions at a fixed budget, through the same two functions, it is
free of that feedback. `difficulty.DifficultyPosterior` gives a rate per problem instead
of per group; every function here that takes a `[K]` array takes those `[n]` arrays too.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num, PRNGKeyArray

from bacr_jax.curriculum.truncnorm import truncated_normal as truncated_normal
from bacr_jax.curriculum.truncnorm import truncnorm_mean as truncnorm_mean
from bacr_jax.curriculum.truncnorm import truncnorm_ppf as truncnorm_ppf
from bacr_jax.errors import UserError
from bacr_jax.types import pytree

Scalar = int | float | Array
Assignment = Literal["independent", "shared", "stratified"]

# Evidence of Beta(1, 1), the uniform prior over a pass rate: one success and one failure.
_PRIOR_COUNT = 2.0


@pytree
class CurriculumState:
    """What the schedule remembers about K difficulty groups.

    Attributes:
      mu0: budget location before the first update, mu_k(0) of Eq. 5, in tokens.
      pass_rate: rho_k, the rates that Eq. 5 and 6 use; they only move at an update.
      ema_rate: running estimate of the pass rate, moved by every batch.
      correct: correct rollouts since the last update (fractional when an outcome is a mean).
      seen: rollouts since the last update.
      updates: number of updates done; while it is 0 the location is mu0.
    """

    mu0: Float[Array, "K"]
    pass_rate: Float[Array, "K"]
    ema_rate: Float[Array, "K"]
    correct: Float[Array, "K"]
    seen: Float[Array, "K"]
    updates: Int[Array, ""]


def init_curriculum(num_groups: int, *, mu0: float | Sequence[float]) -> CurriculumState:
    """State before any outcome: every pass rate is 1/2, the mean of Beta(1, 1).

    Args:
      num_groups: number of difficulty groups K, at least 1.
      mu0: initial budget location in tokens, one for all groups or one per group.

    Returns:
      The state, with no outcomes recorded and no update done.

    Raises:
      UserError: a list of `mu0` whose length is not `num_groups`, or a location below 0.
    """
    locations = jnp.asarray(mu0, jnp.float32)
    if locations.ndim == 1 and locations.shape[0] != num_groups:
        raise UserError(
            f"curriculum mu0: found {locations.shape[0]} values for {num_groups} difficulty "
            "groups; write one number, or one per group"
        )
    if bool(jnp.any(locations <= 0.0)):
        raise UserError(f"curriculum mu0: found {mu0}; write positive numbers of tokens")
    zeros = jnp.zeros(num_groups, jnp.float32)
    return CurriculumState(
        mu0=jnp.broadcast_to(locations, (num_groups,)),
        pass_rate=zeros + 0.5,
        ema_rate=zeros + 0.5,
        correct=zeros,
        seen=zeros,
        updates=jnp.zeros((), jnp.int32),
    )


def budget_mean(
    pass_rate: Float[Array, "K"],
    mu0: Float[Array, "K"] | Scalar,
    *,
    alpha: Scalar,
    beta: Scalar,
    b_min: Scalar,
    b_max: Scalar,
    clip: bool = True,
) -> Float[Array, "K"]:
    """Location of each group's budget distribution, paper Eq. 5.

        mu_k = mu_k(0) (1 - alpha rho_k) + beta (1 - rho_k) b_max

    It falls linearly from mu_k(0) + beta b_max at rho = 0 to (1 - alpha) mu_k(0) at rho = 1; both
    ends can lie outside the budget range, hence `clip`. It is the location of Eq. 4, not its mean:
    see `truncnorm_mean`.

    Args:
      pass_rate: rho, one per group (or per problem), in [0, 1].
      mu0: mu(0) in tokens, scalar or one per group.
      alpha: how much a high pass rate shortens budgets.
      beta: how much a low pass rate lengthens them, as a fraction of `b_max`.
      b_min: smallest budget, in tokens.
      b_max: largest budget, in tokens.
      clip: keep the location inside [b_min, b_max]; False is Eq. 5 to the letter.

    Returns:
      mu in tokens.
    """
    chex.assert_rank(pass_rate, 1)
    mu = mu0 * (1.0 - alpha * pass_rate) + beta * (1.0 - pass_rate) * b_max
    return jnp.clip(mu, b_min, b_max) if clip else mu


def scheduled_mean(
    state: CurriculumState,
    *,
    alpha: Scalar,
    beta: Scalar,
    b_min: Scalar,
    b_max: Scalar,
    clip: bool = True,
) -> Float[Array, "K"]:
    """Location of the budget distribution now: mu_k(0) until the first update, then Eq. 5.

    Eq. 5 does not return mu_k(0) for any pass rate in general, so the first period, in which
    nothing has been measured, is a case of its own.

    Args:
      state: the schedule.
      alpha: see `budget_mean`.
      beta: see `budget_mean`.
      b_min: smallest budget, in tokens.
      b_max: largest budget, in tokens.
      clip: keep the location, the initial one included, inside [b_min, b_max].

    Returns:
      mu in tokens.
    """
    adapted = budget_mean(
        state.pass_rate, state.mu0, alpha=alpha, beta=beta, b_min=b_min, b_max=b_max, clip=clip
    )
    initial = jnp.clip(state.mu0, b_min, b_max) if clip else state.mu0
    return jnp.where(state.updates == 0, initial, adapted)


def _normalised(weights: Array, allowed: Array) -> Array:
    """Weights scaled to sum to 1 over the allowed entries; uniform over these if all are zero."""
    weights = jnp.where(allowed, weights, 0.0)
    total = jnp.sum(weights)
    uniform = allowed / jnp.maximum(jnp.sum(allowed), 1)
    return jnp.where(total > 0.0, weights / jnp.where(total > 0.0, total, 1.0), uniform)


def group_weights(
    pass_rate: Float[Array, "K"],
    *,
    epsilon: Scalar = 0.02,
    sizes: Num[Array, "K"] | None = None,
) -> Float[Array, "K"]:
    """Probability of drawing a question from each group, paper Eq. 6 plus a floor.

        w_k ~ rho_k (1 - rho_k) + epsilon

    Without the floor a group at 0 or 1 is never drawn again, so its rate can never be seen to
    change, and with all groups there the weights are 0/0. The weight is largest at rho = 1/2; note
    that a group of half solved and half impossible problems sits there too (see
    `problem_weights`).

    Args:
      pass_rate: rho, one per group, in [0, 1].
      epsilon: the floor, before normalising; 0 is Eq. 6 to the letter.
      sizes: number of questions per group; multiplies the weights, so that every question of
        a group, rather than every group, counts alike. Groups of size 0 get weight 0.

    Returns:
      Probabilities summing to 1; uniform over the (nonempty) groups if all weights are 0.
    """
    chex.assert_rank(pass_rate, 1)
    weights = pass_rate * (1.0 - pass_rate) + epsilon
    if sizes is None:
        return _normalised(weights, jnp.ones_like(weights, bool))
    chex.assert_equal_shape([pass_rate, sizes])
    return _normalised(weights * sizes, sizes > 0)


def problem_weights(
    pass_rate: Float[Array, "n"],
    group_of: Int[Array, "n"],
    *,
    num_groups: int,
    epsilon: Scalar = 0.02,
    size_weighted: bool = False,
) -> Float[Array, "K"]:
    """Group probabilities from the spread inside problems rather than inside groups.

        w_k ~ mean_{i in k} p_i (1 - p_i) + epsilon

    Unlike Eq. 6, a group whose problems are each always or never solved, whatever their average,
    gets no more than the floor: rollouts of such problems carry no group-relative signal.

    Args:
      pass_rate: p, one per problem, in [0, 1].
      group_of: group of each problem, in [0, num_groups).
      num_groups: number of groups K.
      epsilon: the floor, before normalising.
      size_weighted: multiply by the number of problems.

    Returns:
      Probabilities summing to 1, 0 for groups without problems.
    """
    chex.assert_rank([pass_rate, group_of], 1)
    sizes = jnp.bincount(group_of, length=num_groups)
    spread = jax.ops.segment_sum(pass_rate * (1.0 - pass_rate), group_of, num_groups)
    weights = spread / jnp.maximum(sizes, 1) + epsilon
    return _normalised(weights * sizes if size_weighted else weights, sizes > 0)


def _uniforms(key: PRNGKeyArray, shape: tuple[int, int], assign: str) -> Array:
    """Uniform [0, 1) numbers for Q questions x G rollouts, independent or coupled in a question."""
    questions, rollouts = shape
    if assign == "independent":
        return jax.random.uniform(key, shape)
    if assign == "shared":
        return jnp.broadcast_to(jax.random.uniform(key, (questions, 1)), shape)
    if assign == "stratified":
        jitter_key, order_key = jax.random.split(key)
        jitter = jax.random.uniform(jitter_key, shape)
        # Which rollout gets which stratum must be random, or rollout 0 is always the shortest.
        stratum = jnp.argsort(jax.random.uniform(order_key, shape), axis=-1)
        below_one = 1.0 - jnp.finfo(jnp.float32).epsneg
        return jnp.minimum((stratum + jitter) / rollouts, below_one)
    raise UserError(f"budget.assign: found {assign!r}; write independent, shared or stratified")


def sample_budgets(
    key: PRNGKeyArray,
    mu: Float[Array, "K"],
    group: Int[Array, "Q"],
    *,
    sigma: Scalar,
    b_min: Scalar,
    b_max: Scalar,
    num_rollouts: int,
    assign: Assignment = "independent",
) -> Int[Array, "Q G"]:
    """Thinking budgets of G rollouts per question, paper Eq. 4.

        b ~ TruncNorm(mu_k, sigma_k^2; b_min, b_max), rounded to whole tokens

    Args:
      key: PRNG key.
      mu: location per group in tokens (`scheduled_mean`); may lie outside [b_min, b_max].
      group: group of each question, in [0, K).
      sigma: scale in tokens, > 0; scalar, or one per group.
      b_min: smallest budget, in tokens.
      b_max: largest budget, in tokens.
      num_rollouts: rollouts per question G.
      assign: "independent": G draws per question (paper). "shared": one draw for all G, which
        makes the plain group mean compare like with like. "stratified": one draw from each of
        the G quantile ranges, in random order.

    Returns:
      Budgets in [b_min, b_max], int32. Each is distributed as Eq. 4 whatever `assign` is.

    Raises:
      UserError: an unknown `assign`.
    """
    chex.assert_rank([mu, group], 1)
    u = _uniforms(key, (group.shape[0], num_rollouts), assign)
    scale = jnp.broadcast_to(jnp.asarray(sigma, jnp.float32), mu.shape)
    location = mu[group][:, None]
    budgets = truncnorm_ppf(u, location, scale[group][:, None], b_min, b_max)
    return jnp.clip(jnp.round(budgets), b_min, b_max).astype(jnp.int32)


def uniform_budgets(
    key: PRNGKeyArray,
    *,
    b_min: Scalar,
    b_max: Scalar,
    shape: tuple[int, int],
    assign: Assignment = "independent",
) -> Int[Array, "Q G"]:
    """Budgets uniform over the whole numbers of [b_min, b_max]: a prior without a curriculum.

    Args:
      key: PRNG key.
      b_min: smallest budget, in tokens.
      b_max: largest budget, in tokens.
      shape: (Q questions, G rollouts).
      assign: how the rollouts of a question are coupled, see `sample_budgets`.

    Returns:
      Budgets, int32.

    Raises:
      UserError: an unknown `assign`.
    """
    steps = jnp.floor(_uniforms(key, shape, assign) * (b_max - b_min + 1)).astype(jnp.int32)
    return jnp.clip(b_min + steps, b_min, b_max).astype(jnp.int32)


def choice_budgets(
    key: PRNGKeyArray,
    choices: Int[Array, "n"],
    *,
    shape: tuple[int, int],
    assign: Assignment = "independent",
) -> Int[Array, "Q G"]:
    """Budgets drawn equally often from a list: the discrete prior of AnytimeReasoner.

    Over a range, budgets near its ends are rare; a list trains at just those that will be asked.

    Args:
      key: PRNG key.
      choices: budgets in tokens, ascending, so that "stratified" spreads over small and large.
      shape: (Q questions, G rollouts).
      assign: how the rollouts of a question are coupled, see `sample_budgets`.

    Returns:
      Budgets, int32.

    Raises:
      UserError: an unknown `assign`.
    """
    chex.assert_rank(choices, 1)
    last = choices.shape[0] - 1
    index = jnp.floor(_uniforms(key, shape, assign) * choices.shape[0]).astype(jnp.int32)
    return choices[jnp.minimum(index, last)].astype(jnp.int32)


def fixed_budgets(budget: Scalar, *, shape: tuple[int, int]) -> Int[Array, "Q G"]:
    """The same budget everywhere (GRPO and DAPO train at b_max).

    Args:
      budget: tokens.
      shape: (Q questions, G rollouts).

    Returns:
      Budgets, int32.
    """
    return jnp.full(shape, budget, jnp.int32)


def record_outcomes(
    state: CurriculumState,
    group: Int[Array, "Q"],
    correct: Float[Array, "Q G"],
    *,
    ema_decay: Scalar,
) -> CurriculumState:
    """Counts a batch of outcomes and moves the running pass rates towards it.

    With c correct among n rollouts of a group in this batch, and m its running rate,

        m <- d m + (1 - d) (c + 2 m) / (n + 2)

    The batch's rate is smoothed by the weight of a Beta(1, 1) prior, two pseudo-rollouts, centred
    on what is believed so far. From the initial m = 1/2 that is the Beta(1, 1) posterior mean;
    later it does not drag the rate back to 1/2; a group without rollouts keeps its rate exactly.

    Args:
      state: the schedule.
      group: group of each question, in [0, K).
      correct: outcome of each rollout at its full budget (paper: r(q, t_{:b})), 0/1 or a mean
        over several answers; or the outcomes of a probe set.
      ema_decay: d, in [0, 1), per call.

    Returns:
      The state with counts and running rates moved; `pass_rate` is untouched.
    """
    chex.assert_rank([group, correct], [1, 2])
    chex.assert_equal_shape_prefix([group, correct], 1)
    num_groups = state.mu0.shape[0]
    right = jax.ops.segment_sum(jnp.sum(correct, axis=1), group, num_groups)
    rollouts = jax.ops.segment_sum(
        jnp.full(group.shape, correct.shape[1], jnp.float32), group, num_groups
    )
    smoothed = (right + _PRIOR_COUNT * state.ema_rate) / (rollouts + _PRIOR_COUNT)
    moved = ema_decay * state.ema_rate + (1.0 - ema_decay) * smoothed
    return dataclasses.replace(
        state,
        correct=state.correct + right,
        seen=state.seen + rollouts,
        ema_rate=jnp.where(rollouts > 0.0, moved, state.ema_rate),
    )


def update_pass_rates(
    state: CurriculumState, *, source: Literal["ema", "epoch"]
) -> CurriculumState:
    """Hands the measured rates to the schedule (the last line of the paper's Algorithm 1).

    Args:
      state: the schedule.
      source: "ema" takes the smoothed running rates, which are never exactly 0 or 1. "epoch"
        takes correct / seen since the last update (paper); groups without rollouts keep theirs.

    Returns:
      The state with new `pass_rate`, counts cleared and one more update.

    Raises:
      UserError: an unknown `source`.
    """
    if source == "ema":
        rate = state.ema_rate
    elif source == "epoch":
        measured = state.correct / jnp.maximum(state.seen, 1.0)
        rate = jnp.where(state.seen > 0.0, measured, state.pass_rate)
    else:
        raise UserError(f"curriculum.pass_rate: found {source!r}; write ema or epoch")
    zeros = jnp.zeros_like(state.seen)
    return dataclasses.replace(
        state, pass_rate=rate, correct=zeros, seen=zeros, updates=state.updates + 1
    )


def sample_groups(key: PRNGKeyArray, weights: Float[Array, "K"], num: int) -> Int[Array, "num"]:
    """Draws groups (or problems) with the given weights, with replacement.

    Args:
      key: PRNG key.
      weights: nonnegative, not all zero; need not sum to 1. Weight 0 is never drawn.
      num: number of draws.

    Returns:
      Group indices, int32.
    """
    chex.assert_rank(weights, 1)
    return jax.random.categorical(key, jnp.log(weights), shape=(num,)).astype(jnp.int32)


def sample_questions(
    key: PRNGKeyArray, weights: Float[Array, "K"], group_of: Int[Array, "n"], num: int
) -> Int[Array, "num"]:
    """Draws questions: a group by weight, then one of its questions uniformly.

    Drawing is with replacement and its probabilities are not corrected for in the loss, so the
    weights shape the objective, as in the paper.

    Args:
      key: PRNG key.
      weights: group probabilities (`group_weights`); a group without questions is passed over.
      group_of: group of each question, in [0, K).
      num: number of draws.

    Returns:
      Question indices in [0, n), int32.
    """
    chex.assert_rank([weights, group_of], 1)
    sizes = jnp.bincount(group_of, length=weights.shape[0])
    group_key, member_key = jax.random.split(key)
    groups = sample_groups(group_key, _normalised(weights, sizes > 0), num)
    rank = jax.random.randint(member_key, (num,), 0, sizes[groups])
    by_group = jnp.argsort(group_of, stable=True)
    first = jnp.cumsum(sizes) - sizes
    return by_group[first[groups] + rank].astype(jnp.int32)
