"""Tests that an update is undone once if the traces sampled after it violate a bound."""

import dataclasses
import json
import lzma
from pathlib import Path
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.config import TrainConfig
from bacr_jax.config.checks import problems
from bacr_jax.parallel.preemption import Preempted
from bacr_jax.questions import ledger
from bacr_jax.rollout.rollouts import sampled_counters
from bacr_jax.runs.checkpoint import Checkpoints
from bacr_jax.training import algorithm
from bacr_jax.training.algorithm import iterate, sample_step
from bacr_jax.training.dynamic_sampling import Round
from bacr_jax.training.undo import (
    MOST_IN_A_ROW,
    HostArray,
    Share,
    UpdateGuard,
    make_guard,
    restore_with_snapshot,
    shares_of,
    standard_error,
)
from bacr_jax.types import CLOSED_BY_BUDGET
from devices_world import run_on_devices
from methods_world import Odd, load, run_of

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def shares(closed, filled=0.5, *, traces=64, largest=48):
    """Watched shares of a step. A quarter of its traces has the largest budget."""
    return {
        "undo_closed_answers": Share(closed, traces),
        "undo_filled_budgets": Share(filled, traces // 4, largest),
    }


def guard_after(before, **more):
    """A guard whose snapshot, of a state with three updates, has a share of closed answers."""
    guard = UpdateGuard({"undo_closed_answers": 0.9})
    guard.keep(small_state(updates=3), shares(before, **more))
    return guard


def small_state(updates):
    from learner_world import state_of

    return dataclasses.replace(state_of(), updates=jnp.int32(updates))


def test_the_noise_of_two_shares_follows_from_their_numbers_of_traces():
    # The mean of both is 0.8, so the variance of a trace is 0.16.
    assert standard_error(Share(0.9, 50), Share(0.7, 50)) == pytest.approx((0.16 / 25) ** 0.5)
    assert standard_error(Share(0.5, 10), Share(0.9, 30)) == pytest.approx((0.16 / 7.5) ** 0.5)
    assert standard_error(Share(1.0, 64), Share(1.0, 64)) == 0.0


@pytest.mark.parametrize(
    ("before", "now", "traces", "breaks"),
    [
        (0.98, 0.80, 64, True),
        (0.98, 0.90, 64, False),  # equal to the bound
        (0.85, 0.70, 64, True),
        (0.80, 0.85, 64, False),  # below the bound, but better than before the update
        (0.85, 0.80, 64, False),  # worse than before the update, but within the noise of 0.067
        (0.85, 0.80, 1024, True),  # the noise of 1,024 traces is 0.017
        (0.98, 0.80, 8, False),  # the noise of eight traces is 0.16
    ],
)
def test_a_share_breaks_its_bound_only_where_the_update_made_it_worse(before, now, traces, breaks):
    breach = guard_after(before, traces=traces).breach(shares(now, traces=traces))
    assert (breach is not None) == breaks
    if breaks:
        assert breach == (
            f"rollout/closed_answers is {now:.3f} ({before:.3f} before the update), "
            "beyond the bound train.undo_closed_answers=0.9"
        )


def test_a_larger_share_of_filled_budgets_breaks_its_bound():
    guard = UpdateGuard({"undo_filled_budgets": 0.8})
    guard.keep(small_state(updates=1), shares(1.0, filled=0.5))
    assert guard.breach(shares(0.1, filled=0.8)) is None
    assert guard.breach(shares(1.0, filled=0.9)) == (
        "the share of traces that fill the largest budget is 0.900 (0.500 before the update), "
        "beyond the bound train.undo_filled_budgets=0.8"
    )
    # Without a trace of 48 tokens, the shares are not comparable.
    assert guard.breach(shares(1.0, filled=0.9, largest=28)) is None


def replay(bound, closed, restored=1.0):
    """Returns the steps at which a guard undoes the update before, and the guard.

    Args:
      bound: value of train.undo_closed_answers.
      closed: share of closed answers of each step.
      restored: share of closed answers when a step is sampled again with the restored policy.
    """
    guard = UpdateGuard({"undo_closed_answers": bound})
    undone = []
    first = small_state(updates=0)
    for step, share in enumerate(closed, 1):
        state = dataclasses.replace(first, updates=jnp.int32(step))
        if guard.breach(shares(share)) is not None and guard.can_undo(state):
            guard.undo()
            guard.count_undone()
            undone.append(step)
            guard.keep(state, shares(restored))
        else:
            guard.accept()
            guard.keep(state, shares(share))
    return undone, guard


def recorded_shares(folder):
    """Shares of closed answers of each step, by the id of a committed run."""
    packed = lzma.decompress((RESULTS / folder / "cells.jsonl.xz").read_bytes())
    runs = [json.loads(line) for line in packed.splitlines()]
    return {run["id"]: [step["rollout/closed_answers"] for step in run["metrics"]] for run in runs}


def test_the_updates_that_ruined_a_recorded_run_are_undone_three_times_at_most():
    (closed,) = recorded_shares("smollm2-recipe-cpu").values()
    # The share fell from 1 to 0.70 at step 11, and then varied between 0.61 and 0.84.
    assert sum(now < min(before, 0.85) for before, now in zip(closed, closed[1:])) == 10
    undone, guard = replay(0.85, closed)
    assert undone == [11, 12, 13]
    assert guard.has_stopped
    # The later shares of the ruined policy contain no update that made them worse.
    assert replay(0.85, closed[10:])[0] == []


@pytest.mark.parametrize("machine", ["epyc", "xeon"])
def test_no_recorded_run_with_bounded_updates_would_have_been_changed(machine):
    runs = recorded_shares(f"stability-twenty-{machine}-runs")
    bounded = [closed for run, closed in runs.items() if ".tight-" in run]
    assert len(bounded) == {"epyc": 20, "xeon": 5}[machine]
    assert all(replay(0.85, closed)[0] == [] for closed in bounded)


def test_a_policy_near_the_bound_is_rarely_undone_because_of_noise():
    closed = np.random.default_rng(0).binomial(64, 0.85, size=300) / 64
    undone, guard = replay(0.85, closed.tolist(), restored=0.85)
    worse = sum(now < min(before, 0.85) for before, now in zip(closed, closed[1:]))
    assert worse > 0.3 * 300
    assert 0 < len(undone) < 0.05 * 300
    assert not guard.has_stopped


def test_a_guard_stops_after_three_undone_updates_without_a_sound_one_between():
    twice = [0.7, 0.6, 0.95]
    thrice = [0.7, 0.6, 0.5, 0.95]
    undone, guard = replay(0.9, [0.95, *twice, *twice])
    assert undone == [2, 3, 5, 6]
    assert not guard.has_stopped
    undone, guard = replay(0.9, [0.95, *twice, *thrice, 0.1, 0.95, 0.1])
    assert undone == [2, 3, 5, 6, 7]
    assert guard.has_stopped


def test_an_update_that_did_not_move_the_policy_is_not_undone():
    guard = guard_after(1.0)
    assert not guard.can_undo(small_state(updates=3))
    assert guard.can_undo(small_state(updates=4))
    assert not UpdateGuard({"undo_closed_answers": 0.9}).can_undo(small_state(updates=4))


def test_the_state_of_before_comes_back_after_its_arrays_were_donated():
    guard = UpdateGuard({"undo_closed_answers": 0.9})
    state = small_state(updates=3)
    want = jax.tree.map(np.array, state)
    guard.keep(state, shares(1.0))
    jax.tree.map(lambda leaf: leaf.delete(), state)
    for _ in range(2):  # The returned arrays may be donated, too.
        restored = guard.undo()
        jax.tree.map(np.testing.assert_array_equal, restored, want)
        jax.tree.map(lambda leaf: leaf.delete(), restored)


def test_an_array_that_was_on_no_particular_device_comes_back_as_such():
    array = jnp.arange(3.0)
    assert not array.committed
    assert not HostArray.of(array).on_devices().committed
    there = jax.device_put(array, jax.devices()[0])
    assert HostArray.of(there).on_devices().committed


def test_no_bound_is_no_guard():
    assert make_guard(TrainConfig()) is None
    assert make_guard(TrainConfig(undo_closed_answers=0.9)) is not None


UNEQUAL_BUDGETS = (
    "many traces of each step must have the same largest budget, which budget.prior={} does not "
    "ensure; set it to null, or set budget.prior=fixed or budget.prior=choices"
)


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        (("budget.prior=fixed",), None),
        (("budget.prior=choices",), None),
        (("budget.prior=fixed", "budget.stages=[0.5, 1.0]"), None),
        (("budget.prior=uniform",), UNEQUAL_BUDGETS.format("uniform")),
        (("budget.prior=curriculum",), UNEQUAL_BUDGETS.format("curriculum")),
        # This method gives all traces the budget `budget.max`, and the prior has no effect.
        (("method=grpo", "budget.prior=curriculum"), UNEQUAL_BUDGETS.format("curriculum")),
        (("method=grpo", "budget.prior=fixed"), None),
        (
            ("budget.prior=fixed", "budget.stages=[1.0, 0.75, 0.5]"),
            "budget.stages=[1, 0.75, 0.5] lowers the largest budget",
        ),
    ],
)
def test_filled_budgets_are_watched_only_if_the_largest_budget_is_always_the_same(
    tmp_path, overrides, refused
):
    config = load(tmp_path, None, *overrides)
    train = dataclasses.replace(config.train, undo_filled_budgets=0.9)
    lines = [line for line in problems(dataclasses.replace(config, train=train)) if "undo" in line]
    if refused is None:
        assert lines == []
    else:
        (line,) = lines
        assert line.startswith(f"train.undo_filled_budgets=0.9: {refused}")


