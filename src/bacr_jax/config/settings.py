"""Splits a config into settings records (frozen dataclasses), each for a part of the package.

`resolve(config)` computes every derived value, without JAX and without a device. The functions of a
subpackage take its record, or one section of the config if they need no other section. A record can
also be built by hand, so that the subpackage can be used without a config. `runs.setup` builds
`RolloutSpec` and `LearnerSpec`, which need the model's shape.

`config.checks` also uses derived values. Therefore `resolve` accepts every config whose numbers are
within their bounds, even if its settings contradict each other.
"""

import functools
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, NoReturn

from bacr_jax.config import derived
from bacr_jax.config.method_settings import (
    AdvantageConfig,
    AnytimeConfig,
    BudgetConfig,
    ConditioningConfig,
    CurriculumConfig,
    CutsConfig,
    DapoConfig,
    DistillConfig,
    ElasticConfig,
    HapoConfig,
    L1Config,
    LengthConfig,
    LossConfig,
    RewardConfig,
    SelfBudgeterConfig,
    ValueConfig,
)
from bacr_jax.config.schema import (
    AdapterConfig,
    Config,
    DataConfig,
    EvalConfig,
    GradingConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    TrainConfig,
    WarmupConfig,
)


@dataclass(frozen=True)
class GraderSettings:
    """Settings of the graders of a run.

    Attributes:
      verifier: user-defined verifier FILE.py:function, or None for the graders of the question
        sets.
      rewards: names of the rewards in `reward.weights`, without correctness.
      reference_columns: name of the data column with the reference answers, under which TRL-style
        reward functions receive them as a parameter. A tuple of one name, or an empty tuple.
      processes: number and limits of the worker processes.
    """

    verifier: str | None
    rewards: tuple[str, ...]
    reference_columns: tuple[str, ...]
    processes: GradingConfig


@dataclass(frozen=True)
class TaskSettings:
    """Settings of the questions, prompts and graders of a run.

    Attributes:
      data: section `data` of the config.
      seed: seed of the run, with which generated questions are sampled.
      budget_text: sentence with the budget in prompts, with `{budget}` as the placeholder. None if
        prompts contain no budget.
      largest_budget: largest budget of training and evaluation, which must fit into prompts.
      holdout: number of training questions to hold out.
      needs_holdout: True if held-out questions select the best checkpoint.
      builtin_vocab: name of the built-in tokenizer for the data, or None.
      grader: settings of the graders.
    """

    data: DataConfig
    seed: int
    budget_text: str | None
    largest_budget: int
    holdout: int
    needs_holdout: bool
    builtin_vocab: str | None
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
      largest_evaluated: maximum number of thinking tokens in an evaluation, without the grace
        window.
    """

    answer_tokens: int
    prompt_tokens: int
    min: int
    max: int
    cap: int
    grace: int
    evaluated: tuple[int, ...]
    largest_evaluated: int


@dataclass(frozen=True)
class MethodSettings:
    """The settings that a training method can read. The method's `make(config)` takes this record.

    The sections have the same names and defaults as in the config. Derived values are computed from
    the sections when they are read, so that they remain correct if a method replaces a section.

    Attributes:
      method: name of the method, or the path of a user's method.
      evaluated: `eval.budgets`, in tokens. They are the budgets that `budget.prior=choices` samples
        if `budget.choices` is empty.
    """

    method: str = "bacr"
    conditioning: ConditioningConfig = ConditioningConfig()
    budget: BudgetConfig = BudgetConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    cuts: CutsConfig = CutsConfig()
    reward: RewardConfig = RewardConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    value: ValueConfig = ValueConfig()
    anytime: AnytimeConfig = AnytimeConfig()
    dapo: DapoConfig = DapoConfig()
    hapo: HapoConfig = HapoConfig()
    selfbudgeter: SelfBudgeterConfig = SelfBudgeterConfig()
    l1: L1Config = L1Config()
    length: LengthConfig = LengthConfig()
    elastic: ElasticConfig = ElasticConfig()
    distill: DistillConfig = DistillConfig()
    loss: LossConfig = LossConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    evaluated: tuple[int, ...] = EvalConfig().budgets

    @functools.cached_property
    def budget_choices(self) -> tuple[int, ...]:
        """The budgets, in tokens, from which `budget.prior=choices` samples."""
        return derived.drawn(self.budget, self.evaluated)

    @functools.cached_property
    def budget_range(self) -> tuple[int, int]:
        """The smallest and the largest budget, in tokens, that `budget.prior` can sample."""
        return derived.prior_range(self.budget, self.evaluated)

    @functools.cached_property
    def reward_shares(self) -> dict[str, float]:
        """The normalized weights of the rewards, by name. Empty for fewer than two rewards."""
        return derived.reward_shares(self.reward)

    # Hidden from type checkers, because with `__getattr__` they would accept any attribute name.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Raises AttributeError, with the names of the sections, for any other name."""
            names = ", ".join(field.name for field in fields(self))
            raise AttributeError(
                f"{name!r} is not one of the settings that a method can read; use one of {names}"
            )


