"""A row's text does not depend on how many devices decode it."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import jax, numpy as np
from bacr_jax import parallel
from rollout_world import World, make_prompts

world = World()
prompts = make_prompts([1, 5, 3, 2, 4, 5, 1, 2, 3, 4, 5], 5)
budgets = np.array([12, 0, 1, 7, 12, 5, 3, 9, 2, 11, 6])
cuts = np.stack([budgets // 2, budgets], axis=1)

def roll(params, mesh):
    spec = world.spec(8, mesh=mesh, windows=2, refill=1.0)
    return world.roll(prompts, budgets, cuts=cuts, params=params, spec=spec)

assert jax.device_count() == 8
one = roll(world.decode, None)
mesh = parallel.make_mesh(parallel.MeshShape(data=2, fsdp=2, tensor=2, decode_tensor=2))
where = parallel.shardings(world.decode, mesh, rules=parallel.DECODE)
many = roll(parallel.place(world.decode, where), mesh)
np.testing.assert_array_equal(one.trunks.tokens, many.trunks.tokens)
np.testing.assert_array_equal(one.branches.tokens, many.branches.tokens)
np.testing.assert_array_equal(one.branches.finished, many.branches.finished)
np.testing.assert_allclose(one.trunks.logprobs, many.trunks.logprobs, atol=1e-5)
print("equal")
"""


@pytest.mark.slow  # half a minute of compiling for eight devices
def test_eight_devices_sample_what_one_samples():
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "equal"
