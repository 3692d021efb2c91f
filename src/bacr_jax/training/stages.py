"""The stages of Algorithm 1, each a function; `algorithm.iterate` calls them in its order."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from bacr_jax import advantages, curriculum
from bacr_jax.config import CurriculumConfig
from bacr_jax.curriculum import CurriculumState
from bacr_jax.learner import train_step
from bacr_jax.learner.batch import Batch, make_batch, only_rows
from bacr_jax.learner.scoring import thinking_energies
from bacr_jax.learner.train_step import TrainState
from bacr_jax.methods import GroupBatch, Method
from bacr_jax.model import value
from bacr_jax.oom import phase_memory
from bacr_jax.questions.stream import QuestionStream
from bacr_jax.rewards import cuts_of_trace, with_grace
from bacr_jax.rollout import Listeners, Rollout, Rows
from bacr_jax.training.dynamic_sampling import BatchPlan, Round
from bacr_jax.training.grading import references_of
from bacr_jax.training.run import Run, RunState
from bacr_jax.types import CLOSED_BY_BUDGET, CLOSED_BY_TAG, Poll, Prompts, pytree


def round_keys(key: Array, step: int, index: int) -> tuple[Array, Array]:
    """Keys of a round's plan and rollout."""
    plan, rollout = jax.random.split(jax.random.fold_in(key, step), 2 * index + 2)[-2:]
    return plan, rollout


@functools.partial(jax.jit, static_argnames=("method", "num_questions"))
def plan_batch(
    schedule: CurriculumState,
    key: Array,
    group_of: Int[Array, "n"],
    group_sizes: Int[Array, "K"],
    *,
    method: Method,
    num_questions: int,
) -> BatchPlan:
    """Lines 3, 4, 6, 8 and 10: questions by group weight, budgets from the prior, cuts.

    Args:
      group_of: group of each question; an argument, since XLA would sort a constant of this length
        while compiling.
    """
    question_key, budget_key, cut_key = jax.random.split(key, 3)
    weights = method.question_weights(schedule, group_sizes)
    questions = curriculum.sample_questions(question_key, weights, group_of, num_questions)
    groups = group_of[questions]
    budgets = method.sample_budgets(budget_key, schedule, groups)
    cuts = method.cuts(cut_key, budgets)
    return BatchPlan(questions, groups, budgets, cuts)


def in_stream_order(
    stream: QuestionStream | None, plan: BatchPlan, cursors: Int[np.ndarray, "K"]
) -> tuple[BatchPlan, Int[np.ndarray, "K"]]:
    """Line 6 with data.order=shuffled: of each question's group the next, and the new cursors."""
    if stream is None:
        return plan, cursors
    questions, cursors = stream.draw(cursors, np.asarray(plan.groups))
    return dataclasses.replace(plan, questions=jnp.asarray(questions)), cursors


def traces_of(
    run: Run,
    state: RunState,
    step: int,
    plan: BatchPlan,
    prompts: Prompts,
    key: Array,
    poll: Poll,
    *,
    in_background: bool = False,
) -> Callable[[], Rollout]:
    """Line 9, begun by a call: trunks under their budgets, answers at every cut, soon graded.

    Args:
      step: names the parameters of `state`, which are handed over at once.
      poll: called while the parameters are handed over, and while the traces are sampled.
      in_background: the returned function will run in another thread, where nothing is polled.
    """
    params, (references, questions) = run.params(state.train), references_of(run, plan)
    budgets = np.asarray(plan.budgets).reshape(-1)
    run.sample.load(params, step, poll)
    return functools.partial(
        run.sample.generate,
        prompts,
        Rows(
            budgets,
            np.asarray(plan.cuts).reshape(-1, plan.cuts.shape[-1]),
            limits=None if run.method.held else np.full_like(budgets, run.config.budget.max),
        ),
        key,
        run.sampler(params),
        Listeners(
            None if in_background else poll,
            run.environment.early_grading(references, questions),
        ),
    )


def prompts_of(run: Run, plan: BatchPlan) -> Prompts:
    """Prompts of a plan's rows, with each row's budget where it is told in words."""
    return run.environment.train.at(plan.rows, np.asarray(plan.budgets).reshape(-1))


