"""A row's text does not depend on how many devices decode it."""

import pytest

from devices_world import run_on_devices

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from bacr_jax import parallel
from bacr_jax.model import kv_cache
from rollout_world import World, make_prompts

world = World(num_kv_heads=2)
prompts = make_prompts([1, 5, 3, 2, 4, 5, 1, 2, 3, 4, 5], 5)
budgets = np.array([12, 0, 1, 7, 12, 5, 3, 9, 2, 11, 6])
cuts = np.stack([budgets // 2, budgets], axis=1)

def roll(params, mesh, **how):
    spec = world.spec(8, mesh=mesh, windows=2, refill=1.0)
    return world.roll(prompts, budgets, cuts=cuts, params=params, spec=spec, **how)

assert jax.device_count() == 8
mesh = parallel.make_mesh(parallel.MeshShape(data=2, fsdp=2, tensor=2, decode_tensor=2))
copy = kv_cache.decode_params(world.params, dtype=jnp.float32, conditioned=True, shards=2)
spread = parallel.place(copy, parallel.shardings(copy, mesh, rules=parallel.DECODE))
for how in ({}, {"temperature": 0.0}):
    one, many = roll(world.decode, None, **how), roll(spread, mesh, **how)
    np.testing.assert_array_equal(one.trunks.tokens, many.trunks.tokens)
    np.testing.assert_array_equal(one.branches.tokens, many.branches.tokens)
    np.testing.assert_array_equal(one.branches.finished, many.branches.finished)
    np.testing.assert_allclose(one.trunks.logprobs, many.trunks.logprobs, atol=1e-5)
print("equal")
"""


@pytest.mark.slow  # half a minute of compiling for eight devices
def test_eight_devices_sample_what_one_samples():
    assert run_on_devices(PROGRAM) == "equal"


SAMPLING = """
import jax, jax.numpy as jnp, numpy as np
from bacr_jax import parallel
from bacr_jax.rollout.sampling import sample_tokens, sampling_params

rng = np.random.default_rng(0)
for vocab in (1024, 700):  # parts of whole blocks, and of a block and a bit
    logits = rng.normal(0, 3, (8, vocab)).astype(np.float32)
    logits[3:5] = np.round(logits[3:5])
    logits[5, 650], logits[6, 3] = np.nan, np.inf
    allowed = rng.random(vocab) < 0.8
    keys = jax.random.split(jax.random.key(1), 8)
    for data, tensor in ((2, 4), (1, 2)):
        layout = parallel.MeshShape(data, 1, tensor, tensor)
        mesh = parallel.make_mesh(layout, jax.devices()[: data * tensor])
        where = parallel.logits_sharding(mesh, vocab)
        assert where.spec[1] == "tensor"
        for numbers in ((1.0,), (0.7, 0.9), (0.0,)):
            draw = lambda logits, mesh: sample_tokens(
                keys, logits, sampling=sampling_params(*numbers), allowed_tokens=allowed, mesh=mesh
            )
            one = jax.jit(lambda x: draw(x, None))(logits)
            program = jax.jit(lambda x: draw(x, mesh), in_shardings=where)
            tokens, logprobs = program(logits)
            good = np.isfinite(np.asarray(one[1]))
            sick = [allowed[650], allowed[3]]
            np.testing.assert_array_equal(good, ~np.array([False] * 5 + sick + [False]))
            np.testing.assert_array_equal(tokens[good], one[0][good])
            np.testing.assert_allclose(logprobs, one[1], atol=1e-5)
            text = program.lower(logits).compile().as_text()
            gathered = [line for line in text.splitlines() if " all-gather(" in line]
            assert not any(f",{vocab}]" in line for line in gathered), gathered
print("equal")
"""


@pytest.mark.slow  # twenty programs compiled for eight devices
def test_a_split_vocabulary_is_sampled_like_a_whole_one_and_never_gathered():
    assert run_on_devices(SAMPLING) == "equal"
