"""A run in two parts: what stays fixed (`Run`) and what an iteration changes (`RunState`)."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from bacr_jax import curriculum
from bacr_jax.config import Config
from bacr_jax.curriculum import CurriculumState, difficulty
from bacr_jax.curriculum.difficulty import DifficultyPosterior
from bacr_jax.data.environment import Environment, Questions
from bacr_jax.data.stream import QuestionStream
from bacr_jax.learner import train_step
from bacr_jax.learner.batch import empty_batch
from bacr_jax.learner.optimizer import policy_optimizer, value_optimizer
from bacr_jax.learner.policy import Policy
from bacr_jax.learner.train_step import TrainState
from bacr_jax.learner.updates import Updates
from bacr_jax.methods import Method
from bacr_jax.model import adapters
from bacr_jax.rollout import RolloutSpec, sampling_params
from bacr_jax.rollout import precompile as precompile_rollout
from bacr_jax.types import pytree

Params = dict[str, Any]


@pytree
class RunState:
    """Everything an iteration changes; what a checkpoint holds.

    Attributes:
      train: parameters and optimizers.
      curriculum: pass rates and schedule.
      stream: questions drawn so far from each group (data.order=shuffled), else zeros.
      generated_tokens: tokens sampled so far in training; a Python number, since 32 bits last for a
        thousand steps of a 7B run only.
      method_state: what the method remembers; None if nothing.
      difficulty: record of every problem, with continuous difficulty; else None.
    """

    train: TrainState
    curriculum: CurriculumState
    stream: Int[np.ndarray, "K"]
    generated_tokens: int
    method_state: Any = None
    difficulty: DifficultyPosterior | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """The fixed parts of a run; made by `make_run`.

    Attributes:
      config: settings.
      environment: questions, rules, grader.
      method: pure functions of the training method.
      policy: compiled forms.
      total_steps: iterations in the whole run, for the schedules.
      key: all randomness of training is folded from it and the number of the step.
      policy_tx: optimizer of the policy.
      value_tx: optimizer of the value head.
      updates: line 14 of Algorithm 1.
      levels: difficulty group of each training question, on the host.
      num_groups: K; with continuous difficulty every question is a group of its own.
      group_of: group of each training question.
      group_sizes: questions in each group.
      coordinate: of each question on the scale of difficulty (continuous difficulty).
      stream: order of the questions within their groups; None: drawn anew.
      frozen: base of the adapters, which no update changes; empty where all weights are trained.
    """

    config: Config
    environment: Environment
    method: Method
    policy: Policy
    total_steps: int
    key: Array
    policy_tx: optax.GradientTransformation
    value_tx: optax.GradientTransformation
    updates: Updates
    levels: Int[np.ndarray, "n"]
    num_groups: int
    group_of: Int[Array, "n"]
    group_sizes: Int[Array, "K"]
    coordinate: Float[Array, "n"]
    stream: QuestionStream | None
    frozen: Params = dataclasses.field(default_factory=dict)

    def params(self, train: TrainState) -> Params:
        """All parameters of the policy: those that are trained, and the frozen base."""
        return {**self.frozen, **train.policy}

    @property
    def continuous(self) -> bool:
        """Whether every question has a pass rate of its own."""
        return self.config.curriculum.difficulty == "continuous"

    def rollout_spec(self, answers: int, *, probe: bool = False) -> RolloutSpec:
        """Shapes of training rollouts with so many answers per cut; a probe has no groups."""
        spec = dataclasses.replace(self.policy.rollout, answers=answers)
        return dataclasses.replace(spec, group_size=1) if probe else spec


def make_run(
    config: Config, environment: Environment, method: Method, policy: Policy, total_steps: int
) -> Run:
    """Prepares optimizers, groups and the order of questions; arguments as in `Run`."""
    updates = total_steps * config.train.minibatches
    policy_tx = policy_optimizer(config.optimizer, updates)
    value_tx = value_optimizer(config.value, config.optimizer, updates)
    levels = np.asarray(environment.train.set.groups)
    continuous = config.curriculum.difficulty == "continuous"
    num_groups = len(levels) if continuous else config.data.num_groups
    group_of = np.arange(len(levels)) if continuous else levels
    stream = None
    if config.data.order == "shuffled":
        stream = QuestionStream(group_of, num_groups=num_groups, seed=config.seed)
    groups = jnp.asarray(group_of, jnp.int32)
    return Run(
        config=config,
        environment=environment,
        method=method,
        policy=policy,
        total_steps=total_steps,
        key=jax.random.fold_in(jax.random.key(config.seed), 1),
        policy_tx=policy_tx,
        value_tx=value_tx,
        updates=Updates(
            policy.learner, config.train, policy_tx, value_tx, environment.rules.allowed_tokens
        ),
        levels=levels,
        num_groups=num_groups,
        group_of=groups,
        group_sizes=jnp.asarray(np.bincount(group_of, minlength=num_groups), jnp.int32),
        coordinate=difficulty_coordinate(environment.train, config.curriculum.coordinate),
        stream=stream,
    )


def total_steps(config: Config, questions: int) -> int:
    """Iterations of a run on so many training questions."""
    train = config.train
    if train.steps is not None:
        return train.steps
    return math.ceil(train.epochs * questions / config.rollout.questions)


def difficulty_coordinate(
    questions: Questions, kind: Literal["level", "prompt_length"]
) -> Float[Array, "n"]:
    """Where each problem stands on the scale of difficulty (an unknown level: hardest)."""
    if kind == "prompt_length":
        return jnp.asarray(questions.prompts.lengths, jnp.float32)
    levels = np.asarray(questions.set.levels)
    return jnp.asarray(np.where(levels < 1, max(levels.max(), 1), levels), jnp.float32)


def init_state(run: Run, params: Any, value_head: Any) -> RunState:
    """A fresh state around given parameters (line 1 of Algorithm 1), of which it holds the trained.

    Args:
      run: what stays fixed.
      params: of the policy, with or without a frozen base.
      value_head: its parameters; None when the method has none.
    """
    mu0: Any = run.config.curriculum.mu0
    if run.continuous and isinstance(mu0, tuple):
        mu0 = tuple(mu0[group] for group in run.levels)
    make = lambda params, head: train_step.init_state(params, head, run.policy_tx, run.value_tx)
    return RunState(
        train=run.policy.make(make, adapters.split(params)[1], value_head),
        curriculum=curriculum.init_curriculum(run.num_groups, mu0=mu0),
        stream=np.zeros(run.num_groups, np.int32),
        generated_tokens=0,
        method_state=run.method.init_state(len(run.levels)),
        difficulty=difficulty.init_difficulty(run.num_groups) if run.continuous else None,
    )


def precompile(
    run: Run,
    state: RunState,
    reference: Any = None,
    on_program: Callable[[str, int, int], None] | None = None,
) -> None:
    """Compiles every form of rollouts and updates: no iteration after the first compiles.

    Args:
      run: what stays fixed.
      state: the first.
      reference: parameters of the reference policy, for a KL term; None without one.
      on_program: called with (of what, programs done, programs in all) before each is compiled and
        after the last; raises to leave the rest.
    """
    tell = lambda what: None if on_program is None else functools.partial(on_program, what)
    params, settings = run.params(state.train), run.config
    everyone = np.arange(len(run.environment.train))
    prompts = run.environment.train.at(everyone, np.full_like(everyone, settings.budget.max))
    one_trace = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    cuts = jax.eval_shape(run.method.cuts, run.key, one_trace).shape[-1]
    rows = settings.rollout.questions * settings.rollout.group_size
    forms = [("rollouts", cuts, run.method.answers, rows)]
    if settings.curriculum.pass_rate == "probe":
        forms.append(("probes", 1, 1, min(settings.curriculum.probe_size, len(run.levels))))
    for what, num_cuts, answers, rows in forms:
        precompile_rollout(
            run.policy.decode_params(params),
            prompts,
            num_cuts,
            spec=run.rollout_spec(answers, probe=what == "probes"),
            rules=run.environment.rules,
            sampling=sampling_params(settings.rollout.temperature),
            phi_of=run.policy.phi_of(params),
            rows=rows,
            on_program=tell(what),
        )
    rollout = settings.rollout
    batch = empty_batch(
        rollout.questions * rollout.group_size,
        prompt=prompts.tokens.shape[1],
        thinking=run.policy.rollout.max_sampled,
        cuts=cuts * run.method.answers,
        suffix=run.environment.rules.suffix_length,
        answer=rollout.answer_tokens,
    )
    run.updates.compile(
        state.train, batch, reference=reference, frozen=run.frozen, on_program=tell("updates")
    )
