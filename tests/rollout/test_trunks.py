"""Slots: what enters, what stays, and what is read off them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.rollout import trunks
from bacr_jax.rollout.sampling import RowIds
from bacr_jax.types import CLOSED_BY_BUDGET, CLOSED_BY_EOS, CLOSED_BY_TAG
from rollout_world import make_prompts

PROMPTS = make_prompts([3, 5], 5)


@pytest.fixture(scope="module")
def filled(world):
    """Slots 2 and 0 of three hold two prompts; a third was sent to a slot that is not there."""
    spec = world.spec().decode
    taken = np.array([0, 1, 1])
    prompts = jax.tree.map(lambda x: x[taken], PROMPTS)

    @jax.jit
    def fill(prompts, phi):
        slots = trunks.free_slots(spec=spec, slots=3, prompt_width=5, max_new=4, length=7, phi=phi)
        prefilled = trunks.prefill_prompts(world.decode, prompts, spec=spec, phi=phi)
        budgets, where = jnp.array([4, 0, 4]), jnp.array([2, 0, 3])
        ids = RowIds(jnp.array([70, 71, 72]), jnp.zeros(3, jnp.int32))
        return trunks.insert_rows(slots, prefilled, prompts, budgets, ids, where)

    return fill(prompts, world.phi_of(np.array([4, 0, 4])))


def test_prompts_stand_in_their_slots_and_one_without_a_slot_is_dropped(filled):
    np.testing.assert_array_equal(filled.ids.row, [71, -1, 70])
    np.testing.assert_array_equal(filled.prompt_lengths, [5, 0, 3])
    np.testing.assert_array_equal(filled.tokens[2, :5], PROMPTS.tokens[0])
    np.testing.assert_array_equal(filled.tokens[0, :5], PROMPTS.tokens[1])
    assert (filled.tokens[:, 5:] == 0).all() and (filled.tokens[1] == 0).all()


def test_a_free_slot_and_a_budget_of_nothing_have_ended(filled):
    np.testing.assert_array_equal(filled.ended, [True, True, False])


def test_resized_caches_keep_what_they_hold(filled):
    copy = lambda: jax.tree.map(jnp.copy, filled)
    longer, shorter = (trunks.resize_caches(copy(), length) for length in (9, 5))
    for old, long, short in zip(filled.cache, longer.cache, shorter.cache):
        np.testing.assert_array_equal(long.k[..., :7], old.k)
        assert (long.v[:, :, 7:] == 0).all()
        np.testing.assert_array_equal(short.v, old.v[:, :, :5])


def test_taken_slots_are_copies_in_the_order_asked_for(filled):
    cache, taken, phi = trunks.take_slots(filled, jnp.array([2, 0]))
    np.testing.assert_array_equal(taken.prompt_lengths, [3, 5])
    np.testing.assert_array_equal(cache[1].k, filled.cache[1].k[jnp.array([2, 0])])
    np.testing.assert_array_equal(phi, filled.phi[jnp.array([2, 0])])


def test_thinking_ends_where_the_tag_began_and_at_the_budget_when_forced(filled):
    state = dataclasses.replace(
        filled,
        sampled=jnp.array([4, 4, 4]),
        tag_start=jnp.array([2, 3, 1]),
        close=jnp.array([CLOSED_BY_TAG, CLOSED_BY_EOS, CLOSED_BY_BUDGET]),
    )
    np.testing.assert_array_equal(trunks.trunks_of(state).thinking, [2, 3, 4])
