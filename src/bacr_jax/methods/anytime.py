"""AnytimeReasoner (arXiv 2505.13438): one trace, scored at every budget of a grid.

The policy is not told a budget. Budget-relative policy optimisation (BRPO) compares a trace with
its own earlier outcomes (V1) and with its group (V2); `anytime.baseline: v2` keeps the group alone,
which is how the method is sometimes described, and is labelled so.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bacr_jax import curriculum
from bacr_jax import rewards as cutting
from bacr_jax.config import Config
from bacr_jax.curriculum import CurriculumState
from bacr_jax.methods import baselines
from bacr_jax.methods.grpo_family import by_size
from bacr_jax.methods.method import Credit, Method, Observed

_NAMES = {
    "brpo": "AnytimeReasoner",
    "v1": "AnytimeReasoner, V1 alone",
    "v2": "AnytimeReasoner, simplified BRPO",
    "none": "AnytimeReasoner, no baseline",
}


def make(config: Config) -> Method:
    """BRPO on `cuts.count` even budgets up to the largest, several answers at each."""
    settings = config.anytime
    grid = cutting.cut_points(jnp.int32(config.budget.max), num_cuts=config.cuts.count)
    prior = baselines.brpo_prior(settings.prior, grid)
    # The published answer gradient weighs budgets alike whatever the thinking's prior is.
    answer_prior = baselines.brpo_prior(settings.answer_prior, grid) * grid.shape[0]

    def sample_budgets(
        key: Array, state: CurriculumState, groups: Int[Array, "Q"]
    ) -> Int[Array, "Q G"]:
        shape = (groups.shape[0], config.rollout.group_size)
        return curriculum.fixed_budgets(config.budget.max, shape=shape)

    def cuts(budgets: Int[Array, "Q G"]) -> Int[Array, "Q G M"]:
        return jnp.broadcast_to(grid, (*budgets.shape, grid.shape[0]))

    def rewards(state: Any, seen: Observed) -> Float[Array, "Q G M"]:
        return seen.outcomes

    def credit(
        state: Any,
        seen: Observed,
        reward: Float[Array, "Q G M"],
        values: Float[Array, "Q G M"] | None,
    ) -> Credit:
        answers = baselines.answer_advantage(seen.by_answer) * answer_prior[:, None]
        return Credit(
            thinking=baselines.brpo_advantage(
                reward, prior, mode=settings.baseline, loo=settings.loo
            ),
            answers=answers,
            baseline=jnp.broadcast_to(reward.mean(1, keepdims=True), reward.shape),
        )

    def metrics(state: Any, seen: Observed) -> dict[str, Array]:
        return {
            "anytime/accuracy": seen.outcomes.mean(),
            "anytime/objective": (seen.outcomes * prior).sum(-1).mean(),
        }

    return Method(
        name=_NAMES[settings.baseline],
        conditioned=False,
        uses_value=False,
        question_weights=by_size,
        sample_budgets=sample_budgets,
        cuts=cuts,
        rewards=rewards,
        advantages=credit,
        metrics=metrics,
        answers=settings.answers,
        loss={"aggregate": "constant", "kl_coef": 0.0},
    )
