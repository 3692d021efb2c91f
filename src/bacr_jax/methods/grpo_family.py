"""Parts that methods share, above all GRPO and its relatives.

The relatives of GRPO have one budget, and one outcome and one advantage per trace. They differ in
the reward of a trace and in how rewards become advantages; `grpo_family` builds everything else.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bacr_jax import curriculum, rewards
from bacr_jax.advantages import group_advantage, grpo_advantage
from bacr_jax.config import Config
from bacr_jax.curriculum import CurriculumState
from bacr_jax.methods.method import Advantages, GroupBatch, Method, PerCut, Published

TraceRewards = Callable[[Any, GroupBatch], Float[Array, "Q G"]]
SampleBudgets = Callable[[Array, CurriculumState, Int[Array, "Q"]], Int[Array, "Q G"]]

_FIELD = "not stated; what the field uses"
# For publications that clip the ratio of tokens without giving a range.
CLIPPED = {
    "loss.ratio": Published("token", "the ratio of each token's probabilities"),
    "loss.clip_low": Published(0.2, _FIELD),
    "loss.clip_high": Published(0.2, _FIELD),
}
NO_ENTROPY = {"loss.entropy_coef": Published(0.0, "the objective has no such term")}


def by_size(state: CurriculumState, sizes: Int[Array, "K"]) -> Float[Array, "K"]:
    """Returns each group's share of the questions, so that all questions have equal weight."""
    return sizes / sizes.sum()


def one_budget(config: Config, budget: int) -> SampleBudgets:
    """Returns a `Method.sample_budgets` that gives every rollout the same budget, in tokens."""

    def sample_budgets(
        key: Array, state: CurriculumState, groups: Int[Array, "Q"]
    ) -> Int[Array, "Q G"]:
        shape = (len(groups), config.rollout.group_size)
        return curriculum.fixed_budgets(budget, shape=shape)

    return sample_budgets


def cut_points(config: Config, key: Array, budgets: Int[Array, "Q G"]) -> Int[Array, "Q G M"]:
    """Returns the truncation points of each trace, in tokens (Algorithm 1, line 10)."""
    if config.cuts.kind == "random":
        return rewards.random_cut_points(key, budgets, num_cuts=config.cuts.count)
    return rewards.cut_points(budgets, num_cuts=config.cuts.count)


def group_mean(x: PerCut) -> PerCut:
    """Replaces each number by the mean over the rollouts of its question."""
    return jnp.broadcast_to(x.mean(1, keepdims=True), x.shape)


def correctness(state: Any, batch: GroupBatch) -> Float[Array, "Q G"]:
    """Returns the outcome of each trace at its last cut."""
    return batch.outcomes[..., -1]


def needs_a_group(config: Config, what: str) -> Iterator[str]:
    """Yields an error line if a setting compares rollouts but a question has only one.

    Args:
      what: setting that compares rollouts, as `KEY=VALUE`.
    """
    if config.rollout.group_size == 1:
        yield f"rollout.group_size=1: {what} compares the rollouts of a question; write 2 or more"


def problems(config: Config) -> Iterator[str]:
    """Yields an error line for each setting that a method of the family cannot train with."""
    yield from told_nothing(config)
    yield from needs_a_group(config, f"method={config.method}")


def told_nothing(config: Config) -> Iterator[str]:
    """Yields an error line if the budget is in the prompt, for methods that have one budget."""
    if config.conditioning.in_words:
        yield (
            f"conditioning.told={config.conditioning.told}: method={config.method} trains at one "
            "budget, which is not in its prompt; write conditioning.told=nothing, or method=bacr"
        )


def grpo_family(
    config: Config,
    name: str,
    advantage: Callable[[Float[Array, "Q G"]], Float[Array, "Q G"]] = grpo_advantage,
    *,
    centred: Callable[[Float[Array, "Q G"]], Float[Array, "Q G"]] = group_advantage,
    reward: TraceRewards = correctness,
    **hooks: Any,
) -> Method:
    """Builds a method that trains at the largest budget, which is not an input of the policy.

    Args:
      name: name of the method, for the user.
      advantage: rewards [Q, G] -> advantages [Q, G].
      centred: rewards [Q, G] -> rewards minus the method's baseline [Q, G], for the metrics.
      reward: (state, `GroupBatch`) -> rewards [Q, G]; default is the outcome at the last cut.
      **hooks: more fields of `Method`; they replace the family's fields of the same name.
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
