"""Defines the device mesh of a run: its valid shapes, and the shape set by the config.

Rows are split over `data` and `fsdp`, and parameters over `fsdp` and `tensor`. For example, a
device of a (data 2, fsdp 4) mesh stores one eighth of the rows and one quarter of the parameters.
`shardings` assigns the dimensions of parameters to these axes.
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
    """Number of devices along each mesh axis.

    Attributes:
      data: number of replicas of the parameters.
      fsdp: number of shards of every parameter, which are gathered where the parameter is used.
      tensor: number of shards of the attention heads and of the MLP width.
      decode_tensor: number of tensor shards of the parameters for decoding. Rows are split over the
        other devices.
    """

    data: int
    fsdp: int
    tensor: int
    decode_tensor: int

    @property
    def num_devices(self) -> int:
        """Returns the total number of devices."""
        return self.data * self.fsdp * self.tensor

    @property
    def row_shards(self) -> int:
        """Returns the number of shards of the rows of a batch."""
        return self.data * self.fsdp

    @property
    def param_shards(self) -> int:
        """Returns the number of shards of the learner's parameters."""
        return self.fsdp * self.tensor

    @property
    def slot_shards(self) -> int:
        """Returns the number of parts into which the mesh divides the traces that are decoded."""
        return self.num_devices // self.decode_tensor


def _divisors(n: int) -> list[int]:
    """Returns all divisors of a number in ascending order."""
    return [d for d in range(1, n + 1) if n % d == 0]


def _distance(one: Sequence[int], other: Sequence[int]) -> float:
    """Returns the distance between two mesh shapes: the sum of |log(a / b)| over their axes."""
    return sum(abs(math.log(a / b)) for a, b in zip(one, other))


def _layouts(num_devices: int, width: int, kv_heads: int) -> Iterator[tuple[int, int, int]]:
    """Yields every (data, fsdp, tensor) in which fsdp divides the width and tensor the heads."""
    for data in _divisors(num_devices):
        for fsdp in _divisors(num_devices // data):
            tensor = num_devices // data // fsdp
            if width % fsdp == 0 and kv_heads % tensor == 0:
                yield data, fsdp, tensor


def layouts(
    num_devices: int, *, hidden_size: int, intermediate_size: int, num_kv_heads: int
) -> Iterator[MeshShape]:
    """Yields every mesh shape for these devices whose shards divide the model's width and heads."""
    kv_heads = math.gcd(num_kv_heads, intermediate_size)
    for data, fsdp, tensor in _layouts(num_devices, hidden_size, kv_heads):
        for decode_tensor in _divisors(math.gcd(fsdp * tensor, kv_heads)):
            yield MeshShape(data, fsdp, tensor, decode_tensor)


def _to_config(shape: Sequence[int]) -> str:
    """Returns a mesh shape as config keys, for error messages."""
    return " ".join(f"mesh.{axis}={size}" for axis, size in zip(AXES, shape))


def resolve(
    config: MeshConfig,
    num_devices: int,
    *,
    hidden_size: int,
    intermediate_size: int,
    num_kv_heads: int,
) -> MeshShape:
    """Returns the mesh shape that the config section `mesh` specifies.

    With mesh.fsdp=-1, the `fsdp` axis uses all remaining devices. `fsdp` splits the model width D.
    `tensor` splits the MLP width and the key/value heads K.

    Args:
      config: config section `mesh`.
      num_devices: number of devices of all processes.
      hidden_size: model width D.
      intermediate_size: MLP width.
      num_kv_heads: number of key/value heads K.

    Raises:
      UserError: the mesh shape is incompatible with the devices or the model.
    """
    kv_heads = math.gcd(num_kv_heads, intermediate_size)
    fitting = list(_layouts(num_devices, hidden_size, kv_heads))
    fsdp = config.fsdp
    if fsdp == -1:
        fsdp = max(num_devices // (config.data * config.tensor), 1)
    requested = (config.data, fsdp, config.tensor)
    model = f"{num_kv_heads} key/value heads, width {hidden_size}, MLP {intermediate_size}"
    if not fitting:
        raise UserError(
            f"mesh: the model ({model}) can't be split over {num_devices} devices, because the "
            "number of shards must divide its width and heads; use another number of devices "
            "(CUDA_VISIBLE_DEVICES)"
        )
    nearest = min(fitting, key=lambda layout: _distance(layout, requested))
    if math.prod(requested) != num_devices:
        raise UserError(
            f"mesh.data x mesh.fsdp x mesh.tensor: found {config.data} x {config.fsdp} x "
            f"{config.tensor}, whose product is not the number of devices, {num_devices}; set "
            f"{_to_config(nearest)}"
        )
    if num_kv_heads % config.tensor or intermediate_size % config.tensor:
        raise UserError(
            f"mesh.tensor={config.tensor} does not divide the numbers of heads and of MLP units "
            f"of the model ({model}); set {_to_config(nearest)}"
        )
    if hidden_size % fsdp:
        raise UserError(
            f"mesh.fsdp={fsdp} does not divide the model's width ({model}); set "
            f"{_to_config(nearest)}"
        )
    decode_tensor = config.tensor if config.decode_tensor is None else config.decode_tensor
    shards = fsdp * config.tensor
    sizes = _divisors(math.gcd(shards, kv_heads))
    if decode_tensor not in sizes:
        nearest_size = min(sizes, key=lambda size: _distance([size], [decode_tensor]))
        raise UserError(
            f"mesh.decode_tensor={decode_tensor} must divide the numbers of heads and of MLP "
            f"units of the model ({model}), and mesh.fsdp x mesh.tensor={shards}; set it to "
            f"{nearest_size}"
        )
    return MeshShape(*requested, decode_tensor)


def make_mesh(shape: MeshShape, devices: Sequence[Any] | None = None) -> Mesh:
    """Creates a mesh over `devices`, or over all devices of all processes if None."""
    return jax.make_mesh(shape[:3], AXES, (AxisType.Auto,) * len(AXES), devices=devices)


def decode_mesh(mesh: Mesh, tensor: int) -> Mesh:
    """Returns a mesh of the same devices, in the same order, with another `tensor` size.

    The copy of the parameters for decoding is sharded over this mesh.
    """
    data, fsdp, learner_tensor = mesh.devices.shape
    if tensor == learner_tensor:
        return mesh
    devices = mesh.devices.reshape(data, fsdp * learner_tensor // tensor, tensor)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))
