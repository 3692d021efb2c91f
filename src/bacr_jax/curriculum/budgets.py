"""Thinking budgets of the G rollouts of every question (paper Eq. 4, and other priors)."""

from typing import Literal

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from bacr_jax.curriculum.truncnorm import truncnorm_ppf
from bacr_jax.types import Scalar

Assignment = Literal["independent", "shared", "stratified"]


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
    raise ValueError(f"assign: found {assign!r}; known are independent, shared and stratified")


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
      mu: location per group (`scheduled_mean`); it may lie outside [b_min, b_max], all in tokens.
      sigma: scale in tokens, > 0; scalar, or one per group.
      assign: "independent": G draws per question (paper). "shared": one draw for all G, which
        makes the plain group mean compare like with like. "stratified": one draw from each of
        the G quantile ranges, in random order.

    Returns:
      Budgets in [b_min, b_max], int32. Each is distributed as Eq. 4 whatever `assign` is.
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

    They are int32, in tokens. `assign` says how the rollouts of a question are coupled, see
    `sample_budgets`; ValueError: an unknown one.
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
      choices: budgets in tokens, ascending, so that "stratified" spreads over small and large.
    """
    chex.assert_rank(choices, 1)
    last = choices.shape[0] - 1
    index = jnp.floor(_uniforms(key, shape, assign) * choices.shape[0]).astype(jnp.int32)
    return choices[jnp.minimum(index, last)].astype(jnp.int32)


def fixed_budgets(budget: Scalar, *, shape: tuple[int, int]) -> Int[Array, "Q G"]:
    """The same budget everywhere, in tokens, int32 (GRPO and DAPO train at b_max)."""
    return jnp.full(shape, budget, jnp.int32)
