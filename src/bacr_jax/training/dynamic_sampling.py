"""Rounds of questions with their rollouts, and the choice of what is learned from."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Int

from bacr_jax.methods import Observed, Resampling
from bacr_jax.rollout import Rollout
from bacr_jax.types import Prompts, pytree

# Counters of a rollout that are counts or seconds.
_ADDITIVE = (
    *("row_steps", "useful_steps", "tokens", "prefill_tokens"),
    *("prefill_s", "decode_s", "answer_s"),
)


@pytree
class Plan:
    """Questions, budgets and cuts of one iteration.

    Attributes:
      questions: indices into the training set.
      groups: difficulty group of each.
      budgets: thinking budgets.
      cuts: truncation points.
    """

    questions: Int[Array, "Q"]
    groups: Int[Array, "Q"]
    budgets: Int[Array, "Q G"]
    cuts: Int[Array, "Q G M"]


@dataclasses.dataclass(frozen=True)
class Asked:
    """One round: what was asked and what came back.

    Attributes:
      plan: questions, budgets, cuts.
      prompts: prompts of the Q G rows.
      rollout: trunks and branches of the rows.
      seen: what the method may look at.
      useful: questions to be learned from; the others have no part in the loss.
    """

    plan: Plan
    prompts: Prompts
    rollout: Rollout
    seen: Observed
    useful: Bool[np.ndarray, "Q"]


def wants_more(asked: Sequence[Asked], resampling: Resampling | None) -> bool:
    """Whether another round is due: the first always, more until Q questions are of use."""
    if not asked or resampling is None:
        return not asked
    found = sum(int(one.useful.sum()) for one in asked)
    return found < len(asked[0].useful) and len(asked) < resampling.max_rounds


def choose(asked: Sequence[Asked]) -> Asked:
    """The batch to learn from: the first Q useful questions of all rounds.

    Where the rounds hold fewer, useless ones fill the batch, marked as such.

    Args:
      asked: rounds of Q questions each.

    Returns:
      A round of Q questions, in the order they were asked; its counters are those of all rounds.
    """
    first = asked[0]
    counters = added([one.rollout.counters for one in asked])
    if len(asked) == 1:
        rollout = dataclasses.replace(first.rollout, counters=counters)
        return dataclasses.replace(first, rollout=rollout)
    count, group = first.plan.budgets.shape
    useful = np.concatenate([one.useful for one in asked])
    order = np.argsort(~useful, kind="stable")
    index = np.sort(order[:count])
    rows = (index[:, None] * group + np.arange(group)).reshape(-1)

    def pick(parts: Sequence[Any], where: np.ndarray) -> Any:
        def leaf(*values: Any) -> Any:
            if np.ndim(values[0]) == 0:
                return values[0]
            return np.concatenate([np.asarray(value) for value in values])[where]

        return jax.tree.map(leaf, *parts)

    return Asked(
        plan=pick([one.plan for one in asked], index),
        prompts=pick([one.prompts for one in asked], rows),
        rollout=Rollout(
            pick([one.rollout.trunks for one in asked], rows),
            pick([one.rollout.branches for one in asked], rows),
            counters,
        ),
        seen=pick([one.seen for one in asked], index),
        useful=useful[index],
    )


def added(counters: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counters of several calls of `generate` as one: counts and seconds add up.

    Shares, rates and means are those of the first call.
    """
    sums = {n: sum(one[n] for one in counters) for n in counters[0] if n in _ADDITIVE}
    return {**counters[0], **sums}


def sampled_tokens(rollout: Rollout) -> int:
    """Tokens sampled for the rows of a rollout: thinking and distinct answers."""
    branches = rollout.branches
    distinct = np.asarray(branches.source) == np.arange(branches.source.shape[1])
    return int(np.sum(rollout.trunks.sampled) + np.sum(np.asarray(branches.sampled) * distinct))
