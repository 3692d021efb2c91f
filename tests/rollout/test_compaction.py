"""Rows that think move together, and nobody notices."""

import jax
import jax.numpy as jnp
import numpy as np

from bacr_jax.rollout import compaction, trunks
from rollout_world import make_prompts


def test_rows_come_back_to_where_they_were(world):
    """Parts of other lengths are joined to the longer one."""
    phi = world.phi_of(jnp.arange(4))
    state = trunks.free_slots(
        spec=world.spec().decode, slots=4, prompt_width=2, max_new=3, length=4, phi=phi
    )
    number = lambda x: jnp.arange(x.size).reshape(x.shape).astype(x.dtype)
    state = jax.tree.map(number, state)
    want = jax.tree.map(np.asarray, state)
    parts = [np.array([1, 3]), np.array([0, 2])]
    one, other = compaction.split(state, parts)
    assert all(layer.v.is_deleted() for layer in state.cache)
    np.testing.assert_array_equal(one.rows, want.rows[[1, 3]])
    np.testing.assert_array_equal(other.phi, want.phi[[0, 2]])
    np.testing.assert_array_equal(other.cache[1].k, want.cache[1].k[[0, 2]])
    longer = trunks.resize_caches(one, 6)
    back = compaction.join([longer, other], parts)
    assert back.cache[0].length == 6
    back = trunks.resize_caches(back, 4)
    jax.tree.map(np.testing.assert_array_equal, back, want)


def test_a_compacted_rollout_says_the_same_in_fewer_steps(world):
    budgets = np.array([12, 0, 1, 7, 12, 5, 3, 9])
    prompts, heard = make_prompts([1, 5, 3, 2, 4, 5, 1, 2], 5), [[] for _ in budgets]
    given = {"chunk": 3, "windows": 2, "refill": 0.25}
    whole = world.roll(prompts, budgets, spec=world.spec(8, **given))
    compact = world.roll(
        prompts,
        budgets,
        spec=world.spec(8, compact=True, **given),
        on_tokens=lambda row, tokens: heard[row].extend(tokens.tolist()),
    )
    for name in ("tokens", "thinking", "close", "sampled"):
        np.testing.assert_array_equal(getattr(compact.trunks, name), getattr(whole.trunks, name))
    for name in ("tokens", "sampled", "context", "finished"):
        np.testing.assert_array_equal(
            getattr(compact.branches, name), getattr(whole.branches, name)
        )
    np.testing.assert_allclose(compact.trunks.logprobs, whole.trunks.logprobs, atol=1e-5)
    assert compact.counters["occupancy"] > 1.2 * whole.counters["occupancy"]
    t = compact.trunks
    for row, start in enumerate(t.prompt_lengths):
        assert heard[row] == t.tokens[row, start : start + t.sampled[row]].tolist()