def test_filled_budgets_are_counted_at_the_largest_budget_only():
    first = Mock(Round, plan=Mock(), rollout=Mock())
    first.plan.budgets = np.array([[12, 48], [48, 12]])
    by_itself, by_budget = CLOSED_BY_BUDGET + 1, CLOSED_BY_BUDGET
    first.rollout.trunks.close = np.array([by_budget, by_budget, by_itself, by_budget])
    first.rollout.branches.finished = np.array([[True], [True], [False], [True]])
    assert shares_of(first) == {
        "undo_closed_answers": Share(0.75, 4),
        "undo_filled_budgets": Share(0.5, 2, 48),
    }


def test_batches_that_are_sampled_ahead_are_refused_with_a_bound(tmp_path):
    config = load(tmp_path, None, "train.undo_closed_answers=0.9")
    rollout = dataclasses.replace(config.rollout, async_steps=1)
    (line,) = [p for p in problems(dataclasses.replace(config, rollout=rollout)) if "undo" in p]
    assert line.startswith("train.undo_closed_answers=0.9: with rollout.async_steps=1")


@pytest.fixture(scope="module")
def tokenizer():
    own = ledger.ledger_tokenizer()
    return own, len(own)


def steps_of(config, tokenizer, guard, count, spoil=None):
    """Trains some steps; `spoil` makes the state of an update another one, by its step."""
    run, state = run_of(config, tokenizer, Odd())
    done = []
    for step in range(count):
        state, iteration = iterate(run, state, step, guard=guard)
        done.append(iteration)
        if spoil is not None and step == 1:
            state = dataclasses.replace(state, train=spoil(state.train))
    return state, done


