"""Resolves a config into settings records, one for each room that reads several sections.

`resolve(config)` computes every derived value once, without JAX and without a device. A room's
functions take the record of the room, or one section of the config if they read no other. A record
can also be built by hand, so that a room can be used without a config. `RolloutSpec` and
`LearnerSpec`, which need the model's shape, are built by `runs.setup`.

A room is moved in three steps, none of which changes a result: its record is added here with the
values that its functions read, its functions take the record, and their callers pass
`resolve(config)` and the name of the record.
"""

from dataclasses import dataclass

from bacr_jax.config.method_settings import RewardConfig
from bacr_jax.config.resolve import CORRECT, HOLDOUT, cap, reward_shares
from bacr_jax.config.schema import Config, DataConfig, GradingConfig


@dataclass(frozen=True)
class GraderSettings:
    """The graders of a run.

    Attributes:
      verifier: user-defined verifier FILE.py:function, or None for the graders of the question
        sets.
      rewards: names of the rewards in reward.weights, without correctness.
      reference_columns: names of the columns with reference answers, which TRL-style reward
        functions receive as parameters: one name, or none.
      processes: number and limits of the worker processes.
    """

    verifier: str | None
    rewards: tuple[str, ...]
    reference_columns: tuple[str, ...]
    processes: GradingConfig


@dataclass(frozen=True)
class TaskSettings:
    """Questions, prompts and graders of a run.

    Attributes:
      data: section `data` of the config.
      seed: seed of the run, from which made questions are sampled.
      budget_text: sentence with the budget in prompts, with `{budget}` as the placeholder. None if
        prompts contain no budget.
      largest_budget: largest budget of training and evaluation, which must fit into prompts.
      holdout: number of training questions to hold out.
      needs_holdout: True if held-out questions select the best checkpoint.
      grader: settings of the graders.
    """

    data: DataConfig
    seed: int
    budget_text: str | None
    largest_budget: int
    holdout: int
    needs_holdout: bool
    grader: GraderSettings


@dataclass(frozen=True)
class ResponseLimits:
    """Limits of prompts, thinking and answers, in tokens.

    Attributes:
      answer_tokens: maximum length of an answer.
      prompt_tokens: maximum length of a prompt.
      min: smallest budget of training.
      max: largest budget of training.
      cap: maximum number of thinking tokens if the policy receives no budget.
      grace: length of the grace window, in which a truncated trace may end at a line break.
      evaluated: budgets of evaluation.
    """

    answer_tokens: int
    prompt_tokens: int
    min: int
    max: int
    cap: int
    grace: int
    evaluated: tuple[int, ...]


@dataclass(frozen=True)
class Settings:
    """The records of all rooms that have one."""

    task: TaskSettings
    limits: ResponseLimits


def resolve(config: Config) -> Settings:
    """Returns the settings of every room. The config must have passed `config.io.check`."""
    conditioning = config.conditioning
    column = config.data.answer_column
    grader = GraderSettings(
        verifier=config.grader,
        rewards=_other_rewards(config.reward),
        reference_columns=() if column is None else (column,),
        processes=config.grading,
    )
    task = TaskSettings(
        data=config.data,
        seed=config.seed,
        budget_text=conditioning.prompt_text.strip() if conditioning.in_prompt else None,
        largest_budget=max(config.budget.max, *config.eval.budgets),
        holdout=config.eval.holdout,
        needs_holdout=config.eval.select == HOLDOUT and config.eval.every is not None,
        grader=grader,
    )
    limits = ResponseLimits(
        answer_tokens=config.rollout.answer_tokens,
        prompt_tokens=config.data.max_prompt_tokens,
        min=config.budget.min,
        max=config.budget.max,
        cap=cap(config),
        grace=config.budget.grace,
        evaluated=config.eval.budgets,
    )
    return Settings(task, limits)


def _other_rewards(reward: RewardConfig) -> tuple[str, ...]:
    """Returns the names of all rewards except correctness."""
    return tuple(name for name in reward_shares(reward) if name != CORRECT)
