"""What methods share that train at the largest budget, with one outcome and one advantage a trace.

GRPO and its relatives differ in the reward of a trace and in how rewards become advantages;
`single_budget` is the rest.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bacr_jax import curriculum
from bacr_jax.config import Config
from bacr_jax.curriculum import CurriculumState
from bacr_jax.methods.method import Credit, Method, Observed

TraceRewards = Callable[[Any, Observed], Float[Array, "Q G"]]


def by_size(state: CurriculumState, sizes: Int[Array, "K"]) -> Float[Array, "K"]:
    """Every question alike: groups by their number of questions."""
    return sizes / sizes.sum()


def correctness(state: Any, seen: Observed) -> Float[Array, "Q G"]:
    """Outcome at the largest budget."""
    return seen.outcomes[..., -1]


def single_budget(
    config: Config,
    name: str,
    advantage: Callable[[Float[Array, "Q G"]], Float[Array, "Q G"]],
    *,
    reward: TraceRewards = correctness,
    keep: Callable[[Observed], Array] | None = None,
    **hooks: Any,
) -> Method:
    """A method that is never told its budget and trains at the largest one.

    Args:
      config: the run's config.
      name: for tables and logs.
      advantage: from the rewards [Q, G] to advantages [Q, G].
      reward: reward of each trace.
      keep: rollouts [Q, G] that count in the loss; all by default.
      **hooks: further fields of `Method`.
    """
    group_size = config.rollout.group_size

    def sample_budgets(
        key: Array, state: CurriculumState, groups: Int[Array, "Q"]
    ) -> Int[Array, "Q G"]:
        return curriculum.fixed_budgets(config.budget.max, shape=(groups.shape[0], group_size))

    def cuts(budgets: Int[Array, "Q G"]) -> Int[Array, "Q G M"]:
        return budgets[..., None]

    def rewards(state: Any, seen: Observed) -> Float[Array, "Q G M"]:
        return reward(state, seen)[..., None]

    def credit(
        state: Any,
        seen: Observed,
        reward: Float[Array, "Q G M"],
        values: Float[Array, "Q G M"] | None,
    ) -> Credit:
        shared = advantage(reward[..., 0])[..., None]
        return Credit(
            thinking=shared,
            answers=shared,
            baseline=jnp.broadcast_to(reward.mean(1, keepdims=True), reward.shape),
            keep=None if keep is None else keep(seen),
        )

    return Method(
        name=name,
        conditioned=False,
        uses_value=False,
        question_weights=by_size,
        sample_budgets=sample_budgets,
        cuts=cuts,
        rewards=rewards,
        advantages=credit,
        **hooks,
    )