def numbers(iteration):
    """Metrics that are equal in equal runs."""
    return {
        name: value
        for name, value in iteration.metrics.items()
        if not name.startswith(("time/", "process/"))
    }


class Scripted(UpdateGuard):
    """A guard whose breaches are given: one entry for each look, in order."""

    def __init__(self, *breaches):
        super().__init__({"undo_closed_answers": 0.9})
        self._breaches = iter(breaches)

    def breach(self, shares):
        return next(self._breaches)


class RecordedClock(algorithm.Clock):
    """Clock that adds the tokens of its throughput to the metrics, as `time/tokens`."""

    def timed(self, metrics, tokens):
        return super().timed(metrics, tokens) | {"time/tokens": tokens}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tokenizer):
    """The same three steps without a guard, with one that sees nothing, and with an undo."""
    config = load(tmp_path_factory.mktemp("runs"), "bacr-weighted", "train.minibatches=1")
    spoil = lambda train: dataclasses.replace(
        train,
        policy=jax.tree.map(lambda x: x * 0 + 7, train.policy),
        head_opt=jax.tree.map(lambda x: x + 1, train.head_opt),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(algorithm, "Clock", RecordedClock)
        undo = (None, None, "closed is 0")
        return {
            "off": steps_of(config, tokenizer, None, 3),
            "quiet": steps_of(config, tokenizer, Scripted(None, None, None), 3),
            "spoilt": steps_of(config, tokenizer, Scripted(*undo, None), 3, spoil),
            "undone": steps_of(config, tokenizer, Scripted(*undo, "still 0"), 3),
        }


def test_a_guard_that_sees_nothing_changes_one_metric(runs):
    for one, other in zip(runs["off"][1], runs["quiet"][1]):
        assert numbers(other) == numbers(one) | {"train/undone": 0.0}
        assert other.notes == ()
    jax.tree.map(np.testing.assert_array_equal, runs["quiet"][0], runs["off"][0])


def test_a_spoilt_update_leaves_no_trace_in_the_state_but_its_tokens(runs):
    """The state of the second update is replaced by sevens: nothing of that may be left."""
    (state, spoilt), (other, undone) = runs["spoilt"], runs["undone"]
    jax.tree.map(np.testing.assert_array_equal, state.train, other.train)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.train))
    assert [one.metrics["train/undone"] for one in spoilt] == [0.0, 0.0, 1.0]
    assert numbers(spoilt[2])["reward/mean"] == numbers(undone[2])["reward/mean"]
    # Only the first and the third update count.
    assert int(state.train.updates) == 2
    # The tokens of the discarded traces are counted.
    fine = runs["off"][0]
    assert state.generated_tokens > fine.generated_tokens


