"""Assigns the dimensions of parameters, batches and caches to the axes of the mesh.

Every parameter has logical axes. A table of rules maps each logical axis to a mesh axis:

    dimension   parameters and optimizer   decode copy
    vocab       tensor                     tensor
    embed       fsdp                       not split
    heads       tensor                     tensor
    mlp         tensor                     tensor
    rows        data x fsdp                data x fsdp

Gradients and optimizer moments have the same names as their parameters, and therefore the same
shardings. A dimension is not split if its size is not divisible by the size of the mesh axis. This
can happen only for the vocabulary, since `mesh.resolve` rejects other sizes. Arrays without a rule,
such as the value head and counters, are replicated.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from bacr_jax.parallel.mesh import AXES

# Maps logical axes to mesh axes, or to None if the axis is not split.
Rules = Mapping[str, str | None]
# Shardings depend only on the sizes of the mesh axes, not on the devices.
AnyMesh = Mesh | AbstractMesh

# Mesh axes over which rows are split.
ROW_AXES = AXES[:2]

TRAIN: Rules = {"vocab": "tensor", "embed": "fsdp", "heads": "tensor", "mlp": "tensor"}
# The decode copy is gathered once per iteration, so that decode steps do not wait for weights.
DECODE: Rules = {**TRAIN, "embed": None}

# Input and output axis of each matrix in a layer.
_MATRICES = {
    **dict.fromkeys(("q", "k", "v"), ("embed", "heads")),
    "o": ("heads", "embed"),
    **dict.fromkeys(("gate", "up"), ("embed", "mlp")),
    "down": ("mlp", "embed"),
}
# Logical axes of every parameter by name. The axis "layers" is omitted if layers are not stacked.
AXES_OF: Mapping[str, tuple[str | None, ...]] = {
    **dict.fromkeys(("embed", "lm_head", "head"), ("vocab", "embed")),
    "final_norm": (None,),
    **dict.fromkeys(("attention_norm", "mlp_norm", "q_norm", "k_norm"), ("layers", None)),
    **{f"{name}_kernel": ("layers", *axes) for name, axes in _MATRICES.items()},
    **dict.fromkeys(("q_bias", "k_bias", "v_bias"), ("layers", "heads")),
    # In the decode copy, the columns of a tensor shard are adjacent (see
    # `kv_cache.join_products`).
    "qkv_kernel": ("layers", "embed", "heads", None),
    "qkv_bias": ("layers", "heads", None),
    "gate_up_kernel": ("layers", "embed", "mlp", None),
    # The same matrices, transposed (see `kv_cache.transpose_products`).
    "qkv_transposed": ("layers", "heads", None, "embed"),
    "gate_up_transposed": ("layers", "mlp", None, "embed"),
    "o_transposed": ("layers", "embed", "heads"),
    "down_transposed": ("layers", "embed", "mlp"),
    # The budget module. It is small, but the size of its float32 moments grows quadratically
    # with the model width.
    **dict.fromkeys(("w1", "w2"), ("layers", None, "embed")),
    **dict.fromkeys(("gate", "gates"), ("layers", None)),
    # LoRA adapters are split like their base matrices. The rank axis is not split.
    **{f"{name}_a": ("layers", axes[0], None) for name, axes in _MATRICES.items()},
    **{f"{name}_b": ("layers", None, axes[1]) for name, axes in _MATRICES.items()},
}


def _canonical(mesh: AnyMesh, over: Sequence[str | tuple[str, ...] | None]) -> PartitionSpec:
    """Returns a partition spec in the canonical form that compiled programs return.

    Mesh axes of size 1 and trailing Nones are omitted. Otherwise the sharding of a program's result
    would differ from the sharding of its input, which would cause a second compilation.

    Args:
      mesh: device mesh.
      over: for each dimension, a mesh axis, a tuple of mesh axes, or None.
    """
    spec: list[Any] = []
    for entry in over:
        axes = entry if isinstance(entry, tuple) else (entry,)
        split_axes = tuple(axis for axis in axes if axis is not None and mesh.shape[axis] > 1)
        if len(split_axes) > 1:
            spec.append(split_axes)
        else:
            spec.append(split_axes[0] if split_axes else None)
    while spec and spec[-1] is None:
        spec.pop()
    return PartitionSpec(*spec)


def _spec(name: str, shape: tuple[int, ...], mesh: AnyMesh, rules: Rules) -> PartitionSpec:
    """Returns the partition spec of a parameter. It is empty for names not listed in `AXES_OF`."""
    logical_axes = AXES_OF.get(name, ())
    if logical_axes[:1] == ("layers",) and len(logical_axes) == len(shape) + 1:
        logical_axes = logical_axes[1:]
    if len(logical_axes) != len(shape):
        return PartitionSpec()
    over: list[str | None] = []
    for logical_axis, size in zip(logical_axes, shape):
        axis = rules.get(logical_axis) if logical_axis else None
        divides = axis is not None and size % mesh.shape[axis] == 0
        over.append(axis if divides else None)
    return _canonical(mesh, over)


def _name(path: tuple[Any, ...]) -> str:
    """Returns the last name in a leaf's path: `q_kernel` for params.layers[3]["q_kernel"]."""
    for part in reversed(path):
        name = getattr(part, "key", getattr(part, "name", None))
        if isinstance(name, str):
            return name
    return ""


def shardings(tree: Any, mesh: AnyMesh, *, rules: Rules = TRAIN) -> Any:
    """Returns the shardings of all leaves of parameters or optimizer states.

    Args:
      tree: pytree that contains parameters or optimizer states. Leaves may be
        `jax.ShapeDtypeStruct`.
      mesh: device mesh.
      rules: mapping of logical axes to mesh axes. Use DECODE for the parameters for decoding
        (`DecodeParams`).
    """

    def sharding_of_leaf(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, _spec(_name(path), leaf.shape, mesh, rules))

    return jax.tree_util.tree_map_with_path(sharding_of_leaf, tree)


