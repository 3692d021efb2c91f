"""Computes weights of difficulty groups and samples budgets, as specified by `budget.prior`.

Methods whose budgets follow `budget.prior` use these functions for the corresponding fields of
`Method`.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bacr_jax import curriculum
from bacr_jax.config.settings import MethodSettings
from bacr_jax.curriculum import CurriculumState
from bacr_jax.methods.grpo_family import by_size


def question_weights(
    config: MethodSettings, state: CurriculumState, sizes: Int[Array, "K"]
) -> Float[Array, "K"]:
    """Computes the sampling probability of each difficulty group (Eq. 6).

    Args:
      sizes: number of questions in each group.

    Returns:
      Probabilities that sum to 1. They are proportional to `sizes` if `budget.prior` is not
      "curriculum".
    """
    schedule = config.curriculum
    if config.budget.prior != "curriculum":
        return by_size(state, sizes)
    if not schedule.size_weighted:
        # Every nonempty group has size 1. Empty groups keep size 0, so they are never sampled.
        sizes = jnp.minimum(sizes, 1)
    return curriculum.group_weights(state.pass_rate, epsilon=schedule.weight_epsilon, sizes=sizes)


def budget_locations(config: MethodSettings, state: CurriculumState) -> Float[Array, "K"]:
    """Computes the location mu of the budget distribution of each difficulty group (Eq. 5).

    The budgets have a truncated normal distribution (Eq. 4). The location is in tokens.
    """
    schedule = config.curriculum
    budget = config.budget
    return curriculum.scheduled_mean(
        state,
        alpha=schedule.alpha,
        beta=schedule.beta,
        b_min=budget.min,
        b_max=budget.max,
        clip=schedule.clip_mu,
    )


def sample_budgets(
    config: MethodSettings, key: Array, state: CurriculumState, groups: Int[Array, "Q"]
) -> Int[Array, "Q G"]:
    """Samples a budget in tokens for each rollout from `budget.prior`.

    With the prior "curriculum", the distribution is defined by Eq. 4 and 5.

    Args:
      groups: difficulty group of each question.
    """
    budget = config.budget
    num_questions = groups.shape[0]
    group_size = config.rollout.group_size
    shape = (num_questions, group_size)
    if budget.prior == "fixed":
        return curriculum.fixed_budgets(budget.max, shape=shape)
    if budget.prior == "uniform":
        return curriculum.uniform_budgets(
            key, b_min=budget.min, b_max=budget.max, shape=shape, assign=budget.assign
        )
    if budget.prior == "choices":
        choices = jnp.array(config.budget_choices, jnp.int32)
        return curriculum.choice_budgets(key, choices, shape=shape, assign=budget.assign)
    return curriculum.sample_budgets(
        key,
        budget_locations(config, state),
        groups,
        sigma=config.curriculum.sigma,
        b_min=budget.min,
        b_max=budget.max,
        num_rollouts=group_size,
        assign=budget.assign,
    )
