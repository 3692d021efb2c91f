"""The stages of Algorithm 1, one function each. `algorithm.iterate` calls them in order."""

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
from bacr_jax.out_of_memory import phase_memory
from bacr_jax.questions.stream import QuestionStream
from bacr_jax.rewards import cuts_of_trace, with_grace
from bacr_jax.rollout import Callbacks, Rollout, RolloutRequest
from bacr_jax.training.dynamic_sampling import BatchPlan, Round
from bacr_jax.training.grading import references_of
from bacr_jax.training.run import Run, RunState
from bacr_jax.types import CLOSED_BY_BUDGET, CLOSED_BY_TAG, Poll, Prompts, Trunks, pytree


def round_keys(key: Array, step: int, index: int) -> tuple[Array, Array]:
    """Returns the PRNG keys for the plan and for the rollout of a round.

    Args:
      key: key of the run.
      index: index of the round within its step.
    """
    keys = jax.random.split(jax.random.fold_in(key, step), 2 * index + 2)
    plan_key, rollout_key = keys[-2:]
    return plan_key, rollout_key


@functools.partial(jax.jit, static_argnames=("method", "num_questions"))
def plan_batch(
    schedule: CurriculumState,
    key: Array,
    group_of: Int[Array, "n"],
    group_sizes: Int[Array, "K"],
    *,
    method: Method,
    num_questions: int,
    largest_budget: Int[Array, ""] | None = None,
) -> BatchPlan:
    """Samples questions, budgets and truncation points (lines 3, 4, 6, 8 and 10 of Algorithm 1).

    The probability of a question depends on the weight of its difficulty group k. Its budgets b are
    sampled from the budget prior p(b | k) of this group.

    Args:
      group_of: difficulty group of each question. It is an argument and not a constant of the
        program, because XLA would spend compile time on sorting a constant of this length.
      group_sizes: number of questions in each difficulty group.
      num_questions: number of questions to sample (Q).
      largest_budget: limit to which larger budgets are lowered, in tokens; None for no limit.
    """
    question_key, budget_key, cut_key = jax.random.split(key, 3)
    weights = method.question_weights(schedule, group_sizes)
    questions = curriculum.sample_questions(question_key, weights, group_of, num_questions)
    groups = group_of[questions]
    budgets = method.sample_budgets(budget_key, schedule, groups)
    if largest_budget is not None:
        budgets = jnp.minimum(budgets, largest_budget)
    cuts = method.cuts(cut_key, budgets)
    return BatchPlan(questions, groups, budgets, cuts)


def in_stream_order(
    stream: QuestionStream | None, plan: BatchPlan, cursors: Int[np.ndarray, "K"]
) -> tuple[BatchPlan, Int[np.ndarray, "K"]]:
    """Replaces each question by the next question of its difficulty group (data.order=shuffled).

    Args:
      stream: order of the questions, or None to leave the plan and the cursors unchanged.
      cursors: number of questions drawn so far from each difficulty group.

    Returns:
      The plan with the new questions, and the updated cursors.
    """
    if stream is None:
        return plan, cursors
    questions, cursors = stream.draw(cursors, np.asarray(plan.groups))
    return dataclasses.replace(plan, questions=jnp.asarray(questions)), cursors


