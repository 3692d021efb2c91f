"""Samples thinking budgets of the G rollouts of each question (paper Eq. 4 and other priors)."""

from collections.abc import Sequence
from typing import Literal

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from bacr_jax.curriculum.truncnorm import truncnorm_ppf
from bacr_jax.static_arguments import static_arguments
from bacr_jax.types import Scalar

Assignment = Literal["independent", "shared", "stratified"]


def _uniforms(key: PRNGKeyArray, shape: tuple[int, int], assign: str) -> Array:
    """Samples uniform numbers in [0, 1) for Q questions x G rollouts.

    Args:
      assign: dependence between the rollouts of a question (see `sample_budgets`).

    Raises:
      ValueError: If `assign` is unknown.
    """
    questions, rollouts = shape
    if assign == "independent":
        return jax.random.uniform(key, shape)
    if assign == "shared":
        one_per_question = jax.random.uniform(key, (questions, 1))
        return jnp.broadcast_to(one_per_question, shape)
    if assign == "stratified":
        jitter_key, order_key = jax.random.split(key)
        jitter = jax.random.uniform(jitter_key, shape)
        # Shuffle the strata, because otherwise rollout 0 would always get the smallest budget.
        stratum = jnp.argsort(jax.random.uniform(order_key, shape), axis=-1)
        below_one = 1.0 - jnp.finfo(jnp.float32).epsneg
        return jnp.minimum((stratum + jitter) / rollouts, below_one)
    raise ValueError(
        f"budgets must be assigned independent, shared or stratified, but `assign` is {assign!r}"
    )


@static_arguments("num_rollouts", "assign")
def sample_budgets(
    key: PRNGKeyArray,
    mu: Float[Array | np.ndarray, "K"] | Sequence[float],
    group: Int[Array | np.ndarray, "Q"] | Sequence[int],
    *,
    sigma: Scalar,
    b_min: Scalar,
    b_max: Scalar,
    num_rollouts: int,
    assign: Assignment = "independent",
) -> Int[Array, "Q G"]:
    """Samples the thinking budgets of G rollouts per question (paper Eq. 4).

        b ~ TruncNorm(mu_k, sigma_k^2; b_min, b_max), rounded to whole tokens

    Args:
      mu: location per difficulty group, in tokens (`scheduled_mean`). It may lie outside [b_min,
        b_max].
      group: difficulty group of each question.
      sigma: scale in tokens, > 0. Either a scalar or one value per group.
      b_min: smallest budget, in tokens.
      b_max: largest budget, in tokens.
      assign: "independent" samples G budgets per question, as in the paper. "shared" uses one
        sample for all G rollouts, so that the group mean compares traces with equal budgets.
        "stratified" samples one budget from each of G equally likely quantile ranges, in random
        order.

    Returns:
      Budgets in [b_min, b_max], int32. The marginal distribution of each budget is Eq. 4 for every
      `assign`.

    Raises:
      ValueError: If `assign` is unknown.
    """
    mu = jnp.asarray(mu)
    group = jnp.asarray(group)
    chex.assert_rank([mu, group], 1)
    num_questions = group.shape[0]
    u = _uniforms(key, (num_questions, num_rollouts), assign)
    sigma_of_group = jnp.broadcast_to(jnp.asarray(sigma, jnp.float32), mu.shape)
    location = mu[group][:, None]
    scale = sigma_of_group[group][:, None]
    budgets = truncnorm_ppf(u, location, scale, b_min, b_max)
    return jnp.clip(jnp.round(budgets), b_min, b_max).astype(jnp.int32)


@static_arguments("shape", "assign")
def uniform_budgets(
    key: PRNGKeyArray,
    *,
    b_min: Scalar,
    b_max: Scalar,
    shape: tuple[int, int],
    assign: Assignment = "independent",
) -> Int[Array, "Q G"]:
    """Samples thinking budgets uniformly from the integers in [b_min, b_max].

    The budgets do not depend on the question or its difficulty.

    Args:
      b_min: smallest budget, in tokens.
      b_max: largest budget, in tokens.
      shape: number of questions Q and of rollouts per question G.
      assign: dependence between the rollouts of a question (see `sample_budgets`).

    Returns:
      Budgets in tokens, int32.

    Raises:
      ValueError: If `assign` is unknown.
    """
    num_budgets = b_max - b_min + 1
    steps = jnp.floor(_uniforms(key, shape, assign) * num_budgets).astype(jnp.int32)
    return jnp.clip(b_min + steps, b_min, b_max).astype(jnp.int32)


@static_arguments("shape", "assign")
def choice_budgets(
    key: PRNGKeyArray,
    choices: Int[Array | np.ndarray, "n"] | Sequence[int],
    *,
    shape: tuple[int, int],
    assign: Assignment = "independent",
) -> Int[Array, "Q G"]:
    """Samples budgets uniformly from a list, the discrete prior of AnytimeReasoner.

    Sampling from a range rarely produces budgets near the ends of the range. With a list, the
    policy only trains at the budgets that users will choose.

    Args:
      choices: budgets in tokens, sorted in ascending order, so that "stratified" covers small and
        large budgets.
      shape: number of questions Q and of rollouts per question G.
      assign: dependence between the rollouts of a question (see `sample_budgets`).

    Returns:
      Budgets in tokens, int32.

    Raises:
      ValueError: If `assign` is unknown.
    """
    choices = jnp.asarray(choices)
    chex.assert_rank(choices, 1)
    num_choices = choices.shape[0]
    index = jnp.floor(_uniforms(key, shape, assign) * num_choices).astype(jnp.int32)
    return choices[jnp.minimum(index, num_choices - 1)].astype(jnp.int32)


def stage_limit(fractions: Sequence[float], *, step: int, total_steps: int, b_max: int) -> int:
    """Returns the largest budget of a training step, if training consists of equally long stages.

        limit = round(f_s b_max), at least 1,  s = floor(n step / total_steps)

    s is the index of the stage. For example, ThinkPrune (arXiv 2504.01296) trains in stages, each
    with a smaller token limit than the stage before: 4,000 tokens, then 3,000, and so on.

    Args:
      fractions: largest budget f of each of the n stages, as a fraction of `b_max`.
      step: number of steps before this step.
      total_steps: number of steps of the whole run.
      b_max: largest budget of the run, in tokens.
    """
    num_stages = len(fractions)
    stage = min(num_stages * step // total_steps, num_stages - 1)
    return max(round(fractions[stage] * b_max), 1)


@static_arguments("shape")
def fixed_budgets(budget: Scalar, *, shape: tuple[int, int]) -> Int[Array, "Q G"]:
    """Returns the same budget in tokens (int32) for all rollouts, such as b_max in GRPO."""
    return jnp.full(shape, budget, jnp.int32)
