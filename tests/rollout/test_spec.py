"""What is static about a rollout, and which programs rollouts share."""

import jax
import pytest

from bacr_jax.errors import UserError


def test_rollouts_of_other_sizes_share_the_programs_of_a_step(world):
    one, other = world.spec(), world.spec(64, answers=3, chunk=7, max_thinking=99)
    assert one.decode == other.decode and hash(one.decode) == hash(other.decode)
    assert one.decode != world.spec(conditioning=None).decode
    assert type(one.decode) is not type(one)


def test_the_longest_caches_hold_every_row_and_the_others_are_its_parts(world):
    assert world.spec(windows=4, max_thinking=11).cache_lengths(5) == [4, 8, 12, 16]
    assert world.spec(windows=3, max_thinking=11).cache_lengths(5) == [6, 11, 16]
    assert world.spec(windows=1).cache_lengths(5) == [17]


def test_slots_that_do_not_divide_over_devices_are_refused(world):
    mesh = jax.sharding.AbstractMesh((2, 4, 1), ("data", "fsdp", "tensor"))
    assert world.spec(16, mesh=mesh).batch_sizes() == [8, 16]
    with pytest.raises(UserError, match="rollout.slots=12: .* 8 devices; write rollout.slots=16"):
        world.spec(12, mesh=mesh).batch_sizes()