def prepare_sampling(
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
    """Loads the policy into the sampler, and returns a function that samples (Algorithm 1, line 9).

    The returned function samples a trace under each budget and an answer at every truncation point.
    Answers are graded while other answers are still being sampled.

    Args:
      step: version number of the policy's parameters.
      poll: callback that is called while the parameters are loaded and while traces are sampled.
      in_background: True if the returned function will run in a background thread, which must not
        call `poll`.
    """
    params = run.params(state.train)
    references, questions = references_of(run, plan)
    budgets = plan.input_budgets
    limits = None
    if plan.shuffled_budgets is not None:
        limits = np.asarray(plan.budgets).reshape(-1)
    if not run.method.truncates_at_budget:
        limits = np.full_like(budgets, run.config.budget.max)
    run.sample.load(params, step, poll)
    return functools.partial(
        run.sample.generate,
        prompts,
        RolloutRequest(budgets, _by_row(np.asarray(plan.cuts)), limits=limits),
        key,
        run.sampler(params),
        Callbacks(
            None if in_background else poll,
            run.task_data.early_grading(references, questions),
        ),
    )


def prompts_of(run: Run, plan: BatchPlan) -> Prompts:
    """Returns one prompt per trace, including the budget if the prompt format contains it."""
    return run.task_data.train.at(plan.rows, plan.input_budgets)


def resolve_cuts(run: Run, plan: BatchPlan, rollout: Rollout) -> BatchPlan:
    """Converts truncation points (cuts) that depend on a trace's length to token positions.

    Methods with `Method.cuts_relative_to_length` plan their cuts as fractions of the budget, before
    the length of the trace is known. For other methods, the plan is returned unchanged.
    """
    if not run.method.cuts_relative_to_length:
        return plan
    lengths = np.asarray(rollout.trunks.thinking)
    limits = np.asarray(rollout.trunks.budgets)
    cuts = np.asarray(plan.cuts)
    # Add the grace window before rescaling, because the sampler does so (`rollout.rows`).
    graced_cuts = with_grace(_by_row(cuts), limits, run.config.budget.grace)
    cuts_in_tokens = cuts_of_trace(graced_cuts, lengths, limits)
    return dataclasses.replace(plan, cuts=jnp.asarray(cuts_in_tokens.reshape(cuts.shape)))


def make_group_batch(
    run: Run,
    state: RunState | None,
    plan: BatchPlan,
    rollout: Rollout,
    outcomes: Float[np.ndarray, "Q G M A"],
    by_reward: Mapping[str, Float[np.ndarray, "Q G M A"]],
    fraction: float,
) -> GroupBatch:
    """Returns the `GroupBatch`, which contains the inputs of the method's rewards and advantages.

    Args:
      state: state of the run. Only used if `Method.needs_score_norms` is true.
      outcomes: correctness of each of the A answers at each of the M truncation points.
      by_reward: score of every answer under each reward in `reward.weights`.
      fraction: completed fraction of training before this step (`run.completed_fraction`).
    """
    trunks = rollout.trunks
    branches = rollout.branches

    def by_group(x: Any) -> Any:
        return np.asarray(x).reshape(plan.budgets.shape)

    extra = _read_texts(run, rollout)
    cuts = _segment_ends(run, plan, trunks)
    score_norm_proxy = _segment_surprise(
        np.asarray(trunks.logprobs), np.asarray(trunks.sampled), cuts
    )
    # Lengths of the first answer at each truncation point.
    answer_lengths = np.asarray(branches.sampled)[:, :: run.method.answers]
    answer_lengths = answer_lengths.reshape(plan.cuts.shape)
    on_host: dict[str, Any] = {
        "cuts": cuts.reshape(plan.cuts.shape),
        "outcomes": outcomes.mean(-1),
        "by_answer": outcomes,
        "by_reward": dict(by_reward),
        "score_norm_proxy": np.asarray(score_norm_proxy).reshape(plan.cuts.shape),
        "fraction": np.float32(fraction),
        "answer_lengths": answer_lengths,
        "sampled": by_group(trunks.sampled),
    }
    if run.method.needs_score_norms:
        assert state is not None
        score_norm = _cumulative_score_norm(run, state, trunks)
        on_host["cumulative_score_norm"] = score_norm.reshape(*plan.budgets.shape, -1)
    return GroupBatch(
        questions=plan.questions,
        budgets=plan.budgets,
        thinking=by_group(trunks.thinking),
        lengths=by_group(trunks.thinking) + answer_lengths[..., -1],
        closed=by_group(np.asarray(trunks.close) != CLOSED_BY_BUDGET),
        closed_by_tag=by_group(np.asarray(trunks.close) == CLOSED_BY_TAG),
        extra={name: by_group(values) for name, values in extra.items()},
        **on_host,
    )


def _read_texts(run: Run, rollout: Rollout) -> dict[str, np.ndarray]:
    """Returns the numbers that the method extracts from thinking and answers, by name."""
    numbers: dict[str, np.ndarray] = {}
    if run.method.read is not None:
        trunks = rollout.trunks
        rows = zip(
            np.asarray(trunks.tokens), np.asarray(trunks.prompt_lengths), np.asarray(trunks.sampled)
        )
        thinking = [row[start : start + length].tolist() for row, start, length in rows]
        numbers |= run.method.read(run.task_data.tokenizer, thinking)
    if run.method.read_answers is not None:
        numbers |= run.method.read_answers(run.task_data.answer_texts(rollout.branches))
    return numbers


def _segment_ends(run: Run, plan: BatchPlan, trunks: Trunks) -> Int[np.ndarray, "B M"]:
    """Returns the end of each thinking segment, in sampled tokens.

    A segment is the thinking between two truncation points (cuts), the last one with the grace
    window. A cut inside the closing tag is moved to its end, after which its answer was sampled. A
    cut before the tag stays: without the tag, its answer is forced, with other line breaks at most.
    """
    cuts = _by_row(np.asarray(plan.cuts))
    # Cuts that depend on a trace's length already include the window (`resolve_cuts`).
    if not run.method.cuts_relative_to_length:
        cuts = with_grace(cuts, np.asarray(trunks.budgets), run.config.budget.grace)
    tag_start = np.asarray(trunks.thinking)[:, None]
    tag_end = np.asarray(trunks.sampled)[:, None]
    return np.where((tag_start < cuts) & (cuts < tag_end), tag_end, cuts)


def _cumulative_score_norm(run: Run, state: RunState, trunks: Trunks) -> Float[np.ndarray, "B T"]:
    """Returns the cumulative sum of the squared score norms of each trace's tokens.

    Entries after the last sampled token are 0.
    """
    energies = thinking_energies(
        run.params(state.train),
        trunks,
        run.task_data.rules.allowed_tokens,
        spec=run.policy.learner,
    )
    is_sampled = np.arange(energies.shape[1]) < np.asarray(trunks.sampled)[:, None]
    return np.where(is_sampled, np.cumsum(energies, axis=1), np.float32(0.0))


def _by_row(x: Any) -> Any:
    """Merges the leading axes of an array: [Q, G, M] becomes [B, M] with B = Q * G rows."""
    return x.reshape(-1, x.shape[-1])


_segment_surprise = jax.jit(advantages.segment_score_norm_proxy)
_score_statistics = jax.jit(advantages.score_statistics)


@functools.partial(jax.jit, static_argnames=("method",))
def _keep(group_batch: GroupBatch, method: Method) -> Bool[Array, "Q"]:
    """Returns True for questions that dynamic sampling keeps."""
    assert method.dynamic_sampling is not None
    return method.dynamic_sampling.keep(group_batch)


def useful_questions(method: Method, group_batch: GroupBatch) -> Bool[np.ndarray, "Q"]:
    """Returns True for questions to learn from.

    All questions are useful if the method has no dynamic sampling.
    """
    if method.dynamic_sampling is None:
        return np.ones(len(group_batch.questions), bool)
    return np.asarray(_keep(group_batch, method=method))


def predict_values(
    run: Run, train: TrainState, chosen: Round
) -> tuple[Float[Array, "Q G M"] | None, Any]:
    """Returns the value predictions V(q, b, b_j), and the input features of the value head.

    q is a question, b a budget and b_j a truncation point. Without value head, both are None.
    """
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
                _by_row(plan.cuts),
                spec=run.policy.learner,
            )
        )
    return values.reshape(plan.cuts.shape), features


