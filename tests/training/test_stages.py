"""Tests the order of questions, and the batches that the method and the learner receive."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.config.settings import resolve
from bacr_jax.methods import Advantages, load_method
from bacr_jax.questions.ledger import ledger_tokenizer
from bacr_jax.rollout import Rollout
from bacr_jax.runs.folder import open_run
from bacr_jax.training.dynamic_sampling import BatchPlan, Round
from bacr_jax.training.loop import Trainer
from bacr_jax.training.stages import (
    TokenAdvantages,
    adapt_schedule,
    in_stream_order,
    learner_batch,
    make_group_batch,
    token_advantages,
)
from bacr_jax.types import CLOSED_BY_BUDGET, CLOSED_BY_EOS, CLOSED_BY_TAG, Branches, Prompts, Trunks
from methods_world import group_batch, load, run_of
from small_config import small_config

CHANGES = """
data: {ledger: {train_size: 22}, order: shuffled, num_groups: 1} # 20 without those held out
train: {steps: 5}
"""


def draw(trainer, state, steps):
    """The questions of some steps whose schedule asks for group 0 only."""
    zeros = jnp.zeros((4, 2), jnp.int32)
    plan = BatchPlan(zeros[:, 0], zeros[:, 0], zeros, zeros[..., None])
    found = []
    for _ in range(steps):
        chosen, stream = in_stream_order(trainer.run.stream, plan, state.stream)
        state = dataclasses.replace(state, stream=stream)
        found += np.asarray(chosen.questions).tolist()
    return found, state


def test_shuffled_questions_come_once_in_a_pass_also_after_a_resume(tmp_path):
    pytest.importorskip("grain", reason="Grain is not installed")
    run = tmp_path / "run"
    settings = small_config(tmp_path, CHANGES, f"output.dir={run}")
    with open_run(run, settings) as folder:
        trainer = Trainer(settings, folder)
        first, state = draw(trainer, trainer.start()[0], 2)
        trainer.save(state, 2)
        trainer.checkpoints.close()
    # Resume the run with nothing but its folder.
    with open_run(run, settings) as folder:
        trainer = Trainer(settings, folder)
        state, step = trainer.start()
        assert step == 2
        assert np.asarray(state.stream).tolist() == [8]
        second, _ = draw(trainer, state, 3)
        trainer.checkpoints.close()
    assert sorted(first + second) == list(range(20))
    assert first + second != list(range(20))


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Two questions with two traces each, which are answered at one truncation point."""
    keys = ("cuts.count=1", "cuts.weights=last", "reward.dense=false")
    sizes = ("rollout.questions=2", "rollout.group_size=2")
    return load(tmp_path_factory.mktemp("stages"), "bacr-full", *keys, *sizes)


@pytest.fixture(scope="module")
def run_and_state(config):
    tokenizer = ledger_tokenizer()
    return run_of(config, (tokenizer, len(tokenizer)))


@pytest.fixture
def run(run_and_state):
    return run_and_state[0]


def of_rows(*values):
    return np.array(values, np.int32)


def test_lengths_and_endings_of_a_group_are_those_of_its_traces(run):
    """One question with three traces, which end with the tag, with the turn and at the budget."""
    question = jnp.zeros(1, jnp.int32)
    plan = BatchPlan(question, question, jnp.full((1, 3), 6), jnp.array([[[3, 6]] * 3]))
    trunks = dataclasses.replace(
        Trunks.empty(3, width=9, sampled=8),
        prompt_lengths=of_rows(1, 1, 1),
        sampled=of_rows(5, 4, 6),
        thinking=of_rows(4, 3, 6),
        close=of_rows(CLOSED_BY_TAG, CLOSED_BY_EOS, CLOSED_BY_BUDGET),
        budgets=of_rows(6, 6, 6),
    )
    answered = of_rows([1, 3], [2, 5], [4, 2])
    branches = dataclasses.replace(Branches.empty(3, 2, width=7, sampled=5), sampled=answered)
    rollout = Rollout(trunks, branches, {})
    outcomes = np.zeros((1, 3, 2, 1), np.float32)
    batch = make_group_batch(run, None, plan, rollout, outcomes, {}, 0.0)
    np.testing.assert_array_equal(batch.answer_lengths, [answered])
    # The length contains the answer at the last truncation point.
    np.testing.assert_array_equal(batch.lengths, [[4 + 3, 3 + 5, 6 + 2]])
    np.testing.assert_array_equal(batch.closed, [[True, True, False]])
    np.testing.assert_array_equal(batch.closed_by_tag, [[True, False, False]])


