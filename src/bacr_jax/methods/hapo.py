"""HAPO (arXiv 2505.11225): rewards responses shorter than the shortest correct one so far."""

from typing import Literal

import chex
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from bacr_jax.config.settings import MethodSettings
from bacr_jax.methods.grpo_family import CLIPPED, NO_ENTROPY, grpo_family
from bacr_jax.methods.grpo_family import problems as problems
from bacr_jax.methods.method import GroupBatch, Method, PerCut, Published

# Shortest correct length of a question that has no correct response yet.
NO_HISTORY = np.iinfo(np.int32).max

# Source of the loss settings that the released code does not set, and which therefore come from its
# trainer.
_TRAINER = "TRL's default at the time (recalled)"
PUBLISHED = {
    "loss.aggregate": Published("seq_mean_token_mean", _TRAINER, verified=False),
    **CLIPPED,
    **NO_ENTROPY,
    "loss.kl_coef": Published(0.04, _TRAINER, verified=False),
    "loss.kl_kind": Published("k3", _TRAINER, verified=False),
    "train.minibatches": Published(1, _TRAINER, verified=False),
    "hapo.weight": Published(1.0, "its released code"),
    "hapo.floor": Published(-0.7, "its released code"),
    "hapo.kind": Published("cosine", "its released code"),
}


def no_history(num_problems: int) -> Int[Array, "n"]:
    """Returns the shortest correct length of each question before training.

    All entries are `NO_HISTORY`, because no question has a correct response yet.
    """
    return jnp.full(num_problems, NO_HISTORY, jnp.int32)


def length_reward(
    history: Int[Array, "*#batch"],
    lengths: Int[Array, "*#batch"],
    correct: Shaped[Array, "*#batch"],
    *,
    floor: float = -0.7,
    kind: Literal["cosine", "linear"] = "cosine",
) -> Float[Array, "..."]:
    """Computes a length reward relative to the shortest correct response so far.

        cosine:  f = cos(min(x, 2) pi/2);        correct: max(floor, f);  wrong: min(0, f)
        linear:  correct: 1 - x if x < 1; 0 up to 1.1; then max(floor, -(x - 1.1))
                 wrong: 0 up to 1.1; then max(-1, -(x - 1.1))

    where x = length / history. If the weight of this reward is 1, `floor` keeps the total reward of
    long correct answers above the reward of wrong answers.

    Args:
      history: length in tokens of the shortest correct response so far to the question of each
        response, or `NO_HISTORY` if there is none. Broadcast against `lengths`.
      lengths: number of tokens of each response.
      correct: correctness of each response. Values above 1/2 count as correct.
      floor: lower bound of the reward of a correct response.
      kind: shape of the reward, "cosine" or "linear".

    Returns:
      Length reward of each response. It is 0 for questions without history.

    Raises:
      ValueError: If the kind is unknown.
    """
    right = jnp.asarray(correct).astype(jnp.float32) > 0.5
    x = lengths.astype(jnp.float32) / jnp.maximum(history, 1).astype(jnp.float32)
    if kind == "cosine":
        f = jnp.cos(jnp.minimum(x, 2.0) * (np.pi / 2.0))
        reward_if_right = jnp.maximum(floor, f)
        reward_if_wrong = jnp.minimum(0.0, f)
    elif kind == "linear":
        penalty = -jnp.maximum(x - 1.1, 0.0)
        reward_if_right = jnp.where(x < 1.0, 1.0 - x, jnp.maximum(floor, penalty))
        reward_if_wrong = jnp.maximum(-1.0, penalty)
    else:
        raise ValueError(f"the length reward must be cosine or linear, but `kind` is {kind!r}")
    reward = jnp.where(right, reward_if_right, reward_if_wrong)
    return jnp.where(history == NO_HISTORY, 0.0, reward)


def update_history(
    history: Int[Array, "n"],
    problem: Int[Array, "Q"],
    lengths: Int[Array, "Q G"],
    correct: Shaped[Array, "Q G"],
) -> Int[Array, "n"]:
    """Updates the shortest correct length of each training question with a batch.

    The entries never increase.

    Args:
      history: shortest correct length of each training question so far, in tokens.
      problem: index of each question of the batch.
      lengths: number of tokens of each response.
      correct: correctness of each response. Values above 1/2 count as correct.
    """
    chex.assert_rank([history, problem, lengths, correct], [1, 1, 2, 2])
    right = jnp.asarray(correct).astype(jnp.float32) > 0.5
    shortest = jnp.min(jnp.where(right, lengths, NO_HISTORY), axis=1)
    return history.at[problem].min(shortest.astype(history.dtype))


def make(config: MethodSettings) -> Method:
    """Builds HAPO: GRPO on correctness plus a reward for short responses.

    The length reward compares a response with the shortest correct response so far to the same
    question. These shortest lengths are the state of the method, one per training question. The
    rewards of a batch use the state before the batch.
    """
    settings = config.hapo

    def reward(history: Int[Array, "n"], batch: GroupBatch) -> Float[Array, "Q G"]:
        shortest = history[batch.questions][:, None]
        correct = batch.outcomes[..., -1]
        bonus = length_reward(
            shortest, batch.lengths, correct, floor=settings.floor, kind=settings.kind
        )
        return correct + settings.weight * bonus

    def update(
        history: Int[Array, "n"], batch: GroupBatch, rewards: PerCut, values: PerCut | None
    ) -> Int[Array, "n"]:
        return update_history(history, batch.questions, batch.lengths, batch.outcomes[..., -1])

    def metrics(history: Int[Array, "n"], batch: GroupBatch) -> dict[str, Array]:
        has_history = history != NO_HISTORY
        count = jnp.maximum(has_history.sum(), 1)
        bonus = reward(history, batch) - batch.outcomes[..., -1]
        return {
            "hapo/known_share": has_history.mean(),
            "hapo/shortest_mean": jnp.where(has_history, history, 0).sum() / count,
            "hapo/length_reward": bonus.mean(),
        }

    return grpo_family(
        config,
        "HAPO",
        reward=reward,
        init_state=no_history,
        update=update,
        metrics=metrics,
        pays_by_verdicts=True,
        published=PUBLISHED,
    )
