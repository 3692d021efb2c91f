"""Cuts answered a few at a time give what all together give."""

import dataclasses

import numpy as np

from bacr_jax.rollout.cut_chunks import split
from rollout_world import make_prompts


def test_answers_do_not_depend_on_how_many_cuts_are_decoded_together(world):
    prompts, budgets = make_prompts([3, 1, 5, 2] * 2, 5), [12, 2, 7, 0] * 2
    cuts = np.tile([0, 2, 3, 5, 6, 9, 12], (8, 1))
    spec = world.spec(8)
    together = world.roll(prompts, budgets, cuts=cuts, spec=spec)
    spec = dataclasses.replace(spec, cuts_at_once=3)
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
