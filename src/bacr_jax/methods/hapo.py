"""HAPO (arXiv 2505.11225): shorter than the shortest correct response to the question so far."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bacr_jax import advantages
from bacr_jax.config import Config
from bacr_jax.methods import baselines
from bacr_jax.methods.grpo_family import single_budget
from bacr_jax.methods.method import Method, Observed


def make(config: Config) -> Method:
    """GRPO on correctness plus a length reward relative to each question's own history.

    The state is that history, one length per training question. A batch is rewarded by the
    history from before it.
    """
    settings = config.hapo

    def reward(history: Int[Array, "n"], seen: Observed) -> Float[Array, "Q G"]:
        return baselines.hapo_reward(
            history[seen.questions][:, None],
            seen.lengths,
            seen.outcomes[..., -1],
            weight=settings.weight,
            floor=settings.floor,
            kind=settings.kind,
        )

    def update(
        history: Int[Array, "n"], seen: Observed, rewards: Array, values: Any
    ) -> Int[Array, "n"]:
        return baselines.hapo_update(history, seen.questions, seen.lengths, seen.outcomes[..., -1])

    def metrics(history: Int[Array, "n"], seen: Observed) -> dict[str, Array]:
        known = history != baselines.HAPO_NO_HISTORY
        count = jnp.maximum(known.sum(), 1)
        length_reward = reward(history, seen) - seen.outcomes[..., -1]
        return {
            "hapo/known_share": known.mean(),
            "hapo/shortest_mean": jnp.where(known, history, 0).sum() / count,
            "hapo/length_reward": length_reward.mean(),
        }

    return single_budget(
        config,
        "HAPO",
        advantages.grpo_advantage,
        reward=reward,
        init_state=baselines.hapo_init,
        update=update,
        metrics=metrics,
    )
