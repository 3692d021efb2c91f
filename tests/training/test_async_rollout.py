"""Tests rollout.async_steps=1, with which the next batch is sampled while the policy is updated."""

import dataclasses
import threading
import time

import jax
import numpy as np
import pytest

from bacr_jax.questions import ledger
from bacr_jax.rollout import generate
from bacr_jax.rollout.fleet import ServersLost
from bacr_jax.runs.checkpoint import Checkpoints
from bacr_jax.training import algorithm
from bacr_jax.training.algorithm import iterate
from bacr_jax.training.run import init_state
from methods_world import Odd, load, run_of

pytestmark = pytest.mark.slow

STEPS = 4


class Beside:
    """The decoder of this package on a copy of the policy, as a server has one.

    Attributes:
      asked: (version, thread) of every batch.
      lost: batches, by their number, that are lost with their servers.
    """

    def __init__(self, policy, seconds=0.0, lost=()):
        self.policy, self.seconds, self.lost = policy, seconds, lost
        self.version, self.asked, self.polls = None, [], []

    def load(self, params, version, poll=None):
        self.polls.append(poll)
        self.params = jax.tree.map(np.array, params)
        self.version = version

    def generate(self, prompts, rows, key, sampler, callbacks):
        self.polls.append(callbacks.poll)
        self.asked.append((self.version, threading.current_thread() is threading.main_thread()))
        time.sleep(self.seconds)
        if len(self.asked) - 1 in self.lost:
            raise ServersLost("none is left")
        sampler = dataclasses.replace(sampler, phi_of=self.policy.phi_of(self.params))
        params = self.policy.decode_params(self.params)
        return generate(params, prompts, rows, key, sampler, callbacks)


def make(folder, *keys):
    own = ledger.ledger_tokenizer()
    config = load(
        folder, "bacr-robust", "rollout.engine=vllm",
        "rollout.urls=[http://one:1]", "loss.importance_cap=2",
        "rollout.questions=2", "rollout.group_size=2", "data.order=shuffled", *keys,
    )  # fmt: skip
    run, state = run_of(config, (own, len(own)), Odd())
    return run, state.train.policy, state.train.head


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make(tmp_path_factory.mktemp("ahead"), "rollout.async_steps=1")


def start(made, **how):
    run, policy, head = made
    copies = jax.tree.map(jax.numpy.array, (policy, head))
    return dataclasses.replace(run, sample=Beside(run.policy, **how)), init_state(run, *copies)


def steps(run, state, first, last):
    found = []
    for step in range(first, last):
        state, done = iterate(run, state, step)
        found.append(done.metrics)
    return state, found


def of_the_run(metrics):
    return [{k: v for k, v in m.items() if not k.startswith(("time", "process"))} for m in metrics]


@pytest.fixture(scope="module")
def straight(made):
    run, state = start(made, seconds=0.3)
    state, metrics = steps(run, state, 0, STEPS)
    return run, state, metrics


def test_every_batch_is_one_update_old_but_the_first(straight):
    run, state, metrics = straight
    # Each step has a separate batch, and no batch is sampled after the last step.
    assert run.sample.asked == [(0, True), (0, False), (1, False), (2, False)]
    assert [m["rollout/staleness"] for m in metrics] == [0, 1, 1, 1]
    assert abs(metrics[0]["mismatch/k1"]) < 1e-5 < metrics[-1]["mismatch/absolute"]
    assert not state.prefetched.is_sampled


def test_sampling_and_learning_overlap_and_the_clock_says_so(straight):
    _, _, metrics = straight
    for one in metrics[:-1]:
        assert 0 < one["time/overlap"] <= one["time/plan"] + one["time/learn"] + one["time/adapt"]
    assert "time/overlap" not in metrics[-1]


def resumed_at_2(made, folder):
    """Returns the metrics of two steps, and the run and the state restored after them."""
    run, state = start(made)
    state, before = steps(run, state, 0, 2)
    checkpoints = Checkpoints(folder / "checkpoints", keep=1)
    checkpoints.save(2, state, {})
    checkpoints.wait()
    again, like = start(made)
    _, state, _ = checkpoints.restore(like, 2)
    checkpoints.close()
    return before, again, state


def test_a_resumed_run_learns_from_the_batch_that_was_in_hand(made, straight, tmp_path):
    before, again, state = resumed_at_2(made, tmp_path)
    assert state.prefetched.is_sampled
    state, after = steps(again, state, 2, STEPS)
    assert again.sample.asked == [(2, False)]
    assert of_the_run(before + after) == of_the_run(straight[2])
    jax.tree.map(np.testing.assert_array_equal, state.train.policy, straight[1].train.policy)


def test_a_batch_that_is_lost_with_its_servers_is_asked_for_again(made, straight):
    run, state = start(made, lost=(1, 2))
    state, metrics = steps(run, state, 0, 1)
    assert not state.prefetched.is_sampled
    # Only the two questions of the first batch count as drawn, so that the questions of the lost
    # batch are drawn again.
    assert state.stream.sum() == 2
    kept = jax.tree.map(np.array, state.train.policy)
    with pytest.raises(ServersLost):
        iterate(run, state, 1)
    # The state is unchanged, so that it can be saved.
    jax.tree.map(np.testing.assert_array_equal, kept, state.train.policy)
    state, metrics = steps(run, state, 1, 3)
    assert [m["rollout/staleness"] for m in metrics] == [0, 1]
    assert run.sample.asked[3:] == [(1, True), (1, False), (2, False)]


def test_a_signal_is_heard_while_either_policy_is_handed_over(made):
    """And while a batch is sampled in turn; the batch ahead is sampled to its end."""
    run, state = start(made)
    poll = lambda: None
    iterate(run, state, 0, poll=poll)
    in_turn, ahead = [poll, poll], [poll, None]
    assert run.sample.polls == [*in_turn, *ahead]


@pytest.mark.parametrize("ahead", [0, 1])
def test_stages_follow_the_tokens_before_each_batch_also_ahead_and_resumed(tmp_path, ahead):
    """A run that was resumed after two steps has the budgets of a run without interruption."""
    made = make(
        tmp_path, f"rollout.async_steps={ahead}", "budget.prior=fixed", "train.steps=2000",
        "budget.stages=[1,.8,.6,.4]", "train.max_generated_tokens=300",
    )  # fmt: skip
    run, state = start(made)
    state, straight = steps(run, state, 0, 6)
    before, run, state = resumed_at_2(made, tmp_path)
    _, after = steps(run, state, 2, 6)
    assert of_the_run(before + after) == of_the_run(straight)
    tokens = [0, *(int(metrics["rollout/tokens_total"]) for metrics in straight[:-1])]
    budgets = [metrics["budget/mean"] for metrics in straight]
    want = [algorithm.largest_budget(run, step, count) for step, count in enumerate(tokens)]
    assert budgets == [float(limit) for limit in want]
    assert len(set(budgets)) > 2 and max(np.diff(budgets)) <= 0
