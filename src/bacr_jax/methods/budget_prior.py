"""What a config asks to be sampled: difficulty groups of questions, and budgets."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bacr_jax import curriculum
from bacr_jax.config import Config, derived
from bacr_jax.curriculum import CurriculumState
from bacr_jax.methods.grpo_family import by_size


def question_weights(
    config: Config, state: CurriculumState, sizes: Int[Array, "K"]
) -> Float[Array, "K"]:
    """Probability of each difficulty group (Eq. 6)."""
    schedule = config.curriculum
    if config.budget.prior != "curriculum":
        return by_size(state, sizes)
    return curriculum.group_weights(
        state.pass_rate,
        epsilon=schedule.weight_epsilon,
        sizes=sizes if schedule.size_weighted else jnp.minimum(sizes, 1),
    )


def budget_locations(config: Config, state: CurriculumState) -> Float[Array, "K"]:
    """Mu of each difficulty group's truncated normal now, in tokens (Eq. 5)."""
    schedule, budget = config.curriculum, config.budget
    return curriculum.scheduled_mean(
        state,
        alpha=schedule.alpha,
        beta=schedule.beta,
        b_min=budget.min,
        b_max=budget.max,
        clip=schedule.clip_mu,
    )


def sample_budgets(
    config: Config, key: Array, state: CurriculumState, groups: Int[Array, "Q"]
) -> Int[Array, "Q G"]:
    """Budgets from the prior; under the curriculum, Eq. 4 and 5."""
    budget, schedule = config.budget, config.curriculum
    shape = (groups.shape[0], config.rollout.group_size)
    if budget.prior == "fixed":
        return curriculum.fixed_budgets(budget.max, shape=shape)
    if budget.prior == "uniform":
        return curriculum.uniform_budgets(
            key, b_min=budget.min, b_max=budget.max, shape=shape, assign=budget.assign
        )
    if budget.prior == "choices":
        return curriculum.choice_budgets(
            key, jnp.array(derived.drawn(config), jnp.int32), shape=shape, assign=budget.assign
        )
    mu = budget_locations(config, state)
    return curriculum.sample_budgets(
        key,
        mu,
        groups,
        sigma=schedule.sigma,
        b_min=budget.min,
        b_max=budget.max,
        num_rollouts=shape[1],
        assign=budget.assign,
    )
