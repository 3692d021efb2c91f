"""What methods share, above all those of one budget, one outcome and one advantage a trace.

GRPO and its relatives differ in the reward of a trace and in how rewards become advantages;
`grpo_family` is the rest.
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
# The clipped ratio of tokens, where a publication has one and gives no range.
CLIPPED = {
    "loss.ratio": Published("token", "the ratio of each token's probabilities"),
    "loss.clip_low": Published(0.2, _FIELD),
    "loss.clip_high": Published(0.2, _FIELD),
}
NO_ENTROPY = {"loss.entropy_coef": Published(0.0, "the objective has no such term")}


def by_size(state: CurriculumState, sizes: Int[Array, "K"]) -> Float[Array, "K"]:
    """Every question alike: groups by their number of questions."""
    return sizes / sizes.sum()


def one_budget(config: Config, budget: int) -> SampleBudgets:
    """`Method.sample_budgets` of methods that train at one number of tokens alone."""
    size = config.rollout.group_size
    return lambda key, state, groups: curriculum.fixed_budgets(budget, shape=(len(groups), size))


def cut_points(config: Config, key: Array, budgets: Int[Array, "Q G"]) -> Int[Array, "Q G M"]:
    """Truncation points of each trace (Algorithm 1, line 10)."""
    if config.cuts.kind == "random":
        return rewards.random_cut_points(key, budgets, num_cuts=config.cuts.count)
    return rewards.cut_points(budgets, num_cuts=config.cuts.count)


def group_mean(x: PerCut) -> PerCut:
    """Mean over the rollouts of a question, for each of them."""
    return jnp.broadcast_to(x.mean(1, keepdims=True), x.shape)


def correctness(state: Any, batch: GroupBatch) -> Float[Array, "Q G"]:
    """Outcome at the largest budget."""
    return batch.outcomes[..., -1]


def needs_a_group(config: Config, what: str) -> Iterator[str]:
    """The problem of a setting that compares rollouts where a question has only one."""
    if config.rollout.group_size == 1:
        yield (f"rollout.group_size=1: {what} compares the rollouts of a question; write 2 or more")


def problems(config: Config) -> Iterator[str]:
    """What is wrong with the settings of any of the family."""
    yield from told_nothing(config)
    yield from needs_a_group(config, f"method={config.method}")


def told_nothing(config: Config) -> Iterator[str]:
    """The problem of words for a method whose traces all have the largest budget."""
    if config.conditioning.in_words:
        yield (
            f"conditioning.told={config.conditioning.told}: method={config.method} trains at "
            "one budget and is never told it; write conditioning.told=nothing, or method=bacr"
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
    """A method that is never told its budget and trains at the largest one.

    Args:
      advantage: from the rewards [Q, G] to advantages [Q, G].
      centred: from the rewards to rewards minus the method's baseline, for the metrics.
      **hooks: fields of `Method`, further ones and others than the family's.
    """

    def rewards(state: Any, batch: GroupBatch) -> PerCut:
        return reward(state, batch)[..., None]

    def advantages(
        state: Any, batch: GroupBatch, rewards: PerCut, values: PerCut | None
    ) -> Advantages:
        shared = advantage(rewards[..., 0])[..., None]
        return Advantages(
            thinking=shared, answers=shared, baseline=rewards - centred(rewards[..., 0])[..., None]
        )

    of_family: dict[str, Any] = {
        "conditioned": False,
        "uses_value": False,
        "question_weights": by_size,
        "sample_budgets": one_budget(config, config.budget.max),
        "cuts": lambda key, budgets: budgets[..., None],
        "rewards": rewards,
        "advantages": advantages,
    }
    return Method(name=name, **of_family | hooks)