def sharding_of(mesh: AnyMesh) -> Callable[[str, tuple[int, ...]], NamedSharding]:
    """Returns a function from the path ("layers/q_kernel") and shape of a leaf to its sharding."""

    def sharding_of_path(path: str, shape: tuple[int, ...]) -> NamedSharding:
        name = path.rpartition("/")[2]
        return NamedSharding(mesh, _spec(name, shape, mesh, TRAIN))

    return sharding_of_path


def row_sharding(mesh: AnyMesh) -> NamedSharding:
    """Returns the sharding of batches, rollout rows and decode states.

    The leading axis is split over data x fsdp.
    """
    return NamedSharding(mesh, _canonical(mesh, [ROW_AXES]))


def row_shards(mesh: AnyMesh | None, over: Sequence[str] = ROW_AXES) -> int:
    """Returns the number of parts into which the mesh divides the rows of a batch.

    The number of rows must be divisible by it.
    """
    if mesh is None:
        return 1
    return math.prod(mesh.shape[axis] for axis in over)


def replicated(mesh: AnyMesh) -> NamedSharding:
    """Returns the sharding that replicates an array on all devices of all processes."""
    return NamedSharding(mesh, PartitionSpec())


def place(tree: Any, sharding: Any) -> Any:
    """Converts host arrays to global arrays with the specified sharding.

    Args:
      tree: arrays, which must be equal in all processes.
      sharding: one sharding, or a pytree of shardings that is a prefix of `tree`.
    """

    def put(leaf: Any, sharding: NamedSharding) -> jax.Array:
        if isinstance(leaf, jax.Array):
            if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                # PRNG keys can't be transferred to devices of other processes, but
                # their data can.
                data = put(np.asarray(jax.random.key_data(leaf)), sharding)
                return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
            return jax.device_put(leaf, sharding)
        host = np.asarray(leaf)
        host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(put, tree, jax.tree.broadcast(sharding, tree))


def constrain(tree: Any, mesh: AnyMesh | None, *, rules: Rules = TRAIN) -> Any:
    """Constrains parameters, gradients or states to their shardings inside jit."""
    if mesh is None or mesh.size == 1:
        return tree
    return jax.lax.with_sharding_constraint(tree, shardings(tree, mesh, rules=rules))


def constrain_rows(
    tree: Any, mesh: AnyMesh | None, *, axis: int = 0, over: Sequence[str] = ROW_AXES
) -> Any:
    """Splits one axis of every array over data x fsdp inside jit, and no other axis.

    Args:
      tree: arrays with rows.
      mesh: device mesh, or None to leave the arrays unchanged.
      axis: axis of the rows.
      over: mesh axes over which rows are split. Inside `jax.vmap` with `spmd_axis_name="data"`,
        which runs once per data-parallel replica, it must not contain "data".
    """
    if mesh is None or mesh.size == 1:
        return tree
    leading_axes = [None] * axis
    sharding = NamedSharding(mesh, _canonical(mesh, [*leading_axes, tuple(over)]))
    return jax.lax.with_sharding_constraint(tree, sharding)


def constrain_embedded(x: jax.Array, mesh: AnyMesh | None, *, over: Sequence[str]) -> jax.Array:
    """Splits the features of embedded tokens over fsdp inside jit, as in the embedding matrix.

    It is used for the tokens of a single data-parallel replica. Without this constraint, the
    compiler fetches rows from other replicas.

    Args:
      x: embedded tokens.
      mesh: device mesh, or None to leave `x` unchanged.
      over: mesh axes over which rows are split. If it contains "data", `x` is unchanged.
    """
    if mesh is None or "data" in over or x.shape[-1] % mesh.shape["fsdp"]:
        return x
    sharding = NamedSharding(mesh, PartitionSpec(None, None, "fsdp"))
    return jax.lax.with_sharding_constraint(x, sharding)


def splits_vocab(mesh: AnyMesh, vocab_size: int) -> bool:
    """True if the output matrix and the logits are split over `tensor`."""
    tensor = mesh.shape["tensor"]
    return tensor > 1 and vocab_size % tensor == 0


def logits_sharding(mesh: AnyMesh, vocab_size: int) -> NamedSharding:
    """Returns the sharding of logits [R, V]: rows over data x fsdp, vocabulary over `tensor`.

    The product with the output matrix has this sharding.
    """
    tensor = "tensor" if splits_vocab(mesh, vocab_size) else None
    return NamedSharding(mesh, _canonical(mesh, [ROW_AXES, tensor]))


def constrain_logits(logits: Any, mesh: AnyMesh | None) -> Any:
    """Constrains logits to `logits_sharding` inside jit."""
    if mesh is None or mesh.size == 1:
        return logits
    sharding = logits_sharding(mesh, logits.shape[-1])
    return jax.lax.with_sharding_constraint(logits, sharding)


def constrain_cache(tree: Any, mesh: AnyMesh | None) -> Any:
    """Splits caches [B, ..., K, S, H] over rows B inside jit, and over heads K if divisible."""
    if mesh is None or mesh.size == 1:
        return tree

    def cache_sharding(leaf: Any) -> NamedSharding:
        heads = "tensor" if leaf.shape[-3] % mesh.shape["tensor"] == 0 else None
        middle_axes = [None] * (leaf.ndim - 4)
        return NamedSharding(mesh, _canonical(mesh, [ROW_AXES, *middle_axes, heads]))

    return jax.lax.with_sharding_constraint(tree, jax.tree.map(cache_sharding, tree))
