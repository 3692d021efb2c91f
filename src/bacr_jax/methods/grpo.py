"""GRPO (arXiv 2402.03300): group-normalized advantages at a fixed budget."""

from typing import Any

import jax.numpy as jnp

from bacr_jax import advantages
from bacr_jax.config.settings import MethodSettings
from bacr_jax.methods.grpo_family import CLIPPED, NO_ENTROPY, group_mean, grpo_family
from bacr_jax.methods.grpo_family import problems as problems
from bacr_jax.methods.method import Advantages, GroupBatch, Method, PerCut, Published

PUBLISHED = {
    "loss.aggregate": Published("seq_mean_token_mean", "arXiv 2402.03300, Eq. 3"),
    **CLIPPED,
    **NO_ENTROPY,
    "loss.kl_coef": Published(0.04, "arXiv 2402.03300, settings of its training"),
    "loss.kl_kind": Published("k3", "arXiv 2402.03300, Eq. 4"),
    "train.minibatches": Published(1, "a single update per rollout: settings of its training"),
}


def make(config: MethodSettings) -> Method:
    """Builds GRPO: rewards minus the group mean, divided by the group's standard deviation.

    With `reward.normalize_each`, each reward in `reward.weights` is normalized separately (GDPO).
    """
    if not config.reward.normalize_each:
        return grpo_family(config, "GRPO", published=PUBLISHED)
    shares = config.reward_shares

    def normalised_each(
        state: Any, batch: GroupBatch, rewards: PerCut, values: PerCut | None
    ) -> Advantages:
        # Each array is [Q, G, 1], the mean over the answers at the single truncation point.
        scores = [batch.by_reward[name].mean(-1) for name in shares]
        weights = jnp.array([*shares.values()])
        advantage = advantages.decoupled_advantage(jnp.concatenate(scores, -1), weights)
        shared = advantage[..., None]
        return Advantages(thinking=shared, answers=shared, baseline=group_mean(rewards))

    return grpo_family(config, "GRPO", advantages=normalised_each, published=PUBLISHED)