def test_the_learner_has_rewards_as_targets_and_only_traces_that_count(config, run):
    """Only the first question is useful, and its second trace is not kept."""
    trunks = dataclasses.replace(Trunks.empty(4, width=3, sampled=2), sampled=of_rows(2, 2, 2, 2))
    ones = np.ones((4, 1), np.int32)
    branches = Branches.empty(4, 1, width=2, sampled=1)
    branches = dataclasses.replace(branches, sampled=ones, forced=ones)
    prompts = Prompts(trunks.tokens, of_rows(1, 1, 1, 1), of_rows(0, 0, 0, 0), of_rows(1, 1, 1, 1))
    question, budgets = jnp.zeros(2, jnp.int32), jnp.full((2, 2), 2)
    chosen = Round(
        BatchPlan(question, question, budgets, budgets[..., None]),
        prompts,
        Rollout(trunks, branches, {}),
        group_batch(config),
        np.array([True, False]),
    )
    token_level = TokenAdvantages(
        thinking=jnp.ones((4, 2)),
        answers=jnp.ones((4, 1)),
        rewards=jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(2, 2, 1),
        returns=jnp.array([5.0, 6.0, 7.0, 8.0]).reshape(2, 2, 1),
        keep=jnp.array([[True, False], [True, True]]),
    )
    batch = learner_batch(run, chosen, token_level)
    np.testing.assert_array_equal(batch.sampled, [2, 0, 0, 0])
    np.testing.assert_array_equal(batch.answered, [[1], [0], [0], [0]])
    np.testing.assert_array_equal(batch.value_targets, [[1], [2], [3], [4]])


def test_an_answer_has_the_advantages_of_all_cuts_that_it_serves(tmp_path):
    keys = ("cuts.count=2", "cuts.weights=uniform", "rollout.questions=1", "rollout.group_size=2")
    config = load(tmp_path, "bacr-full", *keys)
    zeros = jnp.zeros((1, 2, 2))
    credit = Advantages(zeros, jnp.array([[[1.0, 2.0], [4.0, 8.0]]]), zeros)
    method = load_method(resolve(config).method)
    method = dataclasses.replace(method, advantages=lambda *_: credit)
    # Both cuts of the second trace use its first answer.
    source = jnp.array([[0, 1], [0, 0]])
    batch = group_batch(config)
    token_level, _ = token_advantages(None, batch, None, source, method=method, max_thinking=12)
    np.testing.assert_array_equal(token_level.answers, [[1.0, 2.0], [12.0, 0.0]])


@pytest.mark.parametrize(("update_every", "due"), [(None, 3), (2, 2)])
def test_pass_rates_move_once_an_epoch_or_every_few_steps(config, run_and_state, update_every, due):
    """An epoch has three steps, because the last one has fewer questions than the others."""
    run, state = run_and_state
    questions = len(run.task_data.train) // 3 + 1
    assert len(run.task_data.train) % questions > 0
    settings = dataclasses.replace(
        config,
        curriculum=dataclasses.replace(config.curriculum, update_every=update_every),
        rollout=dataclasses.replace(config.rollout, questions=questions),
    )
    run = dataclasses.replace(run, config=settings)
    batch, groups = group_batch(config), jnp.zeros(2, jnp.int32)
    plan = BatchPlan(batch.questions, groups, batch.budgets, batch.cuts)
    prompts = Prompts(np.zeros((4, 3), np.int32), *3 * [np.zeros(4, np.int32)])
    trunks, branches = Trunks.empty(4, width=3, sampled=2), Branches.empty(4, 1, width=2, sampled=1)
    first = Round(plan, prompts, Rollout(trunks, branches, {}), batch, np.ones(2, bool))
    for step in range(6):
        is_due = (step + 1) % due == 0
        assert int(adapt_schedule(run, state, first, step).updates) == is_due
