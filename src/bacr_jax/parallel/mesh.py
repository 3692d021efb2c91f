"""The mesh of a run: which layouts of the devices are legal, and the one the config asks for.

Rows are split over `data` and `fsdp`, parameters over `fsdp` and `tensor`. A device of a
(data 2, fsdp 4) mesh holds an eighth of the rows and a quarter of the parameters.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, Mesh

from bacr_jax.config import MeshConfig
from bacr_jax.errors import UserError

AXES = ("data", "fsdp", "tensor")


class MeshShape(NamedTuple):
    """Devices along each axis.

    Attributes:
      data: copies of the parameters.
      fsdp: shards of every parameter, gathered where it is used.
      tensor: shards of heads and of the MLP's width.
      decode_tensor: tensor shards of the decode copy; rows are split over the other devices.
    """

    data: int
    fsdp: int
    tensor: int
    decode_tensor: int

    @property
    def num_devices(self) -> int:
        """Devices of all axes together."""
        return self.data * self.fsdp * self.tensor

    @property
    def row_shards(self) -> int:
        """Parts that the rows of a batch are split into."""
        return self.data * self.fsdp

    @property
    def param_shards(self) -> int:
        """Parts that a parameter of the learner is split into."""
        return self.fsdp * self.tensor

    @property
    def slot_shards(self) -> int:
        """Parts that decoded rows are split into."""
        return self.num_devices // self.decode_tensor


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _distance(one: Sequence[int], other: Sequence[int]) -> float:
    """How far apart two layouts are, in factors."""
    return sum(abs(math.log(a / b)) for a, b in zip(one, other))


def _layouts(num_devices: int, width: int, kv_heads: int) -> Iterator[tuple[int, int, int]]:
    for data in _divisors(num_devices):
        for fsdp in _divisors(num_devices // data):
            tensor = num_devices // data // fsdp
            if width % fsdp == 0 and kv_heads % tensor == 0:
                yield data, fsdp, tensor


def layouts(
    num_devices: int, *, hidden_size: int, intermediate_size: int, num_kv_heads: int
) -> Iterator[MeshShape]:
    """Every layout of so many devices that `resolve` accepts for a model."""
    kv_heads = math.gcd(num_kv_heads, intermediate_size)
    for data, fsdp, tensor in _layouts(num_devices, hidden_size, kv_heads):
        for decode_tensor in _divisors(math.gcd(fsdp * tensor, kv_heads)):
            yield MeshShape(data, fsdp, tensor, decode_tensor)


def _written(shape: Sequence[int]) -> str:
    return " ".join(f"mesh.{axis}={size}" for axis, size in zip(AXES, shape))


def resolve(
    config: MeshConfig,
    num_devices: int,
    *,
    hidden_size: int,
    intermediate_size: int,
    num_kv_heads: int,
) -> MeshShape:
    """The layout that a config asks for on so many devices, those of all processes.

    fsdp -1 takes all remaining devices. `fsdp` splits the model's width D, `tensor` the width of
    its MLP and the key/value heads K.
    """
    kv_heads = math.gcd(num_kv_heads, intermediate_size)
    fitting = list(_layouts(num_devices, hidden_size, kv_heads))
    rest = num_devices // (config.data * config.tensor)
    fsdp = max(rest, 1) if config.fsdp == -1 else config.fsdp
    wanted = (config.data, fsdp, config.tensor)
    model = f"{num_kv_heads} key/value heads, width {hidden_size}, MLP {intermediate_size}"
    if not fitting:
        raise UserError(
            f"mesh: no layout of {num_devices} devices fits the model ({model}), whose width and "
            "heads must divide by the shards; use another number of devices (CUDA_VISIBLE_DEVICES)"
        )
    nearest = min(fitting, key=lambda layout: _distance(layout, wanted))
    if math.prod(wanted) != num_devices:
        asked = f"{config.data} x {config.fsdp} x {config.tensor}"
        raise UserError(
            f"mesh.data x mesh.fsdp x mesh.tensor: found {asked}, which does not make "
            f"{num_devices} devices; write {_written(nearest)}"
        )
    if num_kv_heads % config.tensor or intermediate_size % config.tensor:
        raise UserError(
            f"mesh.tensor={config.tensor}: must divide the model's heads and MLP ({model}); "
            f"write {_written(nearest)}"
        )
    if hidden_size % fsdp:
        raise UserError(
            f"mesh.fsdp={fsdp}: must divide the model's width ({model}); write {_written(nearest)}"
        )
    decode = config.tensor if config.decode_tensor is None else config.decode_tensor
    shards = fsdp * config.tensor
    sizes = _divisors(math.gcd(shards, kv_heads))
    if decode not in sizes:
        raise UserError(
            f"mesh.decode_tensor={decode}: must divide the heads and MLP ({model}) and mesh.fsdp x "
            f"mesh.tensor={shards}; write {min(sizes, key=lambda d: _distance([d], [decode]))}"
        )
    return MeshShape(*wanted, decode)


def make_mesh(shape: MeshShape, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of the given layout over all devices of all processes (or over `devices`)."""
    return jax.make_mesh(shape[:3], AXES, (AxisType.Auto,) * len(AXES), devices=devices)


def decode_mesh(mesh: Mesh, tensor: int) -> Mesh:
    """The same devices in the same order with another tensor axis, for the decode copy."""
    data, fsdp, old = mesh.devices.shape
    if tensor == old:
        return mesh
    devices = mesh.devices.reshape(data, fsdp * old // tensor, tensor)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))
