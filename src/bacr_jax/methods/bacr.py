"""Budget-adaptive curriculum reasoning: four parts, each a switch of the config.

part                               switch
budget-conditioned unified policy  conditioning.enabled
curriculum-aware scheduler         budget.prior: curriculum | uniform | fixed
truncation-aware dense reward      reward.dense
budget-conditioned advantages      advantage.baseline: value | group | residual_loo | shrink
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bacr_jax import advantages, curriculum, rewards
from bacr_jax.config import Config
from bacr_jax.curriculum import CurriculumState
from bacr_jax.methods.method import Credit, Method


def make(config: Config) -> Method:
    """BACR with the parts that the config switches on."""
    weights = rewards.cut_weights(config.cuts.weights, config.cuts.count)
    coefficient = config.reward.coefficient if config.reward.dense else 0.0
    budget, schedule, advantage = config.budget, config.curriculum, config.advantage
    group_size = config.rollout.group_size

    def question_weights(state: CurriculumState, sizes: Int[Array, "K"]) -> Float[Array, "K"]:
        if budget.prior != "curriculum":
            return sizes / sizes.sum()
        return curriculum.group_weights(
            state.pass_rate,
            epsilon=schedule.weight_epsilon,
            sizes=sizes if schedule.size_weighted else jnp.minimum(sizes, 1),
        )

    def sample_budgets(
        key: Array, state: CurriculumState, groups: Int[Array, "Q"]
    ) -> Int[Array, "Q G"]:
        shape = (groups.shape[0], group_size)
        if budget.prior == "fixed":
            return curriculum.fixed_budgets(budget.max, shape=shape)
        if budget.prior == "uniform":
            return curriculum.uniform_budgets(
                key, b_min=budget.min, b_max=budget.max, shape=shape, assign=budget.assign
            )
        mu = curriculum.scheduled_mean(
            state,
            alpha=schedule.alpha,
            beta=schedule.beta,
            b_min=budget.min,
            b_max=budget.max,
            clip=schedule.clip_mu,
        )
        return curriculum.sample_budgets(
            key,
            mu,
            groups,
            sigma=schedule.sigma,
            b_min=budget.min,
            b_max=budget.max,
            num_rollouts=group_size,
            assign=budget.assign,
        )

    def cuts(budgets: Int[Array, "Q G"]) -> Int[Array, "Q G M"]:
        return rewards.cut_points(budgets, num_cuts=config.cuts.count)

    def dense(outcomes: Float[Array, "Q G M"]) -> Float[Array, "Q G M"]:
        return rewards.dense_reward(outcomes, coefficient=coefficient)

    def credit(
        outcomes: Float[Array, "Q G M"],
        reward: Float[Array, "Q G M"],
        values: Float[Array, "Q G M"] | None,
    ) -> Credit:
        if advantage.baseline == "group":
            baseline = jnp.broadcast_to(reward.mean(1, keepdims=True), reward.shape)
            expected = jnp.broadcast_to(outcomes.mean(1, keepdims=True), outcomes.shape)
        else:
            assert values is not None
            baseline = values
            if advantage.baseline == "residual_loo":
                baseline = advantages.residual_loo_baseline(reward, values, axis=1)
            elif advantage.baseline == "shrink":
                baseline = advantages.shrink_baseline(
                    reward,
                    values,
                    prior_strength=advantages.estimate_prior_strength(reward, values, axis=1),
                    axis=1,
                )
            expected = advantages.correctness_from_value(baseline, coefficient=coefficient)
        residual = advantages.bcae_advantage(reward, baseline)
        scale = advantages.advantage_scale(
            residual, mode=advantage.normalise, floor=advantage.floor
        )
        answers = advantages.answer_credit(
            outcomes,
            reward,
            baseline,
            expected,
            weights,
            coefficient=coefficient,
            mode=advantage.credit,
        )
        thinking = advantages.thinking_credit(residual, weights, mode=advantage.credit)
        return Credit(thinking=thinking / scale, answers=answers / scale, baseline=baseline)

    return Method(
        name="BACR",
        conditioned=config.conditioning.enabled,
        uses_value=advantage.baseline != "group",
        question_weights=question_weights,
        sample_budgets=sample_budgets,
        cuts=cuts,
        rewards=dense,
        advantages=credit,
    )