def first_step_values(
    run: Run,
    state: RunState,
    group_batch: GroupBatch,
    values: Float[Array, "Q G M"] | None,
    step: int,
) -> tuple[TrainState, Float[Array, "Q G M"] | None]:
    """Initializes the value head's bias to the mean reward of the first batch.

    At step 0, the returned value of each question is the mean reward of the other questions, so
    that a trace's own reward is not part of its baseline.

    Returns:
      The train state and the values. Both are unchanged after step 0, and if value.bias_start is
      False.
    """
    train = state.train
    if step > 0 or values is None or train.head is None or not run.config.value.bias_start:
        return train, values
    mean, others = _first_values(state.method_state, group_batch, method=run.method)
    head = value.with_bias(train.head, mean)
    # Keep the sharding of the predicted values, for which the next stages are compiled.
    return dataclasses.replace(train, head=head), jax.device_put(others, values.sharding)


@functools.partial(jax.jit, static_argnames=("method",))
def _first_values(
    method_state: Any, group_batch: GroupBatch, *, method: Method
) -> tuple[Float[Array, ""], Float[Array, "Q G M"]]:
    """Returns the batch's mean reward, and for each question the mean reward of all others.

    Both are 0 if any reward is non-finite.
    """
    rewards = method.rewards(method_state, group_batch)
    good = jnp.isfinite(rewards).all()
    rewards = jnp.where(good, rewards, 0.0)
    others = advantages.other_questions_mean(rewards)
    return rewards.mean(), jnp.broadcast_to(others[:, None, None], rewards.shape)


