"""Phases on the device: caches as long as needed, answers beside each other."""

import dataclasses

import jax
import numpy as np
import pytest

from bacr_jax.rollout import RolloutRequest, SamplingSetup, sampling_params
from bacr_jax.rollout import engine as engines
from bacr_jax.rollout.engine import SlotDecoder, distinct_prompts, prompt_widths
from bacr_jax.types import CLOSED_BY_BUDGET
from rollout_world import make_prompts, make_rules, no_cuts, quarters


def make_engine(world, spec, lengths=(3, 5, 2)):
    return SlotDecoder(
        world.decode,
        make_prompts(lengths, 5),
        jax.random.key(3),
        SamplingSetup(spec, make_rules(), sampling_params(1.0), world.phi_of),
    )


def test_prompts_are_prefilled_at_multiples_of_a_width_and_at_their_own():
    assert prompt_widths(5) == [5]
    assert prompt_widths(128) == [128]
    assert prompt_widths(300) == [128, 256, 300]


def test_caches_are_as_long_as_the_rows_need_and_never_longer_than_a_row_can_be(world):
    engine = make_engine(world, world.tight(windows=4))
    assert engine.lengths == [5, 9, 13, 17] and engine.length == 5
    for positions, length in ((6, 9), (17, 17), (40, 17), (2, 5)):
        engine.fit_caches(positions)
        assert engine.length == length


def test_a_chunk_feeds_every_slot_and_ended_rows_wait(world):
    engine = make_engine(world, world.spec())
    budgets = np.array([12, 0, 2], np.int32)
    rows = RolloutRequest(budgets, no_cuts(3)).complete(engine.spec)
    engine.prefill(rows, np.array([1, 2, 0]), np.array([3, 1, 0]))
    ended, broken, sampled = engine.status()
    np.testing.assert_array_equal(ended, [False, False, True, True])
    engine.decode()
    ended, broken, sampled = engine.status()
    assert not broken.any()
    assert sampled[3] == sampled[2] == 0 and 1 <= sampled[1] <= 2 and 1 <= sampled[0] <= 5
    assert ended[1:].all()
    np.testing.assert_array_equal(engine.trunks(np.array([1, 0])).prompt_lengths, [2, 3])


@pytest.mark.parametrize("slots", [[0, 2, 3], [2, 0]])
def test_several_answers_of_a_cut_stand_side_by_side(world, slots):
    """Three of four slots are read in place, two are copied out."""
    spec = world.spec(answers=3)
    engine = make_engine(world, spec, lengths=(3, 5, 2, 4))
    every, budgets = np.arange(4), np.array([5, 4, 3, 2], np.int32)
    engine.prefill(RolloutRequest(budgets, no_cuts(4)).complete(spec), every, every)
    engine.decode()
    opened = engine.open_branches(np.array(slots), quarters(budgets)[slots])
    total, steps = engine.answer_steps
    for start in range(0, total, steps):
        opened = engine.decode_branches(opened, start)
    context = engine.answers(opened).context.reshape(len(slots), 4, 3)
    trunks = engine.trunks(np.array(slots))
    assert (context == context[:, :, :1]).all()
    cuts = np.minimum(quarters(budgets)[slots], trunks.thinking[:, None])
    forced = trunks.close == CLOSED_BY_BUDGET
    assert forced.any()
    np.testing.assert_array_equal(
        context[forced, :, 0], (trunks.prompt_lengths[:, None] + cuts)[forced]
    )


def test_different_prompts_and_where_each_row_finds_its_own():
    prompts = make_prompts([2, 3, 2, 3], 5)
    prompts = dataclasses.replace(prompts, tokens=prompts.tokens[[1, 0, 1, 0]])
    tokens = np.where(np.arange(5) < prompts.lengths[:, None], prompts.tokens, 0)
    prompts = dataclasses.replace(prompts, tokens=tokens)
    first, places = distinct_prompts(prompts, 3)
    assert len(first) == 3 and set(first[:2]) == {0, 1}
    np.testing.assert_array_equal(first[places], [0, 1, 0, 1])
    assert distinct_prompts(prompts, 1)[1] is None


@pytest.mark.parametrize("positions", [pytest.param(None, marks=pytest.mark.slow), "response"])
def test_a_group_prefills_its_prompt_once_and_says_the_same(world, positions, monkeypatch):
    conditioning = positions and dataclasses.replace(world.conditioning, positions=positions)
    policy = {
        "spec": world.spec(6, conditioning=conditioning, group_size=3),
        "params": world.decode if conditioning else dataclasses.replace(world.decode, gates=None),
        "phi_of": world.phi_of if conditioning else None,
    }
    prompts = jax.tree.map(lambda x: np.repeat(x, 3, axis=0), make_prompts([4, 2], 5))
    budgets, seen = np.array([12, 5, 0, 7, 12, 3]), []
    whole = engines._prefill_prompts

    def counted(params, prompts, **how):
        seen.append(len(prompts.lengths))
        return whole(params, prompts, **how)

    monkeypatch.setattr(engines, "_prefill_prompts", counted)
    shared = world.roll(prompts, budgets, **policy)
    policy["spec"] = dataclasses.replace(policy["spec"], group_size=1)
    apart = world.roll(prompts, budgets, **policy)
    assert seen == [2, 6]
    np.testing.assert_array_equal(shared.trunks.tokens, apart.trunks.tokens)
    np.testing.assert_array_equal(shared.branches.tokens, apart.branches.tokens)
    np.testing.assert_allclose(shared.trunks.logprobs, apart.trunks.logprobs, atol=1e-5)
    assert not world.spec(6, group_size=3).shares_prompts
