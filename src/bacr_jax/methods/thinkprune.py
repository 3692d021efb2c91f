"""ThinkPrune (arXiv 2504.01296): GRPO under a token limit that falls during training."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from bacr_jax.config.settings import MethodSettings
from bacr_jax.methods.grpo_family import grpo_family
from bacr_jax.methods.grpo_family import problems as problems
from bacr_jax.methods.l1 import GRPO_OF_VERL
from bacr_jax.methods.method import Advantages, GroupBatch, Method, PerCut, Published

PUBLISHED = {
    **GRPO_OF_VERL,
    # The scripts of the other methods that are based on this trainer make several updates.
    "train.minibatches": Published(1, "its released scripts (commit 0f7449b)"),
    "budget.stages": Published(
        (1.0, 0.75, 0.5),
        "4,000, then 3,000 tokens: its released scripts (commit 0f7449b); then 2,000: recalled",
        verified=False,
    ),
}


def make(config: MethodSettings) -> Method:
    """Builds ThinkPrune: GRPO with reward 0 for responses that exceed the token limit.

    The limit is the budget, which `budget.stages` lowers during training. All other responses are
    rewarded for correctness. In the publication, a truncated response has no answer. Here, an
    answer is forced after the truncation, but its advantage is 0.
    """

    def reward(state: Any, batch: GroupBatch) -> Float[Array, "Q G"]:
        return batch.outcomes[..., -1] * batch.closed

    def metrics(state: Any, batch: GroupBatch) -> dict[str, Array]:
        return {"thinkprune/truncated_share": jnp.mean(~batch.closed)}

    method = grpo_family(config, "ThinkPrune", reward=reward, metrics=metrics, published=PUBLISHED)

    def advantages(
        state: Any, batch: GroupBatch, rewards: PerCut, values: PerCut | None
    ) -> Advantages:
        shared = method.advantages(state, batch, rewards, values)
        answers = jnp.where(batch.closed[..., None], shared.answers, 0.0)
        return dataclasses.replace(shared, answers=answers)

    return dataclasses.replace(method, advantages=advantages)
