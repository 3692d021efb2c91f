"""The configuration and the state of a training run.

`Run` contains everything that stays fixed during a run, and `RunState` everything that an iteration
changes. `loop.Trainer` builds them with `make_run` and `init_state`. `precompile` compiles the
programs of the training loop before the first step.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from bacr_jax import curriculum, parallel
from bacr_jax.config import Config, DistillConfig, RolloutConfig, TrainConfig
from bacr_jax.curriculum import CurriculumState
from bacr_jax.learner import train_step
from bacr_jax.learner.batch import empty_batch
from bacr_jax.learner.optimizer import policy_optimizer, value_optimizer
from bacr_jax.learner.teacher import Teacher
from bacr_jax.learner.train_step import TrainState
from bacr_jax.learner.updates import Updates
from bacr_jax.methods import Method
from bacr_jax.model import adapters
from bacr_jax.model.hf.hf_config import read_budget_module
from bacr_jax.model.hf.reading import load_policy
from bacr_jax.parallel import host_memory
from bacr_jax.prompts.task_data import TaskData
from bacr_jax.questions.stream import QuestionStream
from bacr_jax.rollout import (
    Callbacks,
    Rollout,
    RolloutRequest,
    SamplingSetup,
    generate,
    sampling_params,
)
from bacr_jax.rollout import precompile as precompile_rollout
from bacr_jax.rollout.fleet import SampleTraces
from bacr_jax.runs.checkpoint import arrays_of
from bacr_jax.runs.setup import Policy
from bacr_jax.training.async_rollout import PrefetchedBatch
from bacr_jax.training.dynamic_sampling import BatchPlan
from bacr_jax.types import Branches, Params, Poll, Prompts, Trunks, pytree


@pytree
class RunState:
    """State of a run that changes in every iteration. Checkpoints store this state.

    Attributes:
      train: parameters and optimizer states of the policy and the value head.
      curriculum: state of the curriculum, such as the pass rates of the difficulty groups.
      stream: number of questions drawn so far from each difficulty group with data.order=shuffled;
        otherwise zeros.
      generated_tokens: number of tokens sampled in training so far. It is a Python integer because
        32 bits overflow after about a thousand steps of a 7B run.
      method_state: state of the training method, such as running means. None if the method has no
        state.
      prefetched: the batch of the next iteration, sampled one iteration ahead. None without
        `rollout.async_steps`.
      before_update: train state before the last update, as NumPy arrays (`undo.UpdateGuard`). None
        except in checkpoints of a run whose updates can be undone.
    """

    train: TrainState
    curriculum: CurriculumState
    stream: Int[np.ndarray, "K"]
    generated_tokens: int
    method_state: Any = None
    prefetched: PrefetchedBatch | None = None
    before_update: TrainState | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """Fixed configuration and functions of a run, built by `make_run`.

    Attributes:
      total_steps: largest number of iterations of the run. The learning rate schedules depend on
        it. All other schedules depend on `completed_fraction`.
      key: base PRNG key of training. The step is folded into it.
      updates: runs the optimizer updates (line 14 of Algorithm 1).
      group_of: difficulty group of each training question.
      group_sizes: number of training questions in each difficulty group.
      stream: order of the questions within their groups. None if each batch draws its questions
        independently.
      sample: samples the traces, either with the built-in decoder or with servers.
      frozen: base weights under LoRA adapters, which are not updated. Empty if all weights are
        trained.
      before_update: called before the buffers of a state are donated to an update.
    """

    config: Config
    task_data: TaskData
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
    before_update: Callable[[], None] | None = None

    def params(self, train: TrainState) -> Params:
        """Returns all parameters of the policy: the trained ones and the frozen base weights."""
        return {**self.frozen, **train.policy}

    def sampler(self, params: Params) -> SamplingSetup:
        """Returns the sampling settings of training rollouts with these parameters."""
        return SamplingSetup(
            self.policy.rollout,
            self.task_data.rules,
            sampling_params(self.config.rollout.temperature),
            self.policy.phi_of(params),
        )


def make_run(
    config: Config, task_data: TaskData, method: Method, policy: Policy, total_steps: int
) -> Run:
    """Builds the `Run`: optimizers, PRNG key, difficulty groups and the order of the questions.

    The arguments are stored as fields of `Run`.
    """
    teacher = make_teacher(config.distill, config.budget.max, policy)
    num_updates = total_steps * config.train.minibatches
    num_groups = config.data.num_groups
    groups = np.asarray(task_data.train.set.groups)
    stream = None
    if config.data.order == "shuffled":
        stream = QuestionStream(groups, num_groups=num_groups, seed=config.seed)
    return Run(
        config=config,
        task_data=task_data,
        method=method,
        policy=policy,
        total_steps=total_steps,
        key=jax.random.fold_in(jax.random.key(config.seed), 1),
        updates=Updates(
            policy.learner,
            config.train,
            policy_optimizer(config.optimizer, num_updates),
            value_optimizer(config.value, config.optimizer, num_updates),
            task_data.rules.allowed_tokens,
            config.optimizer.max_update_kl,
            teacher,
        ),
        group_of=jnp.asarray(groups, jnp.int32),
        group_sizes=jnp.asarray(np.bincount(groups, minlength=num_groups), jnp.int32),
        stream=stream,
        sample=LocalSampler(policy),
    )


def make_teacher(distill: DistillConfig, largest_budget: int, policy: Policy) -> Teacher | None:
    """Returns the teacher of on-policy distillation, or None without distillation.

    The weights of `distill.teacher` are loaded. Without this folder, the policy is its own teacher.

    Args:
      distill: section `distill` of the config.
      largest_budget: largest budget of training, in tokens.
      policy: settings of the policy.

    Raises:
      UserError: the folder of the teacher can't be read.
    """
    if distill.coef == 0.0:
        return None
    learner = policy.learner
    folder = distill.teacher
    if folder is None:
        return Teacher(learner, largest_budget)
    sharding_of = None if learner.mesh is None else parallel.sharding_of(learner.mesh)
    shape, params = load_policy(folder, dtype=policy.param_dtype, sharding_of=sharding_of)
    spec = dataclasses.replace(learner, model=shape, conditioning=None)
    module = read_budget_module(folder)
    if module is not None:
        spec = dataclasses.replace(spec, conditioning=module.conditioning, b_max=module.b_max)
    return Teacher(spec, largest_budget, params)


@dataclasses.dataclass
class LocalSampler:
    """Samples traces with the built-in decoder. Implements the `SampleTraces` protocol."""

    policy: Policy
    params: Params = dataclasses.field(default_factory=dict)

    def load(self, params: Params, version: int, poll: Poll = None) -> None:
        """Stores the parameters for later calls of `generate`.

        The decoder needs a copy of the parameters. `generate` creates the copy and frees it at the
        end, because the learner needs the memory.
        """
        self.params = params

    def generate(
        self,
        prompts: Prompts,
        rows: RolloutRequest,
        key: Array,
        sampler: SamplingSetup,
        callbacks: Callbacks,
    ) -> Rollout:
        """Samples traces and answers; see `SampleTraces.generate`."""
        decode_params = self.policy.decode_params(self.params)
        return generate(decode_params, prompts, rows, key, sampler, callbacks)


def plain_rollout(
    run: Run,
    task_data: TaskData,
    params: Params,
    prompts: Prompts,
    key: Array,
    callbacks: Callbacks,
    *,
    temperature: float,
) -> Rollout:
    """Samples a trace and an answer per prompt, at the largest budget and without budget embedding.

    Supervised stages use it to sample from a policy that has no trained budget module yet.
    """
    budgets = np.full(len(prompts.lengths), run.config.budget.max, np.int32)
    # Not limited to the traces of an iteration, because there can be more prompts.
    slots = run.config.rollout.slots or run.policy.rollout.slots
    spec = dataclasses.replace(run.policy.rollout, conditioning=None, answers=1, slots=slots)
    return generate(
        run.policy.decode_params(params, plain=True),
        prompts,
        RolloutRequest(budgets, budgets[:, None]),
        key,
        SamplingSetup(spec, task_data.rules, sampling_params(temperature)),
        callbacks,
    )


def total_steps(train: TrainConfig, rollout: RolloutConfig, questions: int) -> int:
    """Returns the number of iterations of a run.

    Args:
      train: section `train` of the config.
      rollout: section `rollout` of the config.
      questions: number of training questions.
    """
    if train.steps is not None:
        return train.steps
    return math.ceil(train.epochs * questions / rollout.questions)


def completed_fraction(run: Run, step: int, generated_tokens: int) -> Fraction:
    """Returns the completed fraction of training, in [0, 1], on which a method's schedules depend.

        max(step / total_steps, generated_tokens / train.max_generated_tokens)

    Without a token limit, it is the fraction of the steps. It is exact, because the rounding error
    of a float could move the first step of a stage.

    Args:
      step: number of iterations already done.
      generated_tokens: number of tokens generated so far (`RunState.generated_tokens`), including a
        method's first stages.
    """
    of_steps = Fraction(step, run.total_steps)
    token_limit = run.config.train.max_generated_tokens
    if token_limit is None:
        return of_steps
    of_tokens = Fraction(int(generated_tokens), token_limit)
    # The tokens of the last step can exceed the limit.
    return min(max(of_steps, of_tokens), Fraction(1))


def init_state(
    run: Run, params: Params, value_head: Params | None, *, abstract: bool = False
) -> RunState:
    """Returns the state before the first iteration (line 1 of Algorithm 1).

    Args:
      params: parameters of the initial policy. The state contains only the trained parameters and
        no frozen base weights.
      value_head: parameters of the value head, or None if the method has no value head.
      abstract: True if `params` and `value_head` are only shapes. The optimizer states are then
        shapes too, and a checkpoint can be restored into the result.
    """
    num_groups = run.config.data.num_groups
    trained = adapters.split(params)[1]
    make = run.policy.abstract if abstract else run.policy.make

    def init_train(params: Params, head: Params | None) -> TrainState:
        return train_step.init_state(params, head, run.updates.policy_tx, run.updates.head_tx)

    return RunState(
        train=make(init_train, trained, value_head),
        curriculum=curriculum.init_curriculum(num_groups, mu0=run.config.curriculum.mu0),
        stream=np.zeros(num_groups, np.int32),
        generated_tokens=0,
        method_state=arrays_of(
            run.method.init_state(len(run.task_data.train)), f"method={run.config.method}"
        ),
        prefetched=_empty_prefetched_batch(run) if run.config.rollout.async_steps else None,
    )


def _widest_prompts(run: Run) -> Prompts:
    """Returns the prompts of all training questions, padded to the width of training batches."""
    questions = np.arange(len(run.task_data.train))
    budgets = np.full_like(questions, run.config.budget.max)
    return run.task_data.train.at(questions, budgets)


def _empty_prefetched_batch(run: Run) -> PrefetchedBatch:
    """Returns a `PrefetchedBatch` of zeros with the shapes of a real batch."""
    num_questions = run.config.rollout.questions
    group_size = run.config.rollout.group_size
    num_cuts = run.method.num_cuts
    spec = run.policy.rollout
    num_rows = num_questions * group_size

    def zeros(*shape: int) -> Any:
        return np.zeros(shape, np.int32)

    plan = BatchPlan(
        questions=zeros(num_questions),
        groups=zeros(num_questions),
        budgets=zeros(num_questions, group_size),
        cuts=zeros(num_questions, group_size, num_cuts),
        shuffled_budgets=(
            zeros(num_questions, group_size) if run.config.budget.shuffle_input else None
        ),
    )
    width = _widest_prompts(run).tokens.shape[1] + spec.max_sampled
    trunks = Trunks.empty(num_rows, width=width, sampled=spec.max_sampled)
    branches = Branches.empty(
        num_rows,
        num_cuts * run.method.answers,
        width=run.task_data.rules.suffix_length + spec.answer_tokens,
        sampled=spec.answer_tokens,
    )
    return PrefetchedBatch(np.array(False), plan, trunks, branches)


def precompile(
    run: Run,
    state: RunState,
    reference: Any = None,
    on_program: Callable[[str, int, int], None] | None = None,
) -> None:
    """Compiles the programs of the training loop: all programs of the update, and the rollout.

    Rollout programs are only compiled if the built-in decoder samples the traces.

    Args:
      reference: parameters of the reference policy for a KL penalty.
      on_program: callback that is called before each program and after the last one with
        ("rollouts" or "updates", number of finished programs, total number of programs). It may
        raise an exception to skip the remaining programs.
    """

    def on_program_of(kind: str) -> Callable[[int, int], None] | None:
        return None if on_program is None else functools.partial(on_program, kind)

    params = run.params(state.train)
    settings = run.config.rollout
    prompts = _widest_prompts(run)
    num_cuts = run.method.num_cuts
    num_rows = settings.questions * settings.group_size
    if settings.engine == "jax":
        precompile_rollout(
            run.policy.decode_params(params),
            prompts,
            num_cuts,
            run.sampler(params),
            rows=num_rows,
            on_program=on_program_of("rollouts"),
        )
    host_memory.return_freed_memory()
    batch = empty_batch(
        num_rows,
        prompt=prompts.tokens.shape[1],
        thinking=run.policy.rollout.max_sampled,
        cuts=num_cuts * run.method.answers,
        suffix=run.task_data.rules.suffix_length,
        answer=settings.answer_tokens,
    )
    run.updates.compile(
        state.train,
        batch,
        reference=reference,
        frozen=run.frozen,
        on_program=on_program_of("updates"),
    )
    host_memory.return_freed_memory()
