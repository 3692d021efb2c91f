"""One iteration of Algorithm 1: ask, sample, verify, credit, update, adapt.

Each line of the paper's inner loop is one call; `train.py` repeats `iterate`. Randomness comes from
fold_in(run key, step) alone, so an iteration can be replayed from a checkpoint.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from bacr_jax import advantages, curriculum
from bacr_jax.config import Config
from bacr_jax.curriculum import CurriculumState, difficulty
from bacr_jax.curriculum.difficulty import DifficultyPosterior
from bacr_jax.data.environment import Environment
from bacr_jax.data.stream import QuestionStream
from bacr_jax.learner import train_step as learning
from bacr_jax.learner.batch import Batch, empty_batch, make_batch, only_rows
from bacr_jax.learner.optimizer import policy_optimizer, value_optimizer
from bacr_jax.learner.policy import Policy
from bacr_jax.learner.train_step import TrainState
from bacr_jax.learner.updates import Updates
from bacr_jax.methods import Method, Observed
from bacr_jax.oom import phase_memory
from bacr_jax.rollout.generate import Rollout, generate, precompile
from bacr_jax.rollout.sampling import sampling_params
from bacr_jax.training import adapt
from bacr_jax.training.dynamic_sampling import Asked, Plan, choose, wants_more
from bacr_jax.training.logging import (
    Clock,
    Metrics,
    grader_metrics,
    rollout_metrics,
    sampling_metrics,
    schedule_metrics,
)
from bacr_jax.types import CLOSED_BY_BUDGET, Prompts, pytree


@pytree
class RunState:
    """Everything an iteration changes; what a checkpoint holds.

    Attributes:
      train: parameters and optimizers.
      curriculum: pass rates and schedule.
      stream: questions drawn so far from each group (data.order=shuffled), else zeros.
      generated_tokens: tokens sampled so far in training; a Python number, since 32 bits last for a
        thousand steps of a 7B run only.
      method: what the method remembers; None if nothing.
      difficulty: record of every problem, with continuous difficulty; else None.
      skipped_in_a_row: updates skipped since the last one whose gradient was finite.
    """

    train: TrainState
    curriculum: CurriculumState
    stream: Int[np.ndarray, "K"]
    generated_tokens: int
    method: Any = None
    difficulty: DifficultyPosterior | None = None
    skipped_in_a_row: int = 0


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
            policy.learner,
            config.train,
            self.policy_tx,
            self.head_tx,
            environment.rules.allowed_tokens,
        )
        self.key = jax.random.fold_in(jax.random.key(config.seed), 1)
        # With continuous difficulty every problem is a group of its own.
        self.continuous = config.curriculum.difficulty == "continuous"
        self.levels = np.asarray(environment.train.set.groups)
        group_of = np.arange(len(self.levels)) if self.continuous else self.levels
        self.group_of = jnp.asarray(group_of, jnp.int32)
        self.num_groups = len(self.levels) if self.continuous else config.data.num_groups
        self.group_sizes = jnp.bincount(self.group_of, length=self.num_groups)
        self.stream: QuestionStream | None = None
        if config.data.order == "shuffled":
            self.stream = QuestionStream(group_of, num_groups=self.num_groups, seed=config.seed)
        self.reference: Any = None
        self._plan, self._credit = jax.jit(self._plan_fn), jax.jit(self._credit_fn)
        adapted = functools.partial(
            adapt.adapted,
            settings=config.curriculum,
            coordinate=adapt.coordinate(environment.train, config.curriculum.coordinate),
        )
        self._adapt, self._remember = jax.jit(adapted), jax.jit(self._remember_fn)
        self._own_metrics = jax.jit(method.metrics)
        self._keep = None if method.resampling is None else jax.jit(method.resampling.keep)

    def init_state(self, params: Any, head: Any) -> RunState:
        """A fresh state around given parameters."""
        mu0: Any = self.config.curriculum.mu0
        if self.continuous and isinstance(mu0, tuple):
            mu0 = tuple(mu0[group] for group in self.levels)
        posterior = difficulty.init_difficulty(self.num_groups) if self.continuous else None
        return RunState(
            train=self.policy.make(
                lambda params, head: learning.init_state(
                    params, head, self.policy_tx, self.head_tx
                ),
                params,
                head,
            ),
            curriculum=curriculum.init_curriculum(self.num_groups, mu0=mu0),
            stream=np.zeros(self.num_groups, np.int32),
            generated_tokens=0,
            method=self.method.init_state(len(self.levels)),
            difficulty=posterior,
        )

    # Algorithm 1, one iteration ---------------------------------------------------------------

    def iterate(
        self, state: RunState, step: int, poll: Callable[[], None] | None = None
    ) -> tuple[RunState, Metrics, Rollout, np.ndarray]:
        """Lines 6-16 of Algorithm 1.

        Args:
          state: donated.
          step: number of the iteration; with the run's seed it fixes all randomness.
          poll: called while sampling and grading; it may raise, and `state` is whole then.

        Returns:
          The next state, metrics, and for the logs the rollout learned from and the outcomes of its
          answers [Q, G, M A].
        """
        clock, graded = Clock(), self.environment.grader.counters()
        skipped = int(state.train.skipped)
        asked: list[Asked] = []
        stream = state.stream
        while wants_more(asked, self.method.resampling):
            plan_key, rollout_key = self.keys(step, len(asked))
            plan = self._plan(state.curriculum, plan_key, self.group_of)
            plan, stream = self.next_in_order(plan, stream)
            prompts = self.environment.train.take(self.rows_of(plan))
            clock.lap("plan")
            rollout = self.sample(state, plan, prompts, rollout_key, poll)
            clock.lap("rollout")
            seen = self.observe(plan, rollout, self.verify(plan, rollout, poll), step)
            asked.append(Asked(plan, prompts, rollout, seen, self.useful(seen)))
            clock.lap("verify")
        chosen = choose(asked)
        with phase_memory("value head", questions=len(chosen.plan.questions)):
            values, features = jax.block_until_ready(self.values(state, chosen))
        credit = self._credit(state.method, chosen.seen, values, chosen.rollout.branches.source)
        train, learned = self.update(state.train, self.batch(chosen, credit), features, step)
        remembered = self._remember(state.method, chosen.seen, credit["rewards"], values)
        clock.lap("learn")
        schedule, posterior, probed = self.adapt(state, train, asked[0], step)
        clock.lap("adapt")
        tokens = int(chosen.rollout.counters["tokens"]) + probed
        skipped = int(train.skipped) - skipped
        new = RunState(
            train=train,
            curriculum=schedule,
            stream=stream,
            generated_tokens=state.generated_tokens + tokens,
            method=remembered,
            difficulty=posterior,
            skipped_in_a_row=state.skipped_in_a_row + skipped if skipped else 0,
        )
        metrics = {
            **learned,
            **credit["metrics"],
            **self._own_metrics(state.method, asked[0].seen),
            **self.describe(asked, chosen, new),
            **grader_metrics(graded, self.environment.grader.counters()),
        }
        metrics = {name: float(value) for name, value in metrics.items()}
        metrics |= clock.laps | {"time/tokens_per_s": tokens / clock.total}
        by_answer = np.asarray(chosen.seen.by_answer)
        logged = by_answer.reshape(*by_answer.shape[:2], -1)
        return new, metrics, chosen.rollout, logged

    def precompile(self, state: RunState) -> None:
        """Compiles every form of rollouts and updates: no iteration after the first compiles."""
        params = state.train.policy
        decode, prompts = self.policy.decode_params(params), self.environment.train.prompts
        settings, phi_of = self.config.rollout, self.policy.phi_of(params)
        cuts = int(self.method.cuts(jnp.ones((1, 1), jnp.int32)).shape[-1])
        rows = settings.questions * settings.group_size
        precompile(decode, prompts, cuts, **self.how(), phi_of=phi_of, rows=rows)
        if self.config.curriculum.pass_rate == "probe":
            rows = min(self.config.curriculum.probe_size, len(self.levels))
            precompile(decode, prompts, 1, **self.how(answers=1), phi_of=phi_of, rows=rows)
        batch = empty_batch(
            settings.questions * settings.group_size,
            prompt=prompts.tokens.shape[1],
            thinking=self.config.budget.max,
            cuts=cuts * self.method.answers,
            suffix=self.environment.rules.suffix_length,
            answer=settings.answer_tokens,
        )
        self.updates.compile(state.train, batch, reference=self.reference)

    # Its lines --------------------------------------------------------------------------------

    def _plan_fn(self, schedule: CurriculumState, key: Array, group_of: Int[Array, "n"]) -> Plan:
        """Lines 4, 6, 8 and 10: questions by group weight, budgets from the prior, cuts.

        The groups are an argument: XLA would sort a constant of this length while compiling.
        """
        question_key, budget_key = jax.random.split(key)
        weights = self.method.question_weights(schedule, self.group_sizes)
        questions = curriculum.sample_questions(
            question_key, weights, group_of, self.config.rollout.questions
        )
        groups = group_of[questions]
        budgets = self.method.sample_budgets(budget_key, schedule, groups)
        return Plan(questions, groups, budgets, self.method.cuts(budgets))

    def keys(self, step: int, round_: int) -> tuple[Array, Array]:
        """Keys of the plan and of the rollout; the first round's are those of the step."""
        key = jax.random.fold_in(self.key, step)
        plan, rollout = jax.random.split(jax.random.fold_in(key, round_) if round_ else key)
        return plan, rollout

    def how(self, answers: int | None = None) -> dict[str, Any]:
        """Shapes, rules and temperature of training rollouts, with the method's answers per cut."""
        count = self.method.answers if answers is None else answers
        return {
            "spec": dataclasses.replace(self.policy.rollout, answers=count),
            "rules": self.environment.rules,
            "sampling": sampling_params(self.config.rollout.temperature),
        }

    def next_in_order(
        self, plan: Plan, stream: Int[np.ndarray, "K"]
    ) -> tuple[Plan, Int[np.ndarray, "K"]]:
        """Line 6: of each question's group, the next in order instead of the one drawn."""
        if self.stream is None:
            return plan, stream
        questions, stream = self.stream.draw(stream, np.asarray(plan.groups))
        return dataclasses.replace(plan, questions=jnp.asarray(questions)), stream

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
            **self.how(),
            phi_of=self.policy.phi_of(params),
            poll=poll,
        )

    def verify(
        self, plan: Plan, rollout: Rollout, poll: Callable[[], None] | None = None
    ) -> Float[np.ndarray, "Q G M A"]:
        """r(q, t_{:b_j}) of every answer at every cut, by the grader on the host."""
        answers = self.environment.train.set.answers
        references = [answers[i] for i in self.rows_of(plan)]
        outcomes = self.environment.verify(rollout.branches, references, poll)
        return outcomes.reshape(*plan.cuts.shape, self.method.answers)

    def observe(
        self, plan: Plan, rollout: Rollout, outcomes: Float[np.ndarray, "Q G M A"], step: int
    ) -> Observed:
        """What the method may look at."""
        trunks, branches = rollout.trunks, rollout.branches
        by_group = lambda x: np.asarray(x).reshape(plan.budgets.shape)
        extra = {}
        if self.method.read is not None:
            start, count = np.asarray(trunks.prompt_lengths), np.asarray(trunks.sampled)
            tokens = np.asarray(trunks.tokens)
            said = [row[a : a + n].tolist() for row, a, n in zip(tokens, start, count)]
            extra = self.method.read(self.environment.tokenizer, said)
        # The answer at the last cut; with several, the first of them.
        final = np.asarray(branches.sampled)[:, -self.method.answers]
        fields: dict[str, Any] = {
            "questions": plan.questions,
            "budgets": plan.budgets,
            "cuts": plan.cuts,
            "outcomes": outcomes.mean(-1),
            "by_answer": outcomes,
            "thinking": by_group(trunks.thinking),
            "lengths": by_group(np.asarray(trunks.thinking) + final),
            "closed": by_group(np.asarray(trunks.close) != CLOSED_BY_BUDGET),
            "fraction": np.float32(step / self.total_steps),
            "extra": {name: by_group(values) for name, values in extra.items()},
        }
        return Observed(**fields)

    def useful(self, seen: Observed) -> Bool[np.ndarray, "Q"]:
        """Questions that the method wants to learn from."""
        if self._keep is None:
            return np.ones(len(seen.questions), bool)
        return np.asarray(self._keep(seen))

    def values(self, state: RunState, asked: Asked) -> tuple[Any, Any]:
        """V(q, b, b_j) before this batch is learned from; (None, None) without a value head."""
        if state.train.head is None:
            return None, None
        plan = asked.plan
        values, features = learning.question_values(
            state.train.policy,
            state.train.head,
            asked.prompts,
            plan.budgets.reshape(-1),
            plan.cuts.reshape(-1, plan.cuts.shape[-1]),
            spec=self.policy.learner,
        )
        return values.reshape(plan.cuts.shape), features

    def _credit_fn(
        self,
        remembered: Any,
        seen: Observed,
        values: Float[Array, "Q G M"] | None,
        source: Int[Array, "B N"],
    ) -> dict[str, Any]:
        """Lines 11 and 12: dense rewards and advantages, spread over tokens."""
        rewards = self.method.rewards(remembered, seen)
        credit = self.method.advantages(remembered, seen, rewards, values)
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
                flat(credit.thinking), flat(seen.cuts), self.config.budget.max
            ),
            "answers": advantages.sum_reused(credit.answers.reshape(source.shape), source),
            "rewards": rewards,
            "keep": credit.keep,
            "metrics": metrics,
        }

    def _remember_fn(self, remembered: Any, seen: Observed, rewards: Array, values: Any) -> Any:
        """The method's own state; it learns nothing from rewards that are not finite."""
        new = self.method.update(remembered, seen, rewards, values)
        good = jnp.isfinite(rewards).all()
        return jax.tree.map(lambda x, y: jnp.where(good, x, y), new, remembered)

    def batch(self, asked: Asked, credit: dict[str, Any]) -> Batch:
        """Tokens and advantages, side by side; rows that do not count have no sampled tokens."""
        answers = lambda x: np.repeat(np.asarray(x), self.method.answers, axis=-1)
        flat = lambda x: answers(x).reshape(-1, x.shape[-1] * self.method.answers)
        batch = make_batch(
            asked.prompts,
            asked.rollout.trunks,
            asked.rollout.branches,
            cuts=flat(asked.plan.cuts),
            thinking_advantages=credit["thinking"],
            answer_advantages=credit["answers"],
            returns=flat(credit["rewards"]),
        )
        keep = np.broadcast_to(asked.useful[:, None], asked.plan.budgets.shape)
        if credit["keep"] is not None:
            keep = keep & np.asarray(credit["keep"])
        return only_rows(batch, keep.reshape(-1))

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

    def adapt(
        self, state: RunState, train: TrainState, asked: Asked, step: int
    ) -> tuple[CurriculumState, DifficultyPosterior | None, int]:
        """Line 16: pass rates at the full budget, and with them Eq. 5 and 6.

        Returns:
          The schedule, the record of problems, and the tokens that a probe has cost.
        """
        every = self.config.curriculum.update_every
        if every is None:
            every = -(-len(self.environment.train) // self.config.rollout.questions)
        due = (step + 1) % every == 0
        if self.config.curriculum.pass_rate != "probe":
            correct = asked.seen.outcomes[..., -1]
            schedule, posterior = self._adapt(
                state.curriculum, state.difficulty, asked.plan.groups, correct, due
            )
            return schedule, posterior, 0
        if not due:
            return state.curriculum, state.difficulty, 0
        groups, outcomes, tokens = self.probe(train, step)
        return adapt.measured(state.curriculum, groups, outcomes), state.difficulty, tokens

    def probe(
        self, train: TrainState, step: int
    ) -> tuple[Int[Array, "P"], Float[Array, "P one"], int]:
        """Pass rates of fixed training questions at one budget: groups, outcomes, tokens spent.

        Always finished once begun: the state from before the update is gone by now.
        """
        settings, questions = self.config.curriculum, self.environment.train
        chosen = adapt.probe_questions(
            self.levels, self.num_groups, size=settings.probe_size, seed=self.config.seed
        )
        budget = settings.probe_budget or self.config.budget.max
        budgets = np.full(len(chosen), budget, np.int32)
        rollout = generate(
            self.policy.decode_params(train.policy),
            questions.take(chosen),
            budgets,
            budgets[:, None],
            jax.random.fold_in(jax.random.fold_in(self.key, step), 3),
            **self.how(answers=1),
            phi_of=self.policy.phi_of(train.policy),
        )
        references = [questions.set.answers[i] for i in chosen]
        outcomes = self.environment.verify(rollout.branches, references)
        groups = jnp.asarray(self.levels[chosen])
        return groups, jnp.asarray(outcomes), int(rollout.counters["tokens"])

    def describe(self, asked: list[Asked], chosen: Asked, state: RunState) -> dict[str, Any]:
        """Metrics of the rounds, of the first round's rollout, and of the schedule."""
        schedule = state.curriculum
        resampled = self.method.resampling is not None
        return {
            **rollout_metrics(asked[0]),
            **(sampling_metrics(asked, chosen) if resampled else {}),
            **schedule_metrics(
                schedule,
                self.method.question_weights(schedule, self.group_sizes),
                self.levels if self.continuous else np.arange(self.num_groups),
                config=self.config,
            ),
            "rollout/tokens": chosen.rollout.counters["tokens"],
            "rollout/tokens_total": int(state.generated_tokens),
        }