@pytree
class TokenAdvantages:
    """Rewards of a batch and the advantages of its tokens.

    Attributes:
      thinking: advantage of each thinking token.
      answers: advantage of each of a trace's N answers, summed over all truncation points (cuts)
        that share the answer.
      rewards: reward at each truncation point.
      returns: return of each thinking segment, which ends at a truncation point.
      keep: True for rollouts that count in the loss. None if all of them count.
    """

    thinking: Float[Array, "B T"]
    answers: Float[Array, "B N"]
    rewards: Float[Array, "Q G M"]
    returns: Float[Array, "Q G M"]
    keep: Bool[Array, "Q G"] | None


def compute_advantages(
    run: Run,
    state: RunState,
    chosen: Round,
    reward_batch: GroupBatch,
    values: Float[Array, "Q G M"] | None,
) -> tuple[TokenAdvantages, dict[str, Array]]:
    """Computes rewards and advantages, and their metrics (lines 11 and 12 of Algorithm 1).

    Args:
      reward_batch: batch whose outcomes are weighted by `reward.weights` (`grading.credited`).
      values: value predictions V(q, b, b_j), or None if the method has no value head.
    """
    token_level, metrics = token_advantages(
        state.method_state,
        reward_batch,
        values,
        chosen.rollout.branches.source,
        method=run.method,
        max_thinking=run.policy.rollout.max_sampled,
    )
    # Logged for all methods, because they describe the effect that score weighting would have.
    scores = _score_statistics(token_level.returns, chosen.group_batch.score_norm_proxy)
    return token_level, metrics | {f"score/{name}": x for name, x in scores.items()}


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
    """Computes rewards and segment advantages, and assigns them to tokens (lines 11, 12).

    A segment is the thinking between two truncation points (cuts).

    Args:
      source: index of the answer that is used at each cut (`Branches.source`). Several cuts can
        share an answer.
      max_thinking: number of thinking tokens per trace (T), padding included.

    Returns:
      The rewards and token advantages, and the metrics of rewards and advantages.
    """
    rewards = method.rewards(method_state, group_batch)
    by_segment = method.advantages(method_state, group_batch, rewards, values)
    returns = rewards if by_segment.returns is None else by_segment.returns
    residual = returns - by_segment.baseline
    return_variance = jnp.maximum(jnp.var(returns), 1e-6)
    metrics = {
        "reward/mean": rewards.mean(),
        "advantage/mean": by_segment.thinking.mean(),
        "advantage/std": by_segment.thinking.std(),
        "advantage/residual_std": residual.std(),
        "advantage/explained": 1.0 - jnp.var(residual) / return_variance,
    }
    by_token = by_segment.tokens
    if by_token is None:
        by_token = advantages.scatter_segments(
            _by_row(by_segment.thinking), _by_row(group_batch.cuts), max_thinking
        )
    token_level = TokenAdvantages(
        thinking=_by_row(by_token),
        answers=advantages.sum_reused(by_segment.answers.reshape(source.shape), source),
        rewards=rewards,
        returns=returns,
        keep=by_segment.keep,
    )
    return token_level, metrics


def learner_batch(run: Run, chosen: Round, token_level: TokenAdvantages) -> Batch:
    """Builds the learner's batch from tokens and advantages.

    For traces that the loss excludes, the number of sampled tokens is set to 0.
    """
    num_answers = run.method.answers

    def by_answer(x: Any) -> np.ndarray:
        """Repeats each truncation point's value for all of its answers.

        Converts [questions, traces, truncation points] to [rows, answers].
        """
        return _by_row(np.repeat(np.asarray(x), num_answers, axis=-1))

    batch = make_batch(
        chosen.prompts,
        chosen.rollout.trunks,
        chosen.rollout.branches,
        cuts=by_answer(chosen.plan.cuts),
        thinking_advantages=token_level.thinking,
        answer_advantages=token_level.answers,
        value_targets=by_answer(token_level.rewards),
        policy_budgets=(
            None if chosen.plan.shuffled_budgets is None else chosen.plan.input_budgets
        ),
    )
    in_loss = np.broadcast_to(chosen.useful[:, None], chosen.plan.budgets.shape)
    if token_level.keep is not None:
        in_loss = in_loss & np.asarray(token_level.keep)
    return only_rows(batch, in_loss.reshape(-1))


