"""S-GRPO (arXiv 2505.07686): one trace left at several places, earlier right answers paid more."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from bacr_jax import rewards as cutting
from bacr_jax.advantages import to_go
from bacr_jax.config import Config
from bacr_jax.methods.grpo_family import CLIPPED, NO_ENTROPY, cut_points, grpo_family, told_nothing
from bacr_jax.methods.method import Advantages, GroupBatch, Method, PerCut, Published

_NOTES = "its Eq. 1 and 2, by two notes on it that agree; its own text was not read"
PUBLISHED = {
    "cuts.count": Published(
        8, "8 exits a question; whether the whole trace is one: unchecked", verified=False
    ),
    "cuts.kind": Published("random", "exits uniform over the trace"),
    # With every exit's 1 / |o| in the advantages a row is their mean.
    "loss.aggregate": Published("seq_mean_token_sum", _NOTES, defining=True, verified=False),
    **CLIPPED,
    **NO_ENTROPY,
    "loss.kl_coef": Published(0.0, _NOTES, verified=False),
}


def decaying_reward(
    right: Bool[Array, "*batch M"], source: Int[Array, "*batch M"]
) -> Float[Array, "*batch M"]:
    """Reward of every exit: halved with each right one before it.

        r_i = 2^(1 - N_i) if exit i is right, else 0;  N_i right exits up to and with i

    Args:
      right: whether the answer at each exit is right; the exits stand in the trace's order.
      source: the exit whose answer serves this one (`rewards.distinct_cuts`); such count once.
    """
    own = source == jnp.arange(source.shape[-1])
    count = jnp.cumsum(right & own, axis=-1)
    paid = jnp.where(right, jnp.exp2(1.0 - count), 0.0)
    return jnp.take_along_axis(paid, source, axis=-1)


def serial_advantage(
    rewards: Float[Array, "*batch M"], source: Int[Array, "*batch M"]
) -> Float[Array, "*batch M"]:
    """Reward less the mean over the distinct exits of the same trace, by no deviation."""
    own = source == jnp.arange(source.shape[-1])
    rewards = jax.lax.stop_gradient(rewards)
    mean = jnp.where(own, rewards, 0.0).sum(-1, keepdims=True) / own.sum(-1, keepdims=True)
    return rewards - mean


def exit_credit(
    advantage: Float[Array, "*batch M"],
    kept: Int[Array, "*batch M"],
    answered: Int[Array, "*batch M"],
    source: Int[Array, "*batch M"],
) -> tuple[Float[Array, "*batch M"], Float[Array, "*batch M"]]:
    """The mean over exits of A_i / |o_i|, for each token of response i, by segment and by answer.

    Response i is the thinking up to exit i and the answer there; a thinking token belongs to all
    responses that end at its segment or later.

    Args:
      kept: thinking tokens of each response, a whole trace's closing tag among them.
      answered: sampled tokens of its answer.

    Returns:
      What the thinking segments get, and what the answers get.
    """
    own = source == jnp.arange(source.shape[-1])
    each = advantage / jnp.maximum(kept + answered, 1) / own.sum(-1, keepdims=True)
    # Of exits at one place the last owns the closing tag, which is sampled after the thinking.
    last = jnp.concatenate([source[..., 1:] != source[..., :-1], own[..., :1]], axis=-1)
    thinking = to_go(jnp.where(last, each, 0.0), jnp.ones(source.shape[-1], each.dtype))
    return thinking, jnp.where(own, each, 0.0)


def problems(config: Config) -> Iterator[str]:
    """What is wrong with the settings of this method."""
    yield from told_nothing(config)
    if config.cuts.count == 1:
        yield "cuts.count=1: method=s_grpo compares the exits of a trace; write 2 or more"


def make(config: Config) -> Method:
    """Serial groups: `cuts.count` exits of every trace, the whole trace the last of them."""

    def source(batch: GroupBatch) -> Int[Array, "Q G M"]:
        return cutting.distinct_cuts(batch.cuts, batch.thinking)

    def rewards(state: Any, batch: GroupBatch) -> PerCut:
        return decaying_reward(batch.outcomes > 0.5, source(batch))

    def advantages(
        state: Any, batch: GroupBatch, rewards: PerCut, values: PerCut | None
    ) -> Advantages:
        assert batch.answer_lengths is not None and batch.sampled is not None
        exits = source(batch)
        advantage = serial_advantage(rewards, exits)
        whole = batch.cuts >= batch.thinking[..., None]
        kept = jnp.where(whole, batch.sampled[..., None], batch.cuts)
        thinking, answers = exit_credit(advantage, kept, batch.answer_lengths, exits)
        return Advantages(thinking, answers, baseline=rewards - advantage)

    def metrics(state: Any, batch: GroupBatch) -> dict[str, Array]:
        own = source(batch) == jnp.arange(config.cuts.count)
        return {"s_grpo/exits": own.sum(-1).mean()}

    return grpo_family(
        config,
        "S-GRPO",
        cuts=functools.partial(cut_points, config),
        rewards=rewards,
        advantages=advantages,
        metrics=metrics,
        own_cuts=True,
        pays_by_verdicts=True,
        published=PUBLISHED,
    )
