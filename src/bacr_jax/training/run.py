"""A run in two parts: what stays fixed (`Run`) and what an iteration changes (`RunState`)."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from bacr_jax import curriculum
from bacr_jax.config import Config
from bacr_jax.curriculum import CurriculumState
from bacr_jax.learner import train_step
from bacr_jax.learner.batch import empty_batch
from bacr_jax.learner.optimizer import policy_optimizer, value_optimizer
from bacr_jax.learner.train_step import TrainState
from bacr_jax.learner.updates import Updates
from bacr_jax.methods import Method
from bacr_jax.model import adapters
from bacr_jax.prompts.environment import Environment
from bacr_jax.questions.stream import QuestionStream
from bacr_jax.rollout import Listeners, Rollout, Rows, Sampler, generate, sampling_params
from bacr_jax.rollout import precompile as precompile_rollout
from bacr_jax.rollout.fleet import SampleTraces
from bacr_jax.runs.setup import Policy
from bacr_jax.training.ahead import InHand
from bacr_jax.training.dynamic_sampling import BatchPlan
from bacr_jax.types import Branches, Params, Poll, Prompts, Trunks, pytree


@pytree
class RunState:
    """Everything an iteration changes; what a checkpoint holds.

    Attributes:
      stream: questions drawn so far from each group (data.order=shuffled), else zeros.
      generated_tokens: tokens sampled so far in training; a Python number, since 32 bits last for a
        thousand steps of a 7B run only.
      method_state: running means and other state of the method; None if it has none.
    """

    train: TrainState
    curriculum: CurriculumState
    stream: Int[np.ndarray, "K"]
    generated_tokens: int
    method_state: Any = None


@pytree
class RunStateAhead(RunState):
    """The same with the batch to learn from next, which was sampled ahead (rollout.ahead)."""

    in_hand: InHand = None  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """The fixed parts of a run; made by `make_run`.

    Attributes:
      total_steps: iterations in the whole run, for the schedules.
      key: all randomness of training is folded from it and the number of the step.
      updates: line 14 of Algorithm 1, with the optimizers.
      group_of: difficulty group of each training question.
      stream: order of the questions within their groups; None: drawn anew.
      frozen: base of the adapters, which no update changes; empty where all weights are trained.
    """

    config: Config
    environment: Environment
    method: Method
    policy: Policy
    total_steps: int
    key: Array
    updates: Updates
    group_of: Int[Array, "n"]
    group_sizes: Int[Array, "K"]
    stream: QuestionStream | None
    sample: SampleTraces
    frozen: Params = dataclasses.field(default_factory=dict)

    def params(self, train: TrainState) -> Params:
        """All parameters of the policy: those that are trained, and the frozen base."""
        return {**self.frozen, **train.policy}

    def sampler(self, params: Params) -> Sampler:
        """Of training rollouts under these parameters."""
        return Sampler(
            self.policy.rollout,
            self.environment.rules,
            sampling_params(self.config.rollout.temperature),
            self.policy.phi_of(params),
        )


def make_run(
    config: Config, environment: Environment, method: Method, policy: Policy, total_steps: int
) -> Run:
    """Prepares optimizers, groups and the order of questions; arguments as in `Run`."""
    updates = total_steps * config.train.minibatches
    groups = np.asarray(environment.train.set.groups)
    num_groups, stream = config.data.num_groups, None
    if config.data.order == "shuffled":
        stream = QuestionStream(groups, num_groups=num_groups, seed=config.seed)
    return Run(
        config=config,
        environment=environment,
        method=method,
        policy=policy,
        total_steps=total_steps,
        key=jax.random.fold_in(jax.random.key(config.seed), 1),
        updates=Updates(
            policy.learner,
            config.train,
            policy_optimizer(config.optimizer, updates),
            value_optimizer(config.value, config.optimizer, updates),
            environment.rules.allowed_tokens,
            config.optimizer.max_update_kl,
        ),
        group_of=jnp.asarray(groups, jnp.int32),
        group_sizes=jnp.asarray(np.bincount(groups, minlength=num_groups), jnp.int32),
        stream=stream,
        sample=OwnDecoder(policy),
    )


@dataclasses.dataclass
class OwnDecoder:
    """Traces by this package's decoder; a `SampleTraces`."""

    policy: Policy
    params: Params = dataclasses.field(default_factory=dict)

    def load(self, params: Params, version: int, poll: Poll = None) -> None:
        """Its copy is made when it samples, and is gone when the learner needs the room."""
        self.params = params

    def generate(
        self, prompts: Prompts, rows: Rows, key: Array, sampler: Sampler, listeners: Listeners
    ) -> Rollout:
        """See `SampleTraces`."""
        copy = self.policy.decode_params(self.params)
        return generate(copy, prompts, rows, key, sampler, listeners)


