"""Weights over NCCL: what a server takes, and what becomes of one that doesn't."""

import asyncio
import base64
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_client import EngineError, Server, http_json
from bacr_jax.errors import UserError
from bacr_jax.rollout import nccl as module
from bacr_jax.rollout.nccl import Libraries, Sender, Tensor, find_libraries
from nccl_world import Failed, FakeNccl, Joining

TOLD = [
    "/pause", "/start_weight_update", "/update_weights", "/finish_weight_update",
    "/reset_prefix_cache", "/update_weight_version", "/resume",
]  # fmt: skip
INIT = "/init_weight_transfer_engine"
DEVICE = jax.local_devices()[0]


def arrays(version):
    small = jnp.arange(6.0).reshape(2, 3) + version
    return {"a.weight": small, "b.bias": (small[0] / 3).astype(jnp.bfloat16), "c": small[:, :1]}


def tensors(version):
    return [
        Tensor(name, array.shape, array.dtype.name, lambda array=array: array)
        for name, array in arrays(version).items()
    ]


@pytest.fixture
def fakes():
    made = []

    def fake(**how):
        made.append(FakeNccl(**how))
        return made[-1]

    yield fake
    for one in made:
        one.end()


def sender_of(fake, deadline=20.0):
    return Sender(Libraries(fake, fake, "/jax/libnccl.so.2"), DEVICE, tensors, deadline)


def sent(sender, world, version=1):
    asyncio.run(sender.load(Server(world.url), tensors(version), str(version)))


def check_received(world, version):
    assert len(world.received) == world.workers
    for found in world.received:
        assert [(name, dtype) for name, dtype, _ in found] == [
            ("a.weight", "float32"), ("b.bias", "bfloat16"), ("c", "float32")
        ]  # fmt: skip
        for (_, _, values), array in zip(found, arrays(version).values()):
            np.testing.assert_array_equal(values, np.asarray(array))


@pytest.mark.parametrize("workers", [1, 3])
def test_every_worker_takes_every_tensor_and_the_group_stays(fakes, workers):
    fake = fakes()
    sender = sender_of(fake)
    with Joining(fake, workers) as world:
        sent(sender, world)
        check_received(world, 1)
        assert world.routes == [TOLD[0], INIT, *TOLD[1:]] and world.version == "1"
        (info,) = world.groups
        assert (info["rank_offset"], info["world_size"]) == (1, 1 + workers)
        assert len(base64.b64decode(info["nccl_unique_id_b64"], validate=True)) == 128
        world.routes.clear()
        sent(sender, world, 2)
        check_received(world, 2)
        assert world.routes == TOLD and world.version == "2" and fake.aborted == []


def test_a_server_that_does_not_join_in_time_is_left_and_a_late_group_is_aborted(
    fakes, monkeypatch
):
    monkeypatch.setattr(module, "_GRACE", 0.2)
    fake = fakes()
    sender = sender_of(fake, deadline=0.3)
    with Joining(fake, idle=(INIT,)) as world:
        says = f"{INIT}: took more than 0.3 s; start it with --weight-transfer-config"
        with pytest.raises(EngineError, match=says):
            sent(sender, world)
        assert fake.aborted == [] and "/resume" not in world.routes
        # Its workers come when nobody waits for them any more.
        (unique_id,) = fake.rings
        encoded = base64.b64encode(unique_id).decode()
        info = {"rank_offset": 1, "world_size": 3, "packed": False}
        with pytest.raises(Failed):
            world.each(world.join, {**info, "nccl_unique_id_b64": encoded})
        assert fake.aborted == [(unique_id, 0)]


def test_a_server_that_fails_in_the_middle_joins_another_group_next_time(fakes):
    fake = fakes()
    sender = sender_of(fake)
    with Joining(fake, fails_at=1) as world:
        says = "could not take the weights of version 1 .*/update_weights: answered with status 500"
        with pytest.raises(EngineError, match=says):
            sent(sender, world)
        assert [rank for _, rank in fake.aborted] == [0] and "/resume" not in world.routes
        world.fails_at = None
        sent(sender, world, 2)
        check_received(world, 2)
        first, second = (info["nccl_unique_id_b64"] for info in world.groups)
        assert first != second and world.running.is_set()


@pytest.mark.parametrize("route", [INIT, "/update_weights"])
def test_a_server_that_dies_in_the_middle_is_an_error_at_once(fakes, route, monkeypatch):
    monkeypatch.setattr(http_json, "BACK_OFF", (0.01,))
    monkeypatch.setattr(module, "_GRACE", 0.2)
    fake = fakes()
    with Joining(fake, fails={route: None}) as world:
        with pytest.raises(EngineError, match=f"{route}: left in the middle of an answer"):
            sent(sender_of(fake), world)
        # Without the server nothing was joined that could be aborted.
        assert len(fake.aborted) == (route != INIT)


def test_closing_ends_a_transfer_that_waits(fakes):
    fake = fakes()
    sender = sender_of(fake)
    with Joining(fake, idle=("/update_weights",)) as world:

        async def both():
            loading = asyncio.ensure_future(sender.load(Server(world.url), tensors(1), "1"))
            while "/update_weights" not in world.routes:
                await asyncio.sleep(0.01)
            sender.drop(world.url)
            await loading

        began = time.monotonic()
        with pytest.raises(EngineError, match="its group of NCCL was given up"):
            asyncio.run(both())
        assert [rank for _, rank in fake.aborted] == [0] and time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("how", "server", "says"),
    [
        ({}, {"devices": 1}, r"engine: answered with status 500; start it with .*\"nccl\""),
        ({"refuses": True}, {}, r"; start it with .* VLLM_NCCL_SO_PATH=/jax/libnccl.so.2$"),
        ({}, {"devices": "two"}, "says that it has 'two' devices"),
        ({}, {"fails": {"/pause": 404}}, "start it with VLLM_SERVER_DEV_MODE=1"),
        ({}, {"holds": "0"}, "has weights '0', not '1'"),
    ],
)
def test_what_a_server_that_can_not_take_part_is_told(fakes, how, server, says, monkeypatch):
    monkeypatch.setattr(module, "_GRACE", 0.2)
    fake = fakes(**how)
    with Joining(fake, **server) as world, pytest.raises(EngineError, match=says) as failed:
        sent(sender_of(fake), world)
    assert "\n" not in str(failed.value)


def test_without_an_nvidia_device_it_is_refused():
    with pytest.raises(UserError, match="needs an NVIDIA device, and JAX found cpu; write"):
        find_libraries()
