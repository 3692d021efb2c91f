"""What answers earn: the grader's verdicts, other rewards' scores, and what of them is credited."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from bacr_jax.config import Config, derived
from bacr_jax.methods import GroupBatch
from bacr_jax.rollout import Rollout
from bacr_jax.training.dynamic_sampling import BatchPlan
from bacr_jax.training.run import Run
from bacr_jax.types import Poll


def verify(
    run: Run, plan: BatchPlan, rollout: Rollout, key: Array, poll: Poll = None
) -> tuple[Float[np.ndarray, "Q G M A"], Any]:
    """r(q, t_{:b_j}) of every answer at every cut, by the grader on the host, and its verdicts.

    With `grading.flip_rate` outcomes are `flipped`; verdicts stay as they are.
    """
    references, questions = references_of(run, plan)
    outcomes, verdicts = run.environment.grade_answers(
        rollout.branches, references, questions, poll
    )
    if rate := run.config.grading.flip_rate:
        source = np.asarray(rollout.branches.source)
        outcomes = flipped(jax.random.fold_in(key, 7), outcomes, source, rate=rate)
    return outcomes.reshape(*plan.cuts.shape, run.method.answers), verdicts


def flipped(
    key: Array, outcomes: Float[np.ndarray, "B N"], source: Int[np.ndarray, "B N"], *, rate: float
) -> Float[np.ndarray, "B N"]:
    """Outcomes of which a share is 1 - r instead, an answer's alike at all places that it serves.

    Args:
      source: index of the answer that serves each place (`Branches.source`).
    """
    drawn = np.asarray(jax.random.bernoulli(key, rate, outcomes.shape))
    turned = np.take_along_axis(drawn, source, axis=1)
    return np.where(turned, 1.0 - outcomes, outcomes).astype(np.float32)


def reward_scores(
    run: Run,
    plan: BatchPlan,
    rollout: Rollout,
    outcomes: Float[np.ndarray, "Q G M A"],
    poll: Poll = None,
) -> dict[str, Float[np.ndarray, "Q G M A"]]:
    """Each answer's score by every reward of `reward.weights`; empty: correctness is all."""
    if not run.environment.rewards:
        return {}
    references, questions = references_of(run, plan)
    scores = run.environment.reward_scores(
        rollout.trunks, rollout.branches, references, questions, poll
    )
    by_name = {name: scores[name].reshape(outcomes.shape) for name in scores}
    return {derived.CORRECT: outcomes, **by_name}


def credited(config: Config, group_batch: GroupBatch) -> GroupBatch:
    """The batch as rewards and advantages are made of it: its outcomes are `reward.weights`'."""
    scores: Any = group_batch.by_reward
    if not scores:
        return group_batch
    shares = derived.reward_shares(config)
    mixed = sum(share * scores[name] for name, share in shares.items())
    return dataclasses.replace(group_batch, by_answer=mixed, outcomes=mixed.mean(-1))


def references_of(run: Run, plan: BatchPlan) -> tuple[list[str], list[str]]:
    """Gold answer and question of every trace."""
    data = run.environment.train.set
    return [data.answers[i] for i in plan.rows], [data.questions[i] for i in plan.rows]