def placed_cuts(method: Method, plan: BatchPlan, rollout: Rollout) -> BatchPlan:
    """The plan with cuts where the rollout has put them (`Method.own_cuts`)."""
    if not method.own_cuts:
        return plan
    lengths, limits = np.asarray(rollout.trunks.thinking), np.asarray(rollout.trunks.budgets)
    cuts = np.asarray(plan.cuts)
    placed = cuts_of_trace(cuts.reshape(-1, cuts.shape[-1]), lengths, limits)
    return dataclasses.replace(plan, cuts=jnp.asarray(placed.reshape(cuts.shape)))


def observe(
    run: Run,
    state: RunState | None,
    plan: BatchPlan,
    rollout: Rollout,
    outcomes: Float[np.ndarray, "Q G M A"],
    by_reward: Mapping[str, Float[np.ndarray, "Q G M A"]],
    step: int,
) -> GroupBatch:
    """What the method may look at; `state` is read if it needs the path of scores."""
    trunks, branches = rollout.trunks, rollout.branches

    def by_group(x: Any) -> Any:
        return np.asarray(x).reshape(plan.budgets.shape)

    extra: dict[str, np.ndarray] = {}
    if run.method.read is not None:
        start, count = np.asarray(trunks.prompt_lengths), np.asarray(trunks.sampled)
        thinking = [
            row[first : first + length].tolist()
            for row, first, length in zip(np.asarray(trunks.tokens), start, count)
        ]
        extra |= run.method.read(run.environment.tokenizer, thinking)
    if run.method.read_answers is not None:
        extra |= run.method.read_answers(run.environment.answer_texts(branches))
    flat = np.asarray(plan.cuts).reshape(-1, plan.cuts.shape[-1])
    cuts = with_grace(flat, np.asarray(trunks.budgets), run.config.budget.grace)
    # The answer at a cut within the closing tag has read all of the tag (`rollout.branches`).
    begun, ended = (np.asarray(x)[:, None] for x in (trunks.thinking, trunks.sampled))
    cuts = np.where((begun < cuts) & (cuts < ended), ended, cuts)
    surprise = _segment_surprise(*map(np.asarray, (trunks.logprobs, trunks.sampled)), cuts)
    # The answer at each cut; with several, the first of them.
    answered = np.asarray(branches.sampled)[:, :: run.method.answers].reshape(plan.cuts.shape)
    on_host: dict[str, Any] = {
        "cuts": cuts.reshape(plan.cuts.shape),
        "outcomes": outcomes.mean(-1),
        "by_answer": outcomes,
        "by_reward": dict(by_reward),
        "surprise": np.asarray(surprise).reshape(plan.cuts.shape),
        "fraction": np.float32(step / run.total_steps),
        "answer_lengths": answered,
        "sampled": by_group(trunks.sampled),
    }
    if run.method.needs_path:
        assert state is not None
        energies = thinking_energies(
            run.params(state.train),
            trunks,
            run.environment.rules.allowed_tokens,
            spec=run.policy.learner,
        )
        there = np.arange(energies.shape[1]) < np.asarray(trunks.sampled)[:, None]
        path = np.where(there, np.cumsum(energies, axis=1), np.float32(0.0))
        on_host["path"] = path.reshape(*plan.budgets.shape, -1)
    return GroupBatch(
        questions=plan.questions,
        budgets=plan.budgets,
        thinking=by_group(trunks.thinking),
        lengths=by_group(trunks.thinking) + answered[..., -1],
        closed=by_group(np.asarray(trunks.close) != CLOSED_BY_BUDGET),
        closed_by_tag=by_group(np.asarray(trunks.close) == CLOSED_BY_TAG),
        extra={name: by_group(values) for name, values in extra.items()},
        **on_host,
    )


_segment_surprise = jax.jit(advantages.segment_surprise)
_score_statistics = jax.jit(advantages.score_statistics)
_keep = jax.jit(
    lambda group_batch, method: method.dynamic_sampling.keep(group_batch),
    static_argnames=("method",),
)


def useful_questions(method: Method, group_batch: GroupBatch) -> Bool[np.ndarray, "Q"]:
    """Questions that the method wants to learn from."""
    if method.dynamic_sampling is None:
        return np.ones(len(group_batch.questions), bool)
    return np.asarray(_keep(group_batch, method=method))


def predict_values(
    run: Run, train: TrainState, chosen: Round
) -> tuple[Float[Array, "Q G M"] | None, Any]:
    """V(q, b, b_j), and the features it was made of; (None, None) without a value head."""
    if train.head is None:
        return None, None
    plan = chosen.plan
    with phase_memory("value head", questions=len(plan.questions)):
        values, features = jax.block_until_ready(
            train_step.question_values(
                run.params(train),
                train.head,
                chosen.prompts,
                plan.budgets.reshape(-1),
                plan.cuts.reshape(-1, plan.cuts.shape[-1]),
                spec=run.policy.learner,
            )
        )
    return values.reshape(plan.cuts.shape), features


