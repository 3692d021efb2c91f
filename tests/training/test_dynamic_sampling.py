"""Tests the rounds of dynamic sampling, and the selection of questions to learn from."""

import dataclasses

import jax
import numpy as np
import pytest

from bacr_jax.methods import DynamicSampling, GroupBatch
from bacr_jax.rollout import Rollout
from bacr_jax.training.dynamic_sampling import BatchPlan, Round, add_counters, choose, needs_round
from bacr_jax.training.stages import round_keys
from bacr_jax.types import Branches, Prompts, Trunks

Q, G = 3, 2


def asked(useful, start):
    """A round whose questions are numbered from `start`; every array says which it belongs to."""
    question = start + np.arange(Q)
    row = np.repeat(question, G) * 10 + np.tile(np.arange(G), Q)
    one = lambda x: x[:, None]
    plan = BatchPlan(question, question, one(question).repeat(G, 1), np.zeros((Q, G, 1), int))
    prompts = Prompts(one(row), row, row, row)
    trunks = Trunks(one(row), row, row % 7, row, row, row, one(row))
    branches = Branches(
        np.zeros((Q * G, 1, 1), int), one(row), one(row), one(row % 3), one(row),
        np.zeros((Q * G, 1), int), np.zeros((Q * G, 1, 1)),
    )  # fmt: skip
    fields = {field.name: question for field in dataclasses.fields(GroupBatch)}
    group_batch = GroupBatch(**{**fields, "fraction": np.float32(0.25), "extra": {"own": question}})
    rollout = Rollout(trunks, branches, {"tokens": int(start) + 1, "occupancy": 0.5})
    return Round(plan, prompts, rollout, group_batch, np.array(useful, bool))


KEEP = DynamicSampling(keep=lambda group_batch: group_batch, max_rounds=3)


def test_the_first_round_always_and_more_until_enough_or_too_many():
    assert needs_round([], None) and needs_round([], KEEP)
    first = asked([1, 0, 1], 0)
    assert not needs_round([first], None)
    assert needs_round([first], KEEP)
    assert not needs_round([first, asked([0, 1, 0], 3)], KEEP)
    empty = [asked([0, 0, 0], 3 * i) for i in range(3)]
    assert needs_round(empty[:2], KEEP) and not needs_round(empty, KEEP)


def test_useful_questions_fill_the_batch_in_the_order_they_were_asked():
    chosen = choose([asked([0, 1, 0], 0), asked([1, 1, 1], 3)])
    np.testing.assert_array_equal(chosen.plan.questions, [1, 3, 4])
    rows = [10, 11, 30, 31, 40, 41]
    for found in (chosen.prompts.lengths, chosen.rollout.trunks.thinking):
        np.testing.assert_array_equal(found, rows)
    np.testing.assert_array_equal(chosen.rollout.branches.context[:, 0], rows)
    np.testing.assert_array_equal(chosen.group_batch.extra["own"], [1, 3, 4])
    assert chosen.group_batch.fraction == np.float32(0.25)
    assert chosen.useful.all() and chosen.rollout.counters["tokens"] == 1 + 4


def test_too_few_useful_questions_are_filled_up_and_marked():
    chosen = choose([asked([0, 0, 0], 0), asked([0, 1, 0], 3)])
    np.testing.assert_array_equal(chosen.plan.questions, [0, 1, 4])
    np.testing.assert_array_equal(chosen.useful, [False, False, True])


def test_one_round_is_taken_as_it_is():
    only = asked([0, 1, 0], 0)
    assert choose([only]).plan is only.plan


def test_counts_and_seconds_add_up_and_shares_do_not():
    one = {"tokens": 3, "decode_s": 0.5, "occupancy": 0.25, "thinking_max": 9}
    assert add_counters([one, {**one, "tokens": 4}]) == {
        "tokens": 7, "decode_s": 1.0, "occupancy": 0.25, "thinking_max": 9,
    }  # fmt: skip


@pytest.mark.parametrize("rounds", [1, 2])
def test_the_batch_keeps_its_size(rounds):
    chosen = choose([asked([1, 0, 0], 3 * i) for i in range(rounds)])
    assert len(chosen.plan.questions) == Q and len(chosen.prompts.lengths) == Q * G


def test_no_two_rounds_share_a_key():
    key = jax.random.key(0)
    keys = [x for step in range(3) for i in range(3) for x in round_keys(key, step, i)]
    # Include the keys that functions derive from these keys by splitting them.
    keys += [part for x in list(keys) for part in jax.random.split(x, 3)]
    assert len({tuple(np.asarray(jax.random.key_data(x)).tolist()) for x in keys}) == len(keys)
