"""Budget-adaptive curriculum reasoning: four parts, each a switch of the config.

part                               switch
budget-conditioned unified policy  conditioning.enabled
curriculum-aware scheduler         budget.prior: curriculum | uniform | choices | fixed
truncation-aware dense reward      reward.dense
budget-conditioned advantages      advantage.baseline: value | group | residual_loo | shrink
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bacr_jax import advantages, curriculum, rewards
from bacr_jax.config import Config
from bacr_jax.curriculum import CurriculumState
from bacr_jax.methods.grpo_family import by_size
from bacr_jax.methods.method import Credit, Method, Observed

# Decay per iteration of the moments behind `shrink` and `history`: about the last ten count.
_MOMENT_DECAY = 0.9


def make(config: Config) -> Method:
    """BACR with the parts that the config switches on."""
    weights = rewards.cut_weights(config.cuts.weights, config.cuts.count)
    coefficient = config.reward.coefficient if config.reward.dense else 0.0
    budget, schedule, advantage = config.budget, config.curriculum, config.advantage
    group_size = config.rollout.group_size

    def question_weights(state: CurriculumState, sizes: Int[Array, "K"]) -> Float[Array, "K"]:
        if budget.prior != "curriculum":
            return by_size(state, sizes)
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
        if budget.prior == "choices":
            return curriculum.choice_budgets(
                key, jnp.array(budget.choices, jnp.int32), shape=shape, assign=budget.assign
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

    def dense(state: Any, seen: Observed) -> Float[Array, "Q G M"]:
        return rewards.dense_reward(seen.outcomes, coefficient=coefficient)

    def baselines(
        state: Any,
        seen: Observed,
        reward: Float[Array, "Q G M"],
        values: Float[Array, "Q G M"] | None,
    ) -> tuple[Float[Array, "Q G M"], Float[Array, "Q G M"]]:
        """What is subtracted from R, and the probability of a right answer that it implies."""
        if advantage.baseline == "group":
            of_group = lambda x: jnp.broadcast_to(x.mean(1, keepdims=True), x.shape)
            return of_group(reward), of_group(seen.outcomes)
        assert values is not None
        baseline = values
        if advantage.baseline == "residual_loo":
            baseline = advantages.residual_loo_baseline(reward, values, axis=1)
        elif advantage.baseline == "shrink":
            strength = advantages.prior_strength(state["sigma2"], state["error2"])
            baseline = advantages.shrink_baseline(reward, values, prior_strength=strength, axis=1)
        return baseline, advantages.correctness_from_value(baseline, coefficient=coefficient)

    def uncorrected(
        state: Any,
        seen: Observed,
        reward: Float[Array, "Q G M"],
        values: Float[Array, "Q G M"] | None,
    ) -> tuple[Float[Array, "Q G M"], Float[Array, "Q G M"]]:
        """Credit of the thinking before the history correction, and the surprise it would use."""
        baseline, expected = baselines(state, seen, reward, values)
        residual = advantages.bcae_advantage(reward, baseline)
        thinking = advantages.thinking_credit(residual, weights, mode=advantage.credit)
        return thinking, advantages.history_surprise(seen.outcomes, expected)

    def credit(
        state: Any,
        seen: Observed,
        reward: Float[Array, "Q G M"],
        values: Float[Array, "Q G M"] | None,
    ) -> Credit:
        baseline, expected = baselines(state, seen, reward, values)
        residual = advantages.bcae_advantage(reward, baseline)
        scale = advantages.advantage_scale(
            residual, mode=advantage.normalise, floor=advantage.floor
        )
        answers = advantages.answer_credit(
            seen.outcomes,
            reward,
            baseline,
            expected,
            weights,
            coefficient=coefficient,
            mode=advantage.credit,
        )
        thinking, surprise = uncorrected(state, seen, reward, values)
        if advantage.history:
            slope = state["slope_xy"] / jnp.maximum(state["slope_xx"], 1e-6)
            thinking = advantages.history_advantage(thinking, surprise, slope)
        return Credit(thinking=thinking / scale, answers=answers / scale, baseline=baseline)

    def init_state(num_questions: int) -> dict[str, Array] | None:
        state: dict[str, Array] = {}
        if advantage.baseline == "shrink":
            # n0 = 0: until V's error is measured, the other traces alone are trusted.
            state |= {"sigma2": jnp.float32(0.0), "error2": jnp.float32(1e-6)}
        if advantage.history:
            zeros = jnp.zeros(config.cuts.count, jnp.float32)
            state |= {"slope_xy": zeros, "slope_xx": zeros}
        return state or None

    def update(
        state: dict[str, Array] | None,
        seen: Observed,
        reward: Float[Array, "Q G M"],
        values: Float[Array, "Q G M"] | None,
    ) -> dict[str, Array] | None:
        measured: dict[str, Array] = {}
        if advantage.baseline == "shrink":
            assert values is not None
            moments = advantages.residual_moments(reward, values, axis=1)
            measured |= dict(zip(("sigma2", "error2"), moments))
        if advantage.history:
            moments = advantages.history_moments(*uncorrected(state, seen, reward, values))
            measured |= dict(zip(("slope_xy", "slope_xx"), moments))
        if state is None:
            return None
        blend = lambda old, new: _MOMENT_DECAY * old + (1.0 - _MOMENT_DECAY) * new
        return jax.tree.map(blend, state, measured)

    def metrics(state: dict[str, Array] | None, seen: Observed) -> dict[str, Array]:
        found = {}
        if advantage.baseline == "shrink":
            assert state is not None
            found["advantage/prior_strength"] = advantages.prior_strength(
                state["sigma2"], state["error2"]
            )
        if advantage.history:
            assert state is not None
            slope = state["slope_xy"] / jnp.maximum(state["slope_xx"], 1e-6)
            found["advantage/history_slope"] = slope[1:].mean() if len(slope) > 1 else slope.mean()
        return found

    return Method(
        name="BACR",
        conditioned=config.conditioning.enabled,
        uses_value=advantage.baseline != "group",
        question_weights=question_weights,
        sample_budgets=sample_budgets,
        cuts=cuts,
        rewards=dense,
        advantages=credit,
        init_state=init_state,
        update=update,
        metrics=metrics,
    )