def update(
    run: Run, train: TrainState, batch: Batch, features: Any, step: int, reference: Any
) -> tuple[TrainState, dict[str, Any]]:
    """Updates the policy on each minibatch (Eq. 16), then fits the value head (line 14).

    Args:
      features: input features of the value head, from `predict_values`.
      reference: parameters of the reference policy for a KL penalty; None without a KL penalty.

    Returns:
      The new train state, and the metrics of the policy updates.
    """
    settings = run.config.value
    if run.before_update is not None:
        run.before_update()
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
            # All answers at a truncation point have the same target, so use the first one's.
            batch.value_targets[:, :: run.method.answers],
            head_tx=run.updates.head_tx,
            num_steps=settings.inner_steps,
        )
        train = dataclasses.replace(train, head=head, head_opt=head_opt)
    return train, metrics


@jax.jit
def all_finite(tree: Any) -> Bool[Array, ""]:
    """True if all numbers in a pytree are finite."""
    return jnp.array([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]).all()


@functools.partial(jax.jit, static_argnames=("method",))
def _update_if_finite(
    method_state: Any,
    group_batch: GroupBatch,
    rewards: Float[Array, "Q G M"],
    values: Float[Array, "Q G M"] | None,
    *,
    method: Method,
) -> Any:
    """Returns the new state of the method, or the old state if any reward is non-finite."""
    new = method.update(method_state, group_batch, rewards, values)
    return optax.tree.where(jnp.isfinite(rewards).all(), new, method_state)


@jax.jit
def _new_if_finite(new: Any, old: Any) -> Any:
    """Returns the new state if all of its numbers are finite, otherwise the old state."""
    return optax.tree.where(all_finite(new), new, old)


def update_method(
    method_state: Any,
    group_batch: GroupBatch,
    rewards: Float[Array, "Q G M"],
    values: Float[Array, "Q G M"] | None,
    *,
    method: Method,
) -> Any:
    """Updates the state of the method, unless a reward or the new state is non-finite.

    Otherwise, a single non-finite number would stay in every running mean forever.
    """
    # Use two compiled programs, because a joint program rounds the running statistics differently.
    new = _update_if_finite(method_state, group_batch, rewards, values, method=method)
    return _new_if_finite(new, method_state)


def adapt_schedule(run: Run, state: RunState, first: Round, step: int) -> CurriculumState:
    """Records the outcomes of a step's first round, and updates the curriculum if an update is due.

    This is line 16 of Algorithm 1. An update is due every `curriculum.update_every` steps, or once
    per epoch if that is None.
    """
    settings = run.config.curriculum
    interval = settings.update_every
    if interval is None:
        # Steps of one pass over the training questions, rounded up.
        interval = -(-len(run.task_data.train) // run.config.rollout.questions)
    correct = first.group_batch.outcomes[..., -1]
    is_due = (step + 1) % interval == 0
    return update_curriculum(
        state.curriculum, first.plan.groups, correct, is_due, settings=settings
    )


@functools.partial(jax.jit, static_argnames=("settings",))
def update_curriculum(
    before: CurriculumState,
    groups: Int[Array, "Q"],
    correct: Float[Array, "Q G"],
    due: Bool[Array, ""] | bool,
    *,
    settings: CurriculumConfig,
) -> CurriculumState:
    """Records outcomes, and updates the pass rates of the curriculum if due (Eq. 5 and 6).

    Args:
      groups: difficulty group of each question.
      correct: outcomes at the full budget. If any outcome is non-finite, the curriculum is left
        unchanged, because a non-finite number would stay in every average.
      due: True in steps that update the pass rates.
    """
    recorded = curriculum.record_outcomes(before, groups, correct, ema_decay=settings.ema_decay)
    updated = curriculum.update_pass_rates(recorded, source=settings.pass_rate)
    after = optax.tree.where(due, updated, recorded)
    return optax.tree.where(jnp.isfinite(correct).all(), after, before)