def start_values(
    run: Run,
    state: RunState,
    group_batch: GroupBatch,
    values: Float[Array, "Q G M"] | None,
    step: int,
) -> tuple[TrainState, Float[Array, "Q G M"] | None]:
    """At step 0 the head starts at the first batch's mean reward (value.bias_start).

    Its values in this step are, for each question, the mean over the other questions: no trace's
    own reward is in its baseline. At later steps state and values stay as they were.
    """
    train = state.train
    if step > 0 or values is None or train.head is None or not run.config.value.bias_start:
        return train, values
    mean, others = _first_values(state.method_state, group_batch, method=run.method)
    head = value.with_bias(train.head, mean)
    # Where the head's own values lie: what comes next is compiled for them.
    return dataclasses.replace(train, head=head), jax.device_put(others, values.sharding)


@functools.partial(jax.jit, static_argnames=("method",))
def _first_values(
    method_state: Any, group_batch: GroupBatch, *, method: Method
) -> tuple[Float[Array, ""], Float[Array, "Q G M"]]:
    """Mean reward, and that of the other questions; zeros if a reward is not finite."""
    rewards = method.rewards(method_state, group_batch)
    good = jnp.isfinite(rewards).all()
    rewards = jnp.where(good, rewards, 0.0)
    others = advantages.other_questions_mean(rewards)
    return rewards.mean(), jnp.broadcast_to(others[:, None, None], rewards.shape)


@pytree
class TokenAdvantages:
    """Rewards, and the advantages they give to tokens.

    Attributes:
      answers: advantage of each of a row's N answers, summed over the cuts it serves.
      returns: what each thinking segment is paid.
      keep: rollouts that count in the loss; None: all.
    """

    thinking: Float[Array, "B T"]
    answers: Float[Array, "B N"]
    rewards: Float[Array, "Q G M"]
    returns: Float[Array, "Q G M"]
    keep: Bool[Array, "Q G"] | None


def advantages_of(
    run: Run, state: RunState, chosen: Round, paid: GroupBatch, values: Float[Array, "Q G M"] | None
) -> tuple[TokenAdvantages, dict[str, Array]]:
    """Lines 11 and 12: rewards and advantages, with their metrics; `paid` is what is credited."""
    given, metrics = token_advantages(
        state.method_state,
        paid,
        values,
        chosen.rollout.branches.source,
        method=run.method,
        max_thinking=run.policy.rollout.max_sampled,
    )
    # What weighing returns by scores would change.
    scores = _score_statistics(given.returns, chosen.group_batch.surprise)
    return given, metrics | {f"score/{name}": value for name, value in scores.items()}


@functools.partial(jax.jit, static_argnames=("method", "max_thinking"))
def token_advantages(
    method_state: Any,
    group_batch: GroupBatch,
    values: Float[Array, "Q G M"] | None,
    source: Int[Array, "B N"],
    *,
    method: Method,
    max_thinking: int,
) -> tuple[TokenAdvantages, dict[str, Array]]:
    """Lines 11 and 12: dense rewards and advantages, spread over tokens.

    Args:
      source: index of the answer that serves each place (`Branches.source`).
    """
    rewards = method.rewards(method_state, group_batch)
    found = method.advantages(method_state, group_batch, rewards, values)
    flat = lambda x: x.reshape(-1, x.shape[-1])
    returns = rewards if found.returns is None else found.returns
    residual = returns - found.baseline
    spread = jnp.maximum(jnp.var(returns), 1e-6)
    metrics = {
        "reward/mean": rewards.mean(),
        "advantage/mean": found.thinking.mean(),
        "advantage/std": found.thinking.std(),
        "advantage/residual_std": residual.std(),
        "advantage/explained": 1.0 - jnp.var(residual) / spread,
    }
    by_token = found.tokens
    if by_token is None:
        by_token = advantages.scatter_segments(
            flat(found.thinking), flat(group_batch.cuts), max_thinking
        )
    tokens = TokenAdvantages(
        thinking=flat(by_token),
        answers=advantages.sum_reused(found.answers.reshape(source.shape), source),
        rewards=rewards,
        returns=returns,
        keep=found.keep,
    )
    return tokens, metrics


