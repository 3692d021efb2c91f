"""Samples rounds of questions until enough questions are useful (dynamic sampling, DAPO).

`algorithm.iterate` calls `sample_rounds` to sample, and `choose` to select the batch. Methods
without dynamic sampling sample one round per iteration.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from bacr_jax.methods import DynamicSampling, GroupBatch
from bacr_jax.rollout import Rollout
from bacr_jax.types import Prompts, pytree

# Counters of a rollout that are counts or seconds. They are added when rounds are merged.
_ADDITIVE = ("row_steps", "tokens", "prefill_tokens", "prefill_s", "decode_s", "answer_s")


@pytree
class BatchPlan:
    """Questions, budgets and truncation points of one round of sampling.

    Attributes:
      questions: index of each of the Q questions in the training set.
      groups: difficulty group of each question.
      budgets: thinking budgets of the G traces of each question, in tokens.
      cuts: the M truncation points of each trace, in thinking tokens. An answer is sampled at each
        of them.
      shuffled_budgets: budgets that the policy receives as input with budget.shuffle_input. Traces
        are truncated at `budgets` nevertheless. None if the policy receives `budgets` as input.
    """

    questions: Int[Array, "Q"]
    groups: Int[Array, "Q"]
    budgets: Int[Array, "Q G"]
    cuts: Int[Array, "Q G M"]
    shuffled_budgets: Int[Array, "Q G"] | None = None

    @property
    def input_budgets(self) -> Int[np.ndarray, "B"]:
        """Returns the budget that the policy receives as input, for each row of the batch."""
        budgets = self.budgets if self.shuffled_budgets is None else self.shuffled_budgets
        return np.asarray(budgets).reshape(-1)

    @property
    def rows(self) -> Int[np.ndarray, "B"]:
        """Returns the question index of each row of the batch (one row per trace, B = Q * G)."""
        return np.repeat(np.asarray(self.questions), self.budgets.shape[1])


# Number that is folded into the key of a plan to shuffle the budgets as input.
_SHUFFLE = 7


def with_shuffled_input(plan: BatchPlan, key: Array) -> BatchPlan:
    """Returns a plan whose input budgets are the batch's budgets in random order.

    This is a control experiment (budget.shuffle_input). The input budget of a trace has the same
    distribution as the batch's budgets, but is independent of the budget that truncates the trace.

    Args:
      key: PRNG key of the plan.
    """
    # The key of the plan is split for other random numbers, so a constant is folded in to get an
    # independent key.
    shuffle_key = jax.random.fold_in(key, _SHUFFLE)
    flat = plan.budgets.reshape(-1)
    shuffled = jax.random.permutation(shuffle_key, flat).reshape(plan.budgets.shape)
    return dataclasses.replace(plan, shuffled_budgets=shuffled)


@dataclasses.dataclass(frozen=True)
class Round:
    """A batch of Q questions with their traces and outcomes.

    Without dynamic sampling, an iteration has a single round.

    Attributes:
      plan: questions, budgets and truncation points.
      prompts: one prompt per trace.
      rollout: sampled thinking and answers.
      group_batch: inputs of the method's rewards and advantages.
      useful: True for questions to learn from. All other questions are excluded from the loss.
      verdicts: the grader's verdict on every answer, for the logs, with shape [Q * G, N] for N
        answers per trace. None if this process did not grade the answers.
    """

    plan: BatchPlan
    prompts: Prompts
    rollout: Rollout
    group_batch: GroupBatch
    useful: Bool[np.ndarray, "Q"]
    verdicts: Any = None

    @property
    def tokens(self) -> int:
        """Returns the number of sampled tokens.

        If questions of several rounds were selected into this round, the tokens of all these rounds
        are counted.
        """
        return int(self.rollout.counters["tokens"])

    @property
    def outcomes(self) -> Float[np.ndarray, "Q G N"]:
        """Returns the correctness of each of a trace's N answers, in [0, 1]."""
        by_answer = np.asarray(self.group_batch.by_answer)
        return by_answer.reshape(*by_answer.shape[:2], -1)


def needs_round(rounds: Sequence[Round], dynamic_sampling: DynamicSampling | None) -> bool:
    """True if another round must be sampled.

    The first round is always sampled. Dynamic sampling then continues until Q questions are useful
    (`Round.useful`) or `max_rounds` rounds have been sampled.
    """
    if not rounds:
        return True
    if dynamic_sampling is None or len(rounds) >= dynamic_sampling.max_rounds:
        return False
    num_useful = sum(int(one.useful.sum()) for one in rounds)
    return num_useful < len(rounds[0].useful)


def sample_rounds(
    sample_round: Callable[[int, Any], tuple[Round, Any]],
    cursors: Any,
    dynamic_sampling: DynamicSampling | None,
) -> tuple[list[Round], Any]:
    """Samples the rounds of one iteration.

    Args:
      sample_round: function that maps the index of a round and the cursors to the round and the
        updated cursors.
      cursors: number of questions drawn from each difficulty group before the first round.
      dynamic_sampling: settings of dynamic sampling. None samples a single round.

    Returns:
      The rounds, and the cursors after the last round.
    """
    rounds: list[Round] = []
    while needs_round(rounds, dynamic_sampling):
        one, cursors = sample_round(len(rounds), cursors)
        rounds.append(one)
    return rounds, cursors


def choose(rounds: Sequence[Round]) -> Round:
    """Selects the first Q useful questions of all rounds as the batch to learn from.

    If fewer than Q questions are useful, the batch is filled with other questions, whose `useful`
    is False. The questions keep the order in which they were sampled. The rollout counters, such as
    the number of tokens, are merged over all rounds.
    """
    first = rounds[0]
    if len(rounds) == 1:
        return first
    num_questions, group_size = first.plan.budgets.shape
    useful = np.concatenate([one.useful for one in rounds])
    useful_first = np.argsort(~useful, kind="stable")
    questions = np.sort(useful_first[:num_questions])
    rows = (questions[:, None] * group_size + np.arange(group_size)).reshape(-1)
    rollout = Rollout(
        _select([one.rollout.trunks for one in rounds], rows),
        _select([one.rollout.branches for one in rounds], rows),
        add_counters([one.rollout.counters for one in rounds]),
    )
    return Round(
        plan=_select([one.plan for one in rounds], questions),
        prompts=_select([one.prompts for one in rounds], rows),
        rollout=rollout,
        group_batch=_select([one.group_batch for one in rounds], questions),
        useful=useful[questions],
        verdicts=_select([one.verdicts for one in rounds], rows),
    )


def _select(parts: Sequence[Any], index: np.ndarray) -> Any:
    """Concatenates pytrees along their first axis and selects the entries at `index`.

    Scalar leaves are copied from the first pytree.
    """

    def select_leaf(*values: Any) -> Any:
        if np.ndim(values[0]) == 0:
            return values[0]
        return np.concatenate([np.asarray(value) for value in values])[index]

    return jax.tree.map(select_leaf, *parts)


def add_counters(counters: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merges the counters of several rollouts.

    Counts and seconds are added. Shares, rates and means are copied from the first rollout.
    """
    joined = dict(counters[0])
    for name in _ADDITIVE:
        if name in joined:
            joined[name] = sum(one[name] for one in counters)
    return joined