def plain_rollout(
    run: Run,
    environment: Environment,
    params: Params,
    prompts: Prompts,
    key: Array,
    listeners: Listeners,
    *,
    temperature: float,
) -> Rollout:
    """A trace and an answer of the plain model for each prompt, under the largest budget."""
    budgets = np.full(len(prompts.lengths), run.config.budget.max, np.int32)
    spec = dataclasses.replace(run.policy.rollout, conditioning=None, answers=1)
    return generate(
        run.policy.decode_params(params, plain=True),
        prompts,
        Rows(budgets, budgets[:, None]),
        key,
        Sampler(spec, environment.rules, sampling_params(temperature)),
        listeners,
    )


def total_steps(config: Config, questions: int) -> int:
    """Iterations of a run on so many training questions."""
    train = config.train
    if train.steps is not None:
        return train.steps
    return math.ceil(train.epochs * questions / config.rollout.questions)


def init_state(run: Run, params: Params, value_head: Params | None) -> RunState:
    """A fresh state around given parameters (line 1 of Algorithm 1), without their frozen base."""
    optimizers = (run.updates.policy_tx, run.updates.head_tx)
    make = lambda params, head: train_step.init_state(params, head, *optimizers)
    ahead = functools.partial(RunStateAhead, in_hand=_nothing_in_hand(run))
    kind, num_groups = ahead if run.config.rollout.ahead else RunState, run.config.data.num_groups
    return kind(
        train=run.policy.make(make, adapters.split(params)[1], value_head),
        curriculum=curriculum.init_curriculum(num_groups, mu0=run.config.curriculum.mu0),
        stream=np.zeros(num_groups, np.int32),
        generated_tokens=0,
        method_state=run.method.init_state(len(run.environment.train)),
    )


def _widest_prompts(run: Run) -> Prompts:
    """Prompts of all training questions, as wide as those of a batch."""
    everyone = np.arange(len(run.environment.train))
    return run.environment.train.at(everyone, np.full_like(everyone, run.config.budget.max))


def _nothing_in_hand(run: Run) -> InHand:
    """Of the shapes of a batch in hand."""
    questions, group_size = run.config.rollout.questions, run.config.rollout.group_size
    rows, cuts, spec = questions * group_size, run.method.num_cuts, run.policy.rollout
    whole: Any = lambda *shape: np.zeros(shape, np.int32)
    budgets, placed = whole(questions, group_size), whole(questions, group_size, cuts)
    plan = BatchPlan(whole(questions), whole(questions), budgets, placed)
    width = _widest_prompts(run).tokens.shape[1] + spec.max_sampled
    trunks = Trunks.empty(rows, width=width, sampled=spec.max_sampled)
    branches = Branches.empty(
        rows,
        cuts * run.method.answers,
        width=run.environment.rules.suffix_length + spec.answer_tokens,
        sampled=spec.answer_tokens,
    )
    return InHand(np.array(False), plan, trunks, branches)


def precompile(
    run: Run,
    state: RunState,
    reference: Any = None,
    on_program: Callable[[str, int, int], None] | None = None,
) -> None:
    """Compiles every form of updates, and of rollouts all but what `rollout.precompile` leaves.

    Args:
      on_program: called with (of what, programs done, programs in all) before each is compiled and
        after the last; raises to leave the rest.
    """
    tell = lambda what: None if on_program is None else functools.partial(on_program, what)
    params, settings = run.params(state.train), run.config
    prompts, cuts = _widest_prompts(run), run.method.num_cuts
    rollout = settings.rollout
    rows = rollout.questions * rollout.group_size
    if rollout.engine == "own":
        precompile_rollout(
            run.policy.decode_params(params),
            prompts,
            cuts,
            run.sampler(params),
            rows=rows,
            on_program=tell("rollouts"),
        )
    batch = empty_batch(
        rows,
        prompt=prompts.tokens.shape[1],
        thinking=run.policy.rollout.max_sampled,
        cuts=cuts * run.method.answers,
        suffix=run.environment.rules.suffix_length,
        answer=rollout.answer_tokens,
    )
    run.updates.compile(
        state.train, batch, reference=reference, frozen=run.frozen, on_program=tell("updates")
    )
