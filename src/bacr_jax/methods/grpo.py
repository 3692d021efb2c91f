"""GRPO at a fixed budget (arXiv 2402.03300): one outcome per trace, group-normalised advantages."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bacr_jax import advantages, curriculum
from bacr_jax.config import Config
from bacr_jax.curriculum import CurriculumState
from bacr_jax.methods.method import Credit, Method


def make(config: Config) -> Method:
    """Every trace gets the largest budget and one outcome, which all its tokens share."""
    group_size = config.rollout.group_size

    def question_weights(state: CurriculumState, sizes: Int[Array, "K"]) -> Float[Array, "K"]:
        return sizes / sizes.sum()

    def sample_budgets(
        key: Array, state: CurriculumState, groups: Int[Array, "Q"]
    ) -> Int[Array, "Q G"]:
        return curriculum.fixed_budgets(config.budget.max, shape=(groups.shape[0], group_size))

    def cuts(budgets: Int[Array, "Q G"]) -> Int[Array, "Q G M"]:
        return budgets[..., None]

    def rewards(outcomes: Float[Array, "Q G M"]) -> Float[Array, "Q G M"]:
        return outcomes

    def credit(
        outcomes: Float[Array, "Q G M"],
        reward: Float[Array, "Q G M"],
        values: Float[Array, "Q G M"] | None,
    ) -> Credit:
        advantage = advantages.grpo_advantage(reward[..., 0])[..., None]
        baseline = jnp.broadcast_to(reward.mean(1, keepdims=True), reward.shape)
        return Credit(thinking=advantage, answers=advantage, baseline=baseline)

    return Method(
        name="GRPO",
        conditioned=False,
        uses_value=False,
        question_weights=question_weights,
        sample_budgets=sample_budgets,
        cuts=cuts,
        rewards=rewards,
        advantages=credit,
    )
