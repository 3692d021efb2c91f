"""Reading into shards of several devices, in a process of its own with eight of them."""

from devices_world import run_on_devices
from hf_world import make_folder

PROGRAM = """
import sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from bacr_jax.model.hf import reading

mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tensor"))

def sharding_of(path, shape):
    if path.endswith("_kernel"):
        return NamedSharding(mesh, P(None, "fsdp", "tensor"))
    return NamedSharding(mesh, P())

config, plain = reading.load_policy(sys.argv[1])
_, spread = reading.load_policy(sys.argv[1], sharding_of=sharding_of)
jax.tree.map(np.testing.assert_array_equal, plain, spread)
for name, leaf in spread["layers"].items():
    parts = {s.data.shape for s in leaf.addressable_shards}
    l, *rest = leaf.shape
    want = (l, rest[0] // 4, rest[1] // 2) if name.endswith("_kernel") else leaf.shape
    assert parts == {want}, (name, parts)
    assert len(leaf.sharding.device_set) == 8
assert len(spread["embed"].sharding.device_set) == 8
print("fine")
"""


def test_every_device_gets_its_part(tmp_path):
    make_folder(tmp_path / "hf", max_shard_bytes=4000)
    assert run_on_devices(PROGRAM, tmp_path / "hf") == "fine"
