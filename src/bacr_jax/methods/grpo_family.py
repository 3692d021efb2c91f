"""Contains the shared parts of the training methods, in particular of GRPO and its variants.

The variants of GRPO have a single budget, and one outcome and one advantage per trace. They differ
in the reward of a trace and in how rewards are turned into advantages. The function `grpo_family`
builds all other parts of such a method.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bacr_jax import curriculum, rewards
from bacr_jax.advantages import group_advantage, grpo_advantage
from bacr_jax.config.settings import MethodSettings
from bacr_jax.config.values import written
from bacr_jax.curriculum import CurriculumState
from bacr_jax.methods.method import Advantages, GroupBatch, Method, PerCut, Published

TraceRewards = Callable[[Any, GroupBatch], Float[Array, "Q G"]]
SampleBudgets = Callable[[Array, CurriculumState, Int[Array, "Q"]], Int[Array, "Q G"]]

_FIELD = "not stated; what the field uses"
# Defaults for publications that clip token-level ratios without specifying the clip range.
CLIPPED = {
    "loss.ratio": Published("token", "the ratio of each token's probabilities"),
    "loss.clip_low": Published(0.2, _FIELD),
    "loss.clip_high": Published(0.2, _FIELD),
}
NO_ENTROPY = {"loss.entropy_coef": Published(0.0, "the objective has no such term")}


def by_size(state: CurriculumState, sizes: Int[Array, "K"]) -> Float[Array, "K"]:
    """Returns each group's fraction of the questions, which gives all questions equal weight."""
    return sizes / sizes.sum()


def one_budget(config: MethodSettings, budget: int) -> SampleBudgets:
    """Builds a function `Method.sample_budgets` that returns the same budget for all rollouts.

    Args:
      budget: the budget, in tokens.
    """

    def sample_budgets(
        key: Array, state: CurriculumState, groups: Int[Array, "Q"]
    ) -> Int[Array, "Q G"]:
        shape = (len(groups), config.rollout.group_size)
        return curriculum.fixed_budgets(budget, shape=shape)

    return sample_budgets


def cut_points(
    config: MethodSettings, key: Array, budgets: Int[Array, "Q G"]
) -> Int[Array, "Q G M"]:
    """Computes the truncation points of each trace, in tokens (Algorithm 1, line 10)."""
    if config.cuts.kind == "random":
        return rewards.random_cut_points(key, budgets, num_cuts=config.cuts.count)
    return rewards.cut_points(budgets, num_cuts=config.cuts.count)


def group_mean(x: PerCut) -> PerCut:
    """Replaces each value by the mean over the rollouts of its question."""
    return jnp.broadcast_to(x.mean(1, keepdims=True), x.shape)


def correctness(state: Any, batch: GroupBatch) -> Float[Array, "Q G"]:
    """Returns the outcome of each trace at its last truncation point."""
    return batch.outcomes[..., -1]


def needs_a_group(config: MethodSettings, what: str) -> Iterator[str]:
    """Yields an error message if the group size is 1 although a setting compares rollouts.

    Args:
      what: the setting that compares rollouts, as `KEY=VALUE`.
    """
    if config.rollout.group_size == 1:
        yield (
            f"rollout.group_size=1: {what} compares several traces of the same question; set it "
            "to 2 or more"
        )


def problems(config: MethodSettings) -> Iterator[str]:
    """Yields an error message for each setting that is incompatible with methods of this family."""
    yield from budget_input_problems(config)
    yield from needs_a_group(config, f"method={config.method}")


def no_stages(config: MethodSettings, reason: str) -> Iterator[str]:
    """Yields an error message if `budget.stages` is set for a method that does not support it.

    Args:
      reason: what the method does with traces or budgets, without a subject.
    """
    if config.budget.stages:
        yield (
            f"budget.stages={written(config.budget.stages)}: method={config.method} {reason}; set "
            "budget.stages=[], or use another method such as grpo"
        )


def budget_input_problems(config: MethodSettings) -> Iterator[str]:
    """Yields an error message if the prompt contains the budget.

    Methods that train at a single budget call this function, because their prompts do not contain
    the budget.
    """
    if config.conditioning.in_prompt:
        yield (
            f"conditioning.budget_input={config.conditioning.budget_input}: "
            f"method={config.method} trains at a single budget, which its prompts do not contain; "
            "set conditioning.budget_input=none, or method=bacr"
        )


def grpo_family(
    config: MethodSettings,
    name: str,
    advantage: Callable[[Float[Array, "Q G"]], Float[Array, "Q G"]] = grpo_advantage,
    *,
    centred: Callable[[Float[Array, "Q G"]], Float[Array, "Q G"]] = group_advantage,
    reward: TraceRewards = correctness,
    **hooks: Any,
) -> Method:
    """Builds a method that trains at the maximum budget, which is not an input of the policy.

    Args:
      name: display name of the method.
      advantage: function from rewards [Q, G] to advantages [Q, G].
      centred: function from rewards [Q, G] to rewards minus the method's baseline [Q, G]. It is
        only used for metrics.
      reward: function from (state, `GroupBatch`) to rewards [Q, G]. The default is the outcome at
        the last truncation point.
      **hooks: additional fields of `Method`, which override the fields set by this function.
    """

    def cuts(key: Array, budgets: Int[Array, "Q G"]) -> Int[Array, "Q G one"]:
        return budgets[..., None]

    def rewards(state: Any, batch: GroupBatch) -> PerCut:
        return reward(state, batch)[..., None]

    def advantages(
        state: Any, batch: GroupBatch, rewards: PerCut, values: PerCut | None
    ) -> Advantages:
        trace_rewards = rewards[..., 0]
        shared = advantage(trace_rewards)[..., None]
        baseline = rewards - centred(trace_rewards)[..., None]
        return Advantages(thinking=shared, answers=shared, baseline=baseline)

    family_fields: dict[str, Any] = {
        "conditioned": False,
        "uses_value": False,
        "question_weights": by_size,
        "sample_budgets": one_budget(config, config.budget.max),
        "cuts": cuts,
        "rewards": rewards,
        "advantages": advantages,
    }
    return Method(name=name, **family_fields | hooks)