def learner_batch(run: Run, chosen: Round, advantages: TokenAdvantages) -> Batch:
    """Tokens and advantages, side by side; rows that do not count have no sampled tokens."""
    answers = run.method.answers
    flat = lambda x: np.repeat(np.asarray(x), answers, axis=-1).reshape(-1, x.shape[-1] * answers)
    joined = make_batch(
        chosen.prompts,
        chosen.rollout.trunks,
        chosen.rollout.branches,
        cuts=flat(chosen.plan.cuts),
        thinking_advantages=advantages.thinking,
        answer_advantages=advantages.answers,
        returns=flat(advantages.rewards),
    )
    keep = np.broadcast_to(chosen.useful[:, None], chosen.plan.budgets.shape)
    if advantages.keep is not None:
        keep = keep & np.asarray(advantages.keep)
    return only_rows(joined, keep.reshape(-1))


def update(
    run: Run, train: TrainState, batch: Batch, features: Any, step: int, reference: Any
) -> tuple[TrainState, dict[str, Any]]:
    """Line 14: Eq. 16 on each minibatch, then the value head's extra steps."""
    settings = run.config.value
    train, metrics = run.updates(
        train,
        batch,
        reference=reference,
        frozen=run.frozen,
        update_policy=step >= settings.warmup_iterations or train.head is None,
    )
    if train.head is not None and settings.inner_steps:
        head, head_opt = train_step.fit_value(
            train.head,
            train.head_opt,
            features,
            # The returns of a cut, which its answers share.
            batch.returns[:, :: run.method.answers],
            head_tx=run.updates.head_tx,
            num_steps=settings.inner_steps,
        )
        train = dataclasses.replace(train, head=head, head_opt=head_opt)
    return train, metrics


@jax.jit
def all_finite(tree: Any) -> Bool[Array, ""]:
    """Whether every number of a state is one."""
    return jnp.array([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]).all()


@functools.partial(jax.jit, static_argnames=("method",))
def _updated(
    method_state: Any,
    group_batch: GroupBatch,
    rewards: Float[Array, "Q G M"],
    values: Float[Array, "Q G M"] | None,
    *,
    method: Method,
) -> Any:
    """What the method makes of a batch whose rewards are finite."""
    new = method.update(method_state, group_batch, rewards, values)
    return optax.tree.where(jnp.isfinite(rewards).all(), new, method_state)


@jax.jit
def _finite(new: Any, old: Any) -> Any:
    """The new state if all of it is finite, else the old one."""
    return optax.tree.where(all_finite(new), new, old)


def update_method(
    method_state: Any,
    group_batch: GroupBatch,
    rewards: Float[Array, "Q G M"],
    values: Float[Array, "Q G M"] | None,
    *,
    method: Method,
) -> Any:
    """The method's own state; it learns nothing from a batch that is not finite.

    One number that is not, in rewards, values or scores, would stay in every running mean.
    """
    # Two programs: in one, what the check reads changes how the moments are rounded.
    new = _updated(method_state, group_batch, rewards, values, method=method)
    return _finite(new, method_state)


def adapt_schedule(run: Run, state: RunState, first: Round, step: int) -> CurriculumState:
    """Line 16: pass rates of the round that nothing was chosen from, and with them Eq. 5 and 6."""
    settings = run.config.curriculum
    every = settings.update_every
    if every is None:
        every = -(-len(run.environment.train) // run.config.rollout.questions)
    correct = first.group_batch.outcomes[..., -1]
    due = (step + 1) % every == 0
    return adapted(state.curriculum, first.plan.groups, correct, due, settings=settings)


@functools.partial(jax.jit, static_argnames=("settings",))
def adapted(
    before: CurriculumState,
    groups: Int[Array, "Q"],
    correct: Float[Array, "Q G"],
    due: Bool[Array, ""] | bool,
    *,
    settings: CurriculumConfig,
) -> CurriculumState:
    """Records outcomes, and where the schedule is due, moves its pass rates (Eq. 5 and 6).

    Args:
      correct: outcomes at the full budget; if one is no number, nothing is recorded.
    """
    seen = curriculum.record_outcomes(before, groups, correct, ema_decay=settings.ema_decay)
    moved = curriculum.update_pass_rates(seen, source=settings.pass_rate)
    after = optax.tree.where(due, moved, seen)
    # One outcome that is no number would stay in every average to come.
    return optax.tree.where(jnp.isfinite(correct).all(), after, before)
