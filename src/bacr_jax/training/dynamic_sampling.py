"""Rounds of sampling: more questions until enough of them are of use (DAPO), and the choice."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from bacr_jax.methods import DynamicSampling, GroupBatch
from bacr_jax.rollout import Rollout
from bacr_jax.types import Prompts, pytree

# Counters of a rollout that are counts or seconds.
_ADDITIVE = ("row_steps", "tokens", "prefill_tokens", "prefill_s", "decode_s", "answer_s")


@pytree
class BatchPlan:
    """Questions, budgets and cuts of one iteration."""

    questions: Int[Array, "Q"]
    groups: Int[Array, "Q"]
    budgets: Int[Array, "Q G"]
    cuts: Int[Array, "Q G M"]

    @property
    def rows(self) -> Int[np.ndarray, "B"]:
        """Question of each of the Q G rows."""
        return np.repeat(np.asarray(self.questions), self.budgets.shape[1])


@dataclasses.dataclass(frozen=True)
class Round:
    """What was asked, and what came back.

    Attributes:
      useful: questions to be learned from; the others have no part in the loss.
      verdicts: [Q G, N] the grader's verdict on every answer, for the logs; None: not graded here.
    """

    plan: BatchPlan
    prompts: Prompts
    rollout: Rollout
    group_batch: GroupBatch
    useful: Bool[np.ndarray, "Q"]
    verdicts: Any = None

    @property
    def tokens(self) -> int:
        """Tokens sampled for this round, and for those it was chosen from."""
        return int(self.rollout.counters["tokens"])

    @property
    def outcomes(self) -> Float[np.ndarray, "Q G N"]:
        """Correctness of each of a row's N answers."""
        by_answer = np.asarray(self.group_batch.by_answer)
        return by_answer.reshape(*by_answer.shape[:2], -1)


def wants_more(rounds: Sequence[Round], dynamic_sampling: DynamicSampling | None) -> bool:
    """Whether another round is due: the first always, more until Q questions are of use."""
    if not rounds or dynamic_sampling is None:
        return not rounds
    useful = sum(int(one.useful.sum()) for one in rounds)
    return useful < len(rounds[0].useful) and len(rounds) < dynamic_sampling.max_rounds


def sample_rounds(
    sample_round: Callable[[int, Any], tuple[Round, Any]],
    cursors: Any,
    dynamic_sampling: DynamicSampling | None,
) -> tuple[list[Round], Any]:
    """Rounds of an iteration, one or as many as the method wants.

    Args:
      sample_round: (number of the round, place in the stream of questions) -> (round, new place).
    """
    rounds: list[Round] = []
    while wants_more(rounds, dynamic_sampling):
        one, cursors = sample_round(len(rounds), cursors)
        rounds.append(one)
    return rounds, cursors


def choose(rounds: Sequence[Round]) -> Round:
    """The batch to learn from: the first Q useful questions of all rounds.

    Where the rounds hold fewer, useless ones fill the batch, marked as such. They are in the order
    they were asked; counters are those of all rounds.
    """
    first = rounds[0]
    if len(rounds) == 1:
        return first
    count, group = first.plan.budgets.shape
    useful = np.concatenate([one.useful for one in rounds])
    order = np.argsort(~useful, kind="stable")
    index = np.sort(order[:count])
    rows = (index[:, None] * group + np.arange(group)).reshape(-1)

    def pick(parts: Sequence[Any], where: np.ndarray) -> Any:
        def leaf(*values: Any) -> Any:
            if np.ndim(values[0]) == 0:
                return values[0]
            return np.concatenate([np.asarray(value) for value in values])[where]

        return jax.tree.map(leaf, *parts)

    return Round(
        plan=pick([one.plan for one in rounds], index),
        prompts=pick([one.prompts for one in rounds], rows),
        rollout=Rollout(
            pick([one.rollout.trunks for one in rounds], rows),
            pick([one.rollout.branches for one in rounds], rows),
            added([one.rollout.counters for one in rounds]),
        ),
        group_batch=pick([one.group_batch for one in rounds], index),
        useful=useful[index],
        verdicts=pick([one.verdicts for one in rounds], rows),
    )


def added(counters: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counters of several calls of `generate` as one: counts and seconds add up.

    Shares, rates and means are those of the first call.
    """
    sums = {n: sum(one[n] for one in counters) for n in counters[0] if n in _ADDITIVE}
    return {**counters[0], **sums}
