"""Suffixes at cuts, cuts that share a text, and many cuts answered a few at a time."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.rollout.branches import branches_of, open_branches, split
from bacr_jax.rollout.sampling import RowIds
from bacr_jax.types import CLOSED_BY_BUDGET, CLOSED_BY_EOS, CLOSED_BY_TAG, Trunks
from rollout_world import ANSWER, CLOSE, make_prompts, make_rules

# Three rows with prompts of 2, 3 and 4 tokens: forced after 6; a tag of two tokens after 4; the
# turn ended after 3.
TRUNKS = Trunks(
    tokens=jnp.zeros((3, 16), int),
    prompt_lengths=jnp.array([2, 3, 4]),
    sampled=jnp.array([6, 6, 4]),
    thinking=jnp.array([6, 4, 3]),
    close=jnp.array([CLOSED_BY_BUDGET, CLOSED_BY_TAG, CLOSED_BY_EOS]),
    budgets=jnp.array([6, 12, 12]),
    logprobs=jnp.zeros((3, 12)),
)
CUTS = jnp.array([[3, 6], [3, 6], [3, 6]])


def opened(world, cuts=CUTS, **changes):
    spec = world.spec().decode
    ids = RowIds(jnp.arange(3), jnp.zeros(3, jnp.int32))
    return open_branches(TRUNKS, cuts, ids, make_rules(), spec=spec, answer_tokens=3, **changes)


def test_a_branch_keeps_thinking_up_to_its_cut_and_the_models_own_tag(world):
    state = opened(world)
    np.testing.assert_array_equal(state.context, [[2 + 3, 2 + 6], [3 + 3, 3 + 6], [4 + 3, 4 + 3]])


def test_only_thinking_that_closed_itself_gets_the_natural_suffix(world):
    state = opened(world)
    np.testing.assert_array_equal(state.forced, [[2, 2], [2, 1], [2, 2]])
    np.testing.assert_array_equal(state.tokens[1, 0], [CLOSE, ANSWER, 0, 0, 0])
    np.testing.assert_array_equal(state.tokens[1, 1], [ANSWER, 0, 0, 0, 0])


def test_cuts_at_one_place_share_the_first_ones_text_unless_each_has_its_own(world):
    state = opened(world)
    # the third row ends before both cuts
    np.testing.assert_array_equal(state.source, [[0, 1], [0, 1], [0, 0]])
    np.testing.assert_array_equal(state.ended, [[False, False], [False, False], [False, True]])
    state = opened(world, share=False)
    np.testing.assert_array_equal(state.source, [[0, 1]] * 3)
    assert not state.ended.any()


def test_rows_that_are_not_wanted_start_ended(world):
    state = opened(world, wanted=jnp.array([[True] * 2, [False] * 2, [True] * 2]))
    np.testing.assert_array_equal(state.ended[1], [True, True])


def test_what_is_read_off_a_shared_cut_is_its_sources(world):
    state = opened(world)
    state = state.replace(
        sampled=jnp.array([[1, 2], [3, 1], [2, 0]]),
        tokens=jnp.arange(30).reshape(3, 2, 5),
    )
    branches = branches_of(state)
    np.testing.assert_array_equal(branches.sampled, [[1, 2], [3, 1], [2, 2]])
    np.testing.assert_array_equal(branches.tokens[2, 1], state.tokens[2, 0])


@pytest.mark.slow
def test_answers_do_not_depend_on_how_many_cuts_are_decoded_together(world):
    prompts, budgets = make_prompts([3, 1, 5, 2] * 2, 5), [12, 2, 7, 0] * 2
    cuts = np.tile([0, 2, 3, 5, 6, 9, 12], (8, 1))
    spec = world.spec(8)
    together = world.roll(prompts, budgets, cuts=cuts, spec=spec)
    spec = dataclasses.replace(spec, max_parallel_cuts=3)
    apart = world.roll(prompts, budgets, cuts=cuts, spec=spec)
    np.testing.assert_array_equal(apart.trunks.tokens, together.trunks.tokens)
    for name in ("tokens", "context", "forced", "sampled", "finished", "source"):
        np.testing.assert_array_equal(
            getattr(apart.branches, name), getattr(together.branches, name)
        )
    np.testing.assert_allclose(apart.branches.logprobs, together.branches.logprobs, atol=1e-5)
    assert apart.counters["tokens"] == together.counters["tokens"]


def test_chunks_behind_the_end_of_every_trace_are_left_out():
    cuts = np.array([[2, 4, 6, 8, 10], [2, 4, 6, 8, 10]])
    source = np.array([[0, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    (chunk,) = split(cuts, source, 2)
    assert chunk.first == 0
    np.testing.assert_array_equal(chunk.wanted, [[True, True], [True, False]])
    chunks = split(cuts, np.array([[0, 1, 2, 3, 4]] * 2), 2)
    assert [one.first for one in chunks] == [0, 2, 4]
    # A chunk of fewer repeats its last cut, which nobody wants twice.
    np.testing.assert_array_equal(chunks[-1].cuts, [[10, 10]] * 2)
    np.testing.assert_array_equal(chunks[-1].wanted, [[True, False]] * 2)
