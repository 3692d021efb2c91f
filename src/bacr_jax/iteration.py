"""One iteration of Algorithm 1: ask, sample, verify, credit, update, adapt.

Each line of the paper's inner loop is one call; `train.py` repeats `iterate`. Randomness comes from
fold_in(run key, step) alone, so an iteration can be replayed from a checkpoint.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from bacr_jax import advantages, curriculum
from bacr_jax.config import Config
from bacr_jax.curriculum import CurriculumState
from bacr_jax.environment import Environment
from bacr_jax.learner import train_step as learning
from bacr_jax.learner.batch import Batch, make_batch
from bacr_jax.learner.optimizer import policy_optimizer, value_optimizer
from bacr_jax.learner.train_step import TrainState
from bacr_jax.learner.updates import Updates
from bacr_jax.methods import Method
from bacr_jax.policy import Policy
from bacr_jax.rollout.generate import Rollout, generate, precompile
from bacr_jax.rollout.sampling import sampler
from bacr_jax.types import Prompts, pytree

Metrics = dict[str, float]


@pytree
class RunState:
    """Everything an iteration changes; what a checkpoint holds.

    Attributes:
      train: parameters and optimizers.
      curriculum: pass rates and schedule.
      generated_tokens: tokens sampled so far in training; a Python number, since 32 bits last for a
        thousand steps of a 7B run only.
    """

    train: TrainState
    curriculum: CurriculumState
    generated_tokens: int


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


class Iteration:
    """The fixed parts of a run, and `iterate`, which maps a state to the next one."""

    def __init__(
        self,
        config: Config,
        environment: Environment,
        method: Method,
        policy: Policy,
        total_steps: int,
    ):
        """Prepares optimizers and jitted pieces.

        Args:
          config: the run's config.
          environment: questions, rules, grader.
          method: pure functions of the training method.
          policy: compiled forms.
          total_steps: iterations in the whole run, for the schedule.
        """
        self.config, self.environment, self.method = config, environment, method
        self.policy, self.total_steps = policy, total_steps
        self.policy_tx = policy_optimizer(config.optimizer, total_steps * config.train.minibatches)
        self.head_tx = value_optimizer(config.value)
        self.updates = Updates(
            policy.learner, config.train, self.policy_tx, self.head_tx, environment.rules.legal
        )
        self.key = jax.random.fold_in(jax.random.key(config.seed), 1)
        groups = environment.train.set.groups
        self.group_of = jnp.asarray(groups)
        self.group_sizes = jnp.bincount(self.group_of, length=config.data.num_groups)
        self.reference: Any = None
        self._plan, self._credit = jax.jit(self._plan_fn), jax.jit(self._credit_fn)
        self._adapt = jax.jit(self._adapt_fn)

    def init_state(self, params: Any, head: Any) -> RunState:
        """A fresh state around given parameters."""
        config = self.config
        return RunState(
            train=self.policy.make(
                lambda params, head: learning.init_state(
                    params, head, self.policy_tx, self.head_tx
                ),
                params,
                head,
            ),
            curriculum=curriculum.init_curriculum(
                config.data.num_groups, mu0=config.curriculum.mu0
            ),
            generated_tokens=0,
        )

    # Algorithm 1, one iteration ---------------------------------------------------------------

    def iterate(
        self, state: RunState, step: int, poll: Callable[[], None] | None = None
    ) -> tuple[RunState, Metrics, Rollout, np.ndarray]:
        """Lines 6-16 of Algorithm 1.

        Args:
          state: donated.
          step: number of the iteration; with the run's seed it fixes all randomness.
          poll: called between chunks of decoding.

        Returns:
          The next state, metrics, and for the logs the rollout and its outcomes [Q, G, M].
        """
        clock = Clock()
        plan_key, rollout_key = jax.random.split(jax.random.fold_in(self.key, step))
        plan = self._plan(state.curriculum, plan_key)
        prompts = self.environment.train.take(self.rows_of(plan))
        clock.lap("plan")
        rollout = self.sample(state, plan, prompts, rollout_key, poll)
        clock.lap("rollout")
        outcomes = self.verify(plan, rollout, poll)
        clock.lap("verify")
        values, features = self.values(state, plan, prompts)
        credit = self._credit(outcomes, values, rollout.branches.source, plan.cuts)
        batch = self.batch(prompts, rollout, plan, credit)
        train, learned = self.update(state.train, batch, features, step)
        clock.lap("learn")
        schedule = self._adapt(state.curriculum, plan.groups, outcomes, self.adapts_after(step))
        state = RunState(
            train=train,
            curriculum=schedule,
            generated_tokens=state.generated_tokens + int(rollout.counters["tokens"]),
        )
        metrics = {**learned, **credit["metrics"], **self.describe(plan, rollout, outcomes, state)}
        metrics = {name: float(value) for name, value in metrics.items()}
        metrics |= clock.laps | {"time/tokens_per_s": rollout.counters["tokens"] / clock.total}
        return state, metrics, rollout, outcomes

    def precompile(self, state: RunState) -> None:
        """Compiles every form of the rollout, so that no iteration after the first compiles."""
        params = state.train.policy
        precompile(
            self.policy.decode_params(params),
            self.environment.train.prompts,
            int(self.method.cuts(jnp.ones((1, 1), jnp.int32)).shape[-1]),
            spec=self.policy.rollout,
            rules=self.environment.rules,
            how=sampler(self.config.rollout.temperature),
            phi_of=self.policy.phi_of(params),
        )

    # Its lines --------------------------------------------------------------------------------

    def _plan_fn(self, schedule: CurriculumState, key: Array) -> Plan:
        """Lines 4, 6, 8 and 10: questions by group weight, budgets from the prior, cuts."""
        question_key, budget_key = jax.random.split(key)
        weights = self.method.question_weights(schedule, self.group_sizes)
        questions = curriculum.sample_questions(
            question_key, weights, self.group_of, self.config.rollout.questions
        )
        groups = self.group_of[questions]
        budgets = self.method.sample_budgets(budget_key, schedule, groups)
        return Plan(questions, groups, budgets, self.method.cuts(budgets))

    def rows_of(self, plan: Plan) -> np.ndarray:
        """Question index of each of the Q G rows."""
        return np.repeat(np.asarray(plan.questions), plan.budgets.shape[1])

    def sample(
        self,
        state: RunState,
        plan: Plan,
        prompts: Prompts,
        key: Array,
        poll: Callable[[], None] | None,
    ) -> Rollout:
        """Line 9: trunks under their budgets, answers at every cut."""
        params = state.train.policy
        return generate(
            self.policy.decode_params(params),
            prompts,
            np.asarray(plan.budgets).reshape(-1),
            np.asarray(plan.cuts).reshape(-1, plan.cuts.shape[-1]),
            key,
            spec=self.policy.rollout,
            rules=self.environment.rules,
            how=sampler(self.config.rollout.temperature),
            phi_of=self.policy.phi_of(params),
            poll=poll,
        )

    def verify(
        self, plan: Plan, rollout: Rollout, poll: Callable[[], None] | None = None
    ) -> Float[np.ndarray, "Q G M"]:
        """r(q, t_{:b_j}) of every cut, by the grader on the host."""
        answers = self.environment.train.set.answers
        golds = [answers[i] for i in self.rows_of(plan)]
        outcomes = self.environment.verify(rollout.branches, golds, poll)
        return outcomes.reshape(*plan.cuts.shape)

    def values(self, state: RunState, plan: Plan, prompts: Prompts) -> tuple[Any, Any]:
        """V(q, b, b_j) before this batch is learned from; (None, None) without a value head."""
        if state.train.head is None:
            return None, None
        values, features = learning.question_values(
            state.train.policy,
            state.train.head,
            prompts,
            plan.budgets.reshape(-1),
            plan.cuts.reshape(-1, plan.cuts.shape[-1]),
            spec=self.policy.learner,
        )
        return values.reshape(plan.cuts.shape), features

    def _credit_fn(
        self,
        outcomes: Float[Array, "Q G M"],
        values: Float[Array, "Q G M"] | None,
        source: Int[Array, "B M"],
        cuts: Int[Array, "Q G M"],
    ) -> dict[str, Any]:
        """Lines 11 and 12: dense rewards and advantages, spread over tokens."""
        rewards = self.method.rewards(outcomes)
        credit = self.method.advantages(outcomes, rewards, values)
        flat = lambda x: x.reshape(-1, x.shape[-1])
        residual = rewards - credit.baseline
        spread = jnp.maximum(jnp.var(rewards), 1e-6)
        metrics = {
            "reward/mean": rewards.mean(),
            "advantage/mean": credit.thinking.mean(),
            "advantage/std": credit.thinking.std(),
            "advantage/residual_std": residual.std(),
            "advantage/explained": 1.0 - jnp.var(residual) / spread,
        }
        return {
            "thinking": advantages.scatter_segments(
                flat(credit.thinking), flat(cuts), self.config.budget.max
            ),
            "answers": advantages.sum_reused(flat(credit.answers), source),
            "returns": flat(rewards),
            "metrics": metrics,
        }

    def batch(
        self, prompts: Prompts, rollout: Rollout, plan: Plan, credit: dict[str, Any]
    ) -> Batch:
        """Tokens and advantages, side by side."""
        return make_batch(
            prompts,
            rollout.trunks,
            rollout.branches,
            cuts=np.asarray(plan.cuts).reshape(-1, plan.cuts.shape[-1]),
            thinking_advantages=credit["thinking"],
            answer_advantages=credit["answers"],
            returns=credit["returns"],
        )

    def update(
        self, train: TrainState, batch: Batch, features: Any, step: int
    ) -> tuple[TrainState, dict[str, Any]]:
        """Line 14: Eq. 16 on each minibatch, then the value head's extra steps."""
        config = self.config
        train, metrics = self.updates(
            train,
            batch,
            reference=self.reference,
            update_policy=step >= config.value.warmup_iterations or train.head is None,
        )
        if train.head is not None and config.value.inner_steps:
            head, head_opt = learning.fit_value(
                train.head,
                train.head_opt,
                features,
                batch.returns,
                head_tx=self.head_tx,
                num_steps=config.value.inner_steps,
            )
            train = dataclasses.replace(train, head=head, head_opt=head_opt)
        return train, metrics

    def adapts_after(self, step: int) -> bool:
        """Whether the schedule moves after this iteration (line 16)."""
        every = self.config.curriculum.update_every
        if every is None:
            every = -(-len(self.environment.train) // self.config.rollout.questions)
        return (step + 1) % every == 0

    def _adapt_fn(
        self,
        schedule: CurriculumState,
        groups: Int[Array, "Q"],
        outcomes: Float[Array, "Q G M"],
        due: Bool[Array, ""] | bool,
    ) -> CurriculumState:
        """Line 16: pass rates at the full budget, and with them Eq. 5 and 6."""
        settings = self.config.curriculum
        schedule = curriculum.record_outcomes(
            schedule, groups, outcomes[..., -1], ema_decay=settings.ema_decay
        )
        moved = curriculum.update_pass_rates(schedule, source=settings.pass_rate)
        return jax.tree.map(lambda new, old: jnp.where(due, new, old), moved, schedule)

    def describe(
        self, plan: Plan, rollout: Rollout, outcomes: np.ndarray, state: RunState
    ) -> dict[str, Any]:
        """Metrics of the rollout and of the schedule."""
        trunks, branches = rollout.trunks, rollout.branches
        schedule, settings = state.curriculum, self.config.curriculum
        rates = np.asarray(schedule.pass_rate)
        mu = curriculum.scheduled_mean(
            schedule,
            alpha=settings.alpha,
            beta=settings.beta,
            b_min=self.config.budget.min,
            b_max=self.config.budget.max,
            clip=settings.clip_mu,
        )
        weights = self.method.question_weights(schedule, self.group_sizes)
        by_group = {}
        for group in range(len(rates)):
            by_group[f"curriculum/mu_{group}"] = float(mu[group])
            by_group[f"curriculum/pass_rate_{group}"] = float(rates[group])
            by_group[f"curriculum/weight_{group}"] = float(weights[group])
        cuts = outcomes.mean((0, 1))
        return {
            **{f"reward/cut_{j + 1}": value for j, value in enumerate(cuts)},
            "rollout/thinking_mean": float(np.mean(trunks.thinking)),
            "rollout/thinking_max": float(np.max(trunks.thinking)),
            "rollout/forced_share": float(np.mean(np.asarray(trunks.close) == 0)),
            "rollout/closed_answers": float(np.mean(branches.finished)),
            **{f"grader/{k}": v for k, v in self.environment.grader.counters().items()},
            "rollout/tokens": rollout.counters["tokens"],
            "rollout/tokens_total": int(state.generated_tokens),
            "budget/mean": float(np.mean(trunks.budgets)),
            **by_group,
        }


class Clock:
    """Seconds spent between laps, as `time/...` metrics."""

    def __init__(self) -> None:
        """Starts the clock."""
        self.laps: Metrics = {}
        self._start = self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Books the time since the last lap under `name`."""
        now = time.perf_counter()
        self.laps[f"time/{name}"] = now - self._last
        self._last = now

    @property
    def total(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start