@dataclass(frozen=True)
class PolicySettings:
    """The settings of a policy's model, devices, learner and rollouts.

    Attributes:
      limits: limits of prompts, thinking and answers.
      eval_slots: number of sequences that an evaluation decodes at a time. None for the same number
        as in a training rollout.
      has_warmup: True if a supervised warm-up trains the policy first.
    """

    model: ModelConfig
    adapter: AdapterConfig
    conditioning: ConditioningConfig
    value: ValueConfig
    loss: LossConfig
    distill: DistillConfig
    rollout: RolloutConfig
    train: TrainConfig
    mesh: MeshConfig
    limits: ResponseLimits
    eval_slots: int | None
    has_warmup: bool

    @property
    def param_dtype(self) -> str:
        """The dtype of the model's weights."""
        return derived.param_dtype(self.model, self.adapter)


@dataclass(frozen=True)
class WarmupSettings:
    """The settings of the supervised warm-up.

    Attributes:
      warmup: section `warmup` of the config, without the seed.
      data: section `data` of the config.
      seed: seed of the warm-up.
      model_path: folder of the pretrained model, or None.
      largest_budget: largest budget of training, in tokens.
      prompt_budgets: all budgets of training and evaluation, in tokens. The prompts of the warm-up
        contain these budgets, so that the policy sees every number. None if prompts contain no
        budget.
    """

    warmup: WarmupConfig
    data: DataConfig
    seed: int
    model_path: str | None
    largest_budget: int
    prompt_budgets: tuple[int, ...] | None


@dataclass(frozen=True)
class Settings:
    """The settings records of a run, computed by `resolve`."""

    task: TaskSettings
    limits: ResponseLimits
    method: MethodSettings
    policy: PolicySettings
    warmup: WarmupSettings


def resolve(config: Config) -> Settings:
    """Returns the settings records of a config, whose numbers must be within their bounds."""
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
        largest_budget=max([config.budget.max, *config.eval.budgets]),
        holdout=config.eval.holdout,
        needs_holdout=config.eval.select == derived.HOLDOUT and config.eval.every is not None,
        builtin_vocab=derived.builtin_vocab(config.data),
        grader=grader,
    )
    limits = ResponseLimits(
        answer_tokens=config.rollout.answer_tokens,
        prompt_tokens=config.data.max_prompt_tokens,
        min=config.budget.min,
        max=config.budget.max,
        cap=derived.cap(config.budget),
        grace=config.budget.grace,
        evaluated=config.eval.budgets,
        largest_evaluated=derived.largest_evaluated(config.budget, config.eval),
    )
    policy = PolicySettings(
        model=config.model,
        adapter=config.adapter,
        conditioning=conditioning,
        value=config.value,
        loss=config.loss,
        distill=config.distill,
        rollout=config.rollout,
        train=config.train,
        mesh=config.mesh,
        limits=limits,
        eval_slots=config.eval.slots,
        has_warmup=config.warmup.steps > 0,
    )
    sections = {field.name for field in fields(MethodSettings)} - {"evaluated"}
    method = MethodSettings(
        **{name: getattr(config, name) for name in sections}, evaluated=config.eval.budgets
    )
    warmup = WarmupSettings(
        warmup=replace(config.warmup, seed=None),
        data=config.data,
        seed=config.seed if config.warmup.seed is None else config.warmup.seed,
        model_path=config.model.path,
        largest_budget=config.budget.max,
        prompt_budgets=derived.all_budgets(config.budget, config.eval.budgets)
        if conditioning.in_prompt
        else None,
    )
    return Settings(task, limits, method, policy, warmup)


def _other_rewards(reward: RewardConfig) -> tuple[str, ...]:
    """Returns the names of all rewards except correctness."""
    return tuple(name for name in derived.reward_shares(reward) if name != derived.CORRECT)
