"""Scores answers with the grader and with other rewards, and computes their weighted sum.

`algorithm.iterate` calls these functions. The graders are implemented in `prompts.graders`.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from bacr_jax.config import RewardConfig
from bacr_jax.config.derived import CORRECT, reward_shares
from bacr_jax.methods import GroupBatch
from bacr_jax.rollout import Rollout
from bacr_jax.training.dynamic_sampling import BatchPlan
from bacr_jax.training.run import Run
from bacr_jax.types import Poll

# Folded into the rollout's key to get the PRNG key for `grading.flip_rate`.
_FLIP_STREAM = 7


def verify(
    run: Run, plan: BatchPlan, rollout: Rollout, key: Array, poll: Poll = None
) -> tuple[Float[np.ndarray, "Q G M A"], Any]:
    """Grades every answer at every truncation point.

    The outcome r(q, t_{:b_j}) of Eq. 7 is the correctness of an answer to question q after the
    first b_j tokens of trace t. Grading runs on the host. If `grading.flip_rate` is set, random
    outcomes are flipped to simulate grading errors.

    Args:
      key: PRNG key of the rollout, used to select the flipped outcomes.

    Returns:
      The outcomes in [0, 1] after the flips, for Q questions, G traces, M truncation points and A
      answers per point, and the grader's original verdicts.
    """
    references, questions = references_of(run, plan)
    outcomes, verdicts = run.task_data.grade_answers(
        rollout.trunks, rollout.branches, references, questions, poll
    )
    flip_rate = run.config.grading.flip_rate
    if flip_rate:
        flip_key = jax.random.fold_in(key, _FLIP_STREAM)
        source = np.asarray(rollout.branches.source)
        outcomes = flipped(flip_key, outcomes, source, rate=flip_rate)
    return outcomes.reshape(*plan.cuts.shape, run.method.answers), verdicts


def flipped(
    key: Array, outcomes: Float[np.ndarray, "B N"], source: Int[np.ndarray, "B N"], *, rate: float
) -> Float[np.ndarray, "B N"]:
    """Replaces each outcome r by 1 - r with probability `rate`.

    If several truncation points (cuts) share an answer, its outcome is flipped at all of these cuts
    or at none.

    Args:
      source: index of the answer that is used at each cut (`Branches.source`).
      rate: probability that an outcome is flipped.
    """
    flips = np.asarray(jax.random.bernoulli(key, rate, outcomes.shape))
    shared_flips = np.take_along_axis(flips, source, axis=1)
    return np.where(shared_flips, 1.0 - outcomes, outcomes).astype(np.float32)


def reward_scores(
    run: Run,
    plan: BatchPlan,
    rollout: Rollout,
    outcomes: Float[np.ndarray, "Q G M A"],
    poll: Poll = None,
) -> dict[str, Float[np.ndarray, "Q G M A"]]:
    """Returns the score of each answer under every reward in `reward.weights`, by reward name.

    The result is empty if correctness is the only reward.
    """
    if not run.task_data.rewards:
        return {}
    references, questions = references_of(run, plan)
    scores = run.task_data.reward_scores(
        rollout.trunks, rollout.branches, references, questions, poll
    )
    by_name = {name: scores[name].reshape(outcomes.shape) for name in scores}
    return {CORRECT: outcomes, **by_name}


def credited(reward: RewardConfig, group_batch: GroupBatch) -> GroupBatch:
    """Returns the batch from which rewards and advantages are computed.

    The outcomes of `group_batch` are replaced by the weighted sum of all reward scores
    (`reward.weights`). If correctness is the only reward, the batch is returned unchanged.
    """
    scores: Any = group_batch.by_reward
    if not scores:
        return group_batch
    shares = reward_shares(reward)
    mixed = sum(share * scores[name] for name, share in shares.items())
    return dataclasses.replace(group_batch, by_answer=mixed, outcomes=mixed.mean(-1))


def references_of(run: Run, plan: BatchPlan) -> tuple[list[str], list[str]]:
    """Returns a list of the traces' reference answers and a list of their questions."""
    data = run.task_data.train.set
    references = [data.answers[question] for question in plan.rows]
    questions = [data.questions[question] for question in plan.rows]
    return references, questions