def check_tokens(state, done):
    """Checks that the metrics of steps count the tokens of all traces, also of discarded ones."""
    totals = [one.metrics["rollout/tokens_total"] for one in done]
    tokens = [one.metrics["rollout/tokens"] for one in done]
    assert tokens == np.diff([0, *totals]).tolist()
    assert tokens == [one.metrics["time/tokens"] for one in done]
    assert totals[-1] == state.generated_tokens


def batch_tokens(iteration):
    """Returns the number of tokens of the traces that the policy was updated on."""
    rollout = iteration.chosen.rollout
    return sampled_counters(rollout.trunks, rollout.branches)["tokens"]


def test_the_tokens_of_a_step_include_its_discarded_traces(runs):
    for state, done in runs.values():
        check_tokens(state, done)
        for one in done:
            share = one.metrics["rollout/tokens"] / batch_tokens(one)
            assert share > 1.2 if one.metrics.get("train/undone") else share == 1


@pytest.mark.slow
def test_the_tokens_of_dynamic_sampling_include_discarded_traces(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(algorithm, "Clock", RecordedClock)
    config = load(tmp_path, "dapo", "train.minibatches=1", "rollout.group_size=2")
    guard = Scripted(None, "closed is 0", None, None)
    state, done = steps_of(config, tokenizer, guard, 3)
    assert [one.metrics["train/undone"] for one in done] == [0.0, 1.0, 0.0]
    check_tokens(state, done)
    for one in done:
        kept = one.metrics["rollout/tokens"] - one.metrics["sampling/dropped_tokens"]
        assert kept == batch_tokens(one)


def test_a_run_that_was_resumed_undoes_the_update_before_its_stop(runs, tmp_path, tokenizer):
    """The checkpoint of the second step has the state from before its update."""
    config = load(tmp_path, "bacr-weighted", "train.minibatches=1")
    run, state = run_of(config, tokenizer, Odd())
    guard = Scripted(None, None)
    assert guard.to_save(state) == (state, None)
    for step in range(2):
        state, _ = iterate(run, state, step, guard=guard)
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    guarded, meta = guard.to_save(state)
    checkpoints.save(2, guarded, {"before_update": meta})
    checkpoints.wait()
    _, empty = run_of(config, tokenizer, Odd())
    resumed = Scripted("closed is 0", "still 0")
    snapshot = checkpoints.meta(2)["before_update"]
    restored = restore_with_snapshot(checkpoints, empty, 2, snapshot, resumed)
    checkpoints.close()
    state, iteration = iterate(run, restored, 2, guard=resumed)
    expected_state, expected = runs["undone"]
    jax.tree.map(np.testing.assert_array_equal, state, expected_state)
    assert iteration.notes == expected[2].notes
    assert numbers(iteration) == numbers(expected[2])


def test_a_snapshot_is_stored_and_restored_only_if_there_is_one(tmp_path, tokenizer):
    config = load(tmp_path, "bacr-weighted", "train.minibatches=1")
    _, state = run_of(config, tokenizer, Odd())
    guard = UpdateGuard({"undo_closed_answers": 0.9})
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    for step in (1, 2):
        saved, meta = guard.to_save(state)
        checkpoints.save(step, saved, {})
        checkpoints.wait()
        record = json.loads((checkpoints.folder / str(step) / "meta/metadata").read_text())
        parts = {name.partition("/")[0] for name in record["types"]}
        assert ("before_update" in parts) == (step == 2) and "prefetched" not in parts
        # The bounds may have been removed from the config before the run was resumed.
        for resumed in (None, UpdateGuard({"undo_closed_answers": 0.9})):
            restored = restore_with_snapshot(checkpoints, state, step, meta, resumed)
            jax.tree.map(np.testing.assert_array_equal, restored, state)
            if resumed is not None:
                # Without a snapshot, nothing breaks a bound.
                assert (resumed.breach(shares(0.5)) is None) == (step == 1)
        guard.keep(state.train, shares(1.0))
    checkpoints.close()


def test_an_undone_first_update_keeps_the_initial_bias_of_the_value_head(tmp_path, tokenizer):
    """The bias is the mean reward of the first batch. Without it, all values would be 0."""
    config = load(tmp_path, "bacr-full", "train.minibatches=1", "value.warmup_iterations=0")
    assert config.value.bias_start
    guard = Scripted(None, "closed is 0", None)
    _, (_, second) = steps_of(config, tokenizer, guard, 2)
    assert second.metrics["train/undone"] == 1.0
    assert np.asarray(second.values).mean() > 0.2


def test_the_report_names_what_was_seen_and_warns_where_the_bound_is_broken_again(runs):
    (only,) = runs["spoilt"][1][2].notes
    assert only == "undid the update of step 2, because closed is 0; this step is sampled again"
    first, second = runs["undone"][1][2].notes
    assert first == only
    assert second.startswith(
        "the traces sampled without the update of step 2 exceed a bound too (still 0); training"
    )


@pytest.fixture(scope="module")
def ruined(tmp_path_factory, tokenizer):
    """Four steps after which every set of traces violates a bound, of a guard that then stops."""
    config = load(tmp_path_factory.mktemp("ruined"), "bacr-weighted", "train.minibatches=1")
    guard = Scripted(None, *["closed is 0", None] * MOST_IN_A_ROW, "closed is 0")
    state, done = steps_of(config, tokenizer, guard, MOST_IN_A_ROW + 2)
    return guard, state, done


def test_a_run_names_the_key_to_change_once_when_its_guard_stops(ruined):
    _, _, done = ruined
    assert [one.metrics["train/undone"] for one in done] == [0.0, 1.0, 1.0, 1.0, 0.0]
    lines = [line for one in done for line in one.notes if "no further" in line]
    assert lines == [
        "the updates of 3 consecutive steps were undone, so no further update of this run is "
        "undone; set a lower optimizer.learning_rate"
    ]
    assert lines[0] == done[3].notes[-1]


@pytest.mark.parametrize("before_stop", range(MOST_IN_A_ROW + 1))
def test_a_resumed_guard_stops_after_as_many_updates_as_without_the_stop(ruined, before_stop):
    _, state, _ = ruined
    guard = guard_after(1.0)
    for _ in range(before_stop):
        guard.count_undone()
    _, meta = guard.to_save(state)
    resumed = UpdateGuard({"undo_closed_answers": 0.9})
    resumed.load(state.train, state.train, json.loads(json.dumps(meta)))
    assert resumed.breach(shares(0.5)) == guard.breach(shares(0.5)) is not None
    for _ in range(MOST_IN_A_ROW - before_stop):
        assert not resumed.has_stopped
        resumed.count_undone()
    assert resumed.has_stopped


def test_an_update_counts_as_undone_only_after_its_step_was_sampled_again(
    runs, tmp_path, tokenizer, monkeypatch
):
    """A step that is interrupted while it is sampled again is saved with the update."""
    config = load(tmp_path, "bacr-weighted", "train.minibatches=1")
    run, state = run_of(config, tokenizer, Odd())
    guard = Scripted(None, None, "closed is 0")
    for step in range(2):
        state, _ = iterate(run, state, step, guard=guard)

    def interrupted(*args, again=False):
        if again:
            raise Preempted("stopped by SIGTERM")
        return sample_step(*args)

    for _ in range(MOST_IN_A_ROW):
        with monkeypatch.context() as patch, pytest.raises(Preempted):
            patch.setattr(algorithm, "sample_step", interrupted)
            iterate(run, state, 2, guard=guard)
        saved, meta = guard.to_save(state)
        assert meta["undone_in_a_row"] == 0
        guard = Scripted("closed is 0", "still 0")
        guard.load(saved.before_update, state.train, json.loads(json.dumps(meta)))
    state, iteration = iterate(run, state, 2, guard=guard)
    expected_state, expected = runs["undone"]
    jax.tree.map(np.testing.assert_array_equal, state, expected_state)
    assert iteration.notes == expected[2].notes
    assert guard.to_save(state)[1]["undone_in_a_row"] == 1


def test_the_step_is_sampled_again_with_another_key(runs):
    questions = lambda run: np.asarray(run[1][2].chosen.plan.questions)
    assert (questions(runs["undone"]) != questions(runs["quiet"])).any()
    for step in range(2):
        assert numbers(runs["undone"][1][step]) == numbers(runs["quiet"][1][step])


SHARDED = """
import jax, numpy as np
from bacr_jax import parallel
from bacr_jax.training.undo import HostArray

mesh = parallel.make_mesh(parallel.MeshShape(2, 4, 1, 1), jax.devices())
tree = {"layers": {"q_kernel": np.arange(512, dtype=np.float32).reshape(2, 16, 16)}}
placed = parallel.place(tree, parallel.shardings(tree, mesh))["layers"]["q_kernel"]
copy = HostArray.of(placed)
# Two data-parallel copies of four shards: the host keeps four.
assert len(copy.shards) == 4 and sum(x.nbytes for x in copy.shards.values()) == placed.nbytes
again = copy.on_devices()
assert again.sharding == placed.sharding
np.testing.assert_array_equal(again, placed)
saved = copy.to_save()
assert isinstance(saved, np.ndarray)
restored = HostArray.of_restored(saved, placed).on_devices()
assert restored.sharding == placed.sharding
np.testing.assert_array_equal(restored, placed)
print("fine")
"""


@pytest.mark.slow
def test_sharded_arrays_come_back_on_their_devices():
    """Slow: a process with eight devices."""
    assert run_on_devices(SHARDED) == "fine"
