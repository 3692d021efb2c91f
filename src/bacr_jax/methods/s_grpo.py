"""S-GRPO (arXiv 2505.07686): one trace with several exits, of which early correct ones earn more.

An exit is a truncation point (cut) at which the thinking ends and the policy answers.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from bacr_jax import rewards as cutting
from bacr_jax.advantages import to_go
from bacr_jax.config.settings import MethodSettings
from bacr_jax.methods.grpo_family import (
    CLIPPED,
    NO_ENTROPY,
    budget_input_problems,
    cut_points,
    grpo_family,
)
from bacr_jax.methods.method import Advantages, GroupBatch, Method, PerCut, Published

_NOTES = "its Eq. 1 and 2, by two notes on it that agree; its own text was not read"
PUBLISHED = {
    "cuts.count": Published(
        8, "8 exits a question; whether the whole trace is one: unchecked", verified=False
    ),
    "cuts.kind": Published("random", "exits uniform over the trace"),
    # The advantages already contain the factor 1 / |o| of each exit, where |o| is the length of its
    # response. The sum over the tokens of a trace is therefore the mean over its exits.
    "loss.aggregate": Published("seq_mean_token_sum", _NOTES, defining=True, verified=False),
    **CLIPPED,
    **NO_ENTROPY,
    "loss.kl_coef": Published(0.0, _NOTES, verified=False),
}


def decaying_reward(
    right: Bool[Array, "*batch M"], source: Int[Array, "*batch M"]
) -> Float[Array, "*batch M"]:
    """Computes the reward of each exit, which halves with each earlier correct exit.

        r_i = 2^(1 - N_i) if exit i is correct, else 0

    An exit is a truncation point of the thinking, at which the policy answers. N_i is the number of
    correct exits up to and including exit i. Exits that share an answer count once and have the
    same reward.

    Args:
      right: True for exits with a correct answer, in the order of the trace.
      source: for each exit, the index of the exit whose answer it uses (`rewards.distinct_cuts`).
    """
    right_exits = jnp.cumsum(right & _has_answer(source), axis=-1)
    rewards = jnp.where(right, jnp.exp2(1.0 - right_exits), 0.0)
    return jnp.take_along_axis(rewards, source, axis=-1)


def _has_answer(source: Int[Array, "*batch M"]) -> Bool[Array, "*batch M"]:
    """True for exits with their own sampled answer, False for exits that reuse another answer."""
    return source == jnp.arange(source.shape[-1])


def serial_advantage(
    rewards: Float[Array, "*batch M"], source: Int[Array, "*batch M"]
) -> Float[Array, "*batch M"]:
    """Subtracts the mean reward over the distinct exits of the same trace from each reward.

    An exit is a truncation point of the thinking, at which the policy answers. The result is not
    divided by a standard deviation.

    Args:
      rewards: reward of each exit.
      source: for each exit, the index of the exit whose answer it uses (`rewards.distinct_cuts`).
    """
    is_distinct = _has_answer(source)
    rewards = jax.lax.stop_gradient(rewards)
    total = jnp.where(is_distinct, rewards, 0.0).sum(-1, keepdims=True)
    mean = total / is_distinct.sum(-1, keepdims=True)
    return rewards - mean


def exit_credit(
    advantage: Float[Array, "*batch M"],
    kept: Int[Array, "*batch M"],
    answered: Int[Array, "*batch M"],
    source: Int[Array, "*batch M"],
) -> tuple[Float[Array, "*batch M"], Float[Array, "*batch M"]]:
    """Distributes the advantages of a trace's exits over its thinking segments and answers.

        c_i = A_i / |o_i| / K
        answer i:    c_i
        segment s:   sum_{i >= s} c_i

    An exit is a truncation point of the thinking, at which the policy answers. Response o_i
    consists of the thinking up to exit i and the answer at exit i. |o_i| is its length in tokens,
    and K is the number of distinct exits. A thinking token belongs to every response whose exit is
    at or after its segment.

    Args:
      advantage: advantage A of each response.
      kept: number of thinking tokens of each response, including the closing tag if the trace is
        not truncated.
      answered: number of sampled answer tokens of each response.
      source: for each exit, the index of the exit whose answer it uses (`rewards.distinct_cuts`).

    Returns:
      Advantage of each token of each thinking segment, and of each token of each answer.
    """
    is_distinct = _has_answer(source)
    num_exits = is_distinct.sum(-1, keepdims=True)
    credit = advantage / jnp.maximum(kept + answered, 1) / num_exits
    # An exit is a position at which the trace is truncated and answered. Exits at the same position
    # share one answer. The tokens before them get the advantage of the last of these exits, because
    # the closing tag, which is sampled after the thinking, belongs to the last segment.
    differs_from_next = source[..., 1:] != source[..., :-1]
    final_exit = jnp.ones_like(is_distinct[..., :1])
    is_last = jnp.concatenate([differs_from_next, final_exit], axis=-1)
    weights = jnp.ones(source.shape[-1], credit.dtype)
    thinking = to_go(jnp.where(is_last, credit, 0.0), weights)
    answers = jnp.where(is_distinct, credit, 0.0)
    return thinking, answers


def problems(config: MethodSettings) -> Iterator[str]:
    """Yields an error message for each setting that is incompatible with the method."""
    yield from budget_input_problems(config)
    if config.cuts.count == 1:
        yield (
            "cuts.count=1: method=s_grpo compares several exits (truncation points) of the same "
            "trace; set it to 2 or more"
        )


def make(config: MethodSettings) -> Method:
    """Builds S-GRPO with `cuts.count` exits (truncation points) per trace.

    The last exit is at the end of the thinking.
    """

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
        is_at_end = batch.cuts >= batch.thinking[..., None]
        thinking_tokens = jnp.where(is_at_end, batch.sampled[..., None], batch.cuts)
        thinking, answers = exit_credit(advantage, thinking_tokens, batch.answer_lengths, exits)
        return Advantages(thinking, answers, baseline=rewards - advantage)

    def metrics(state: Any, batch: GroupBatch) -> dict[str, Array]:
        distinct_exits = _has_answer(source(batch)).sum(-1)
        return {"s_grpo/exits": distinct_exits.mean()}

    return grpo_family(
        config,
        "S-GRPO",
        cuts=functools.partial(cut_points, config),
        rewards=rewards,
        advantages=advantages,
        metrics=metrics,
        cuts_relative_to_length=True,
        pays_by_verdicts=True,
        published=PUBLISHED,
    )
