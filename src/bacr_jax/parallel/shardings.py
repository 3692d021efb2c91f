"""One table from a parameter's dimensions to the axes of the mesh.

Every parameter has logical axes, and a rule says which mesh axis each of them is split over:

    dimension   parameters and optimizer   decode copy
    vocab       tensor                     tensor
    embed       fsdp                       whole
    heads       tensor                     tensor
    mlp         tensor                     tensor
    rows        data x fsdp                data x fsdp

Optimizer moments and gradients have the names of their parameters, and so their shardings. A
dimension that its mesh axis does not divide stays whole; that can only be the vocabulary, since
`mesh.resolve` refuses the others. What the table does not name (value head, counters) is whole on
every device.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from bacr_jax.parallel.mesh import AXES

Rules = Mapping[str, str | None]
# Shardings need only the sizes of the axes, not the devices.
AnyMesh = Mesh | AbstractMesh

ROW_AXES = AXES[:2]

TRAIN: Rules = {"vocab": "tensor", "embed": "fsdp", "heads": "tensor", "mlp": "tensor"}
# Gathered once an iteration, so that no decoded token waits for a weight.
DECODE: Rules = {**TRAIN, "embed": None}

# Input and output axis of each matrix of a layer.
_MATRICES = {
    **dict.fromkeys(("q", "k", "v"), ("embed", "heads")),
    "o": ("heads", "embed"),
    **dict.fromkeys(("gate", "up"), ("embed", "mlp")),
    "down": ("mlp", "embed"),
}
# Logical axes of every parameter by its name; "layers" is absent where layers are not stacked.
AXES_OF: Mapping[str, tuple[str | None, ...]] = {
    **dict.fromkeys(("embed", "lm_head", "head"), ("vocab", "embed")),
    "final_norm": (None,),
    **dict.fromkeys(("attention_norm", "mlp_norm", "q_norm", "k_norm"), ("layers", None)),
    **{f"{name}_kernel": ("layers", *axes) for name, axes in _MATRICES.items()},
    **dict.fromkeys(("q_bias", "k_bias", "v_bias"), ("layers", "heads")),
    # Of the decode copy: columns of a tensor shard together (`kv_cache.join_products`).
    "qkv_kernel": ("layers", "embed", "heads", None),
    "qkv_bias": ("layers", "heads", None),
    "gate_up_kernel": ("layers", "embed", "mlp", None),
    # The same transposed (`kv_cache.transpose_products`).
    "qkv_transposed": ("layers", "heads", None, "embed"),
    "gate_up_transposed": ("layers", "mlp", None, "embed"),
    "o_transposed": ("layers", "embed", "heads"),
    "down_transposed": ("layers", "embed", "mlp"),
    # The budget module: small, but its moments are fp32 squares of the width.
    **dict.fromkeys(("w1", "w2"), ("layers", None, "embed")),
    **dict.fromkeys(("gate", "gates"), ("layers", None)),
    # Low-rank adapters: split as the matrix beside them is, the rank whole.
    **{f"{name}_a": ("layers", axes[0], None) for name, axes in _MATRICES.items()},
    **{f"{name}_b": ("layers", None, axes[1]) for name, axes in _MATRICES.items()},
}


def _canonical(mesh: AnyMesh, over: Sequence[str | tuple[str, ...] | None]) -> PartitionSpec:
    """The spec as compiled programs return it, so that their results are no new inputs to them."""
    wide = lambda axis: axis if axis is not None and mesh.shape[axis] > 1 else None
    kept: list[Any] = []
    for axes in over:
        if isinstance(axes, tuple):
            several = tuple(axis for axis in axes if wide(axis))
            kept.append(several if len(several) > 1 else next(iter(several), None))
        else:
            kept.append(wide(axes))
    while kept and kept[-1] is None:
        kept.pop()
    return PartitionSpec(*kept)


def _spec(name: str, shape: tuple[int, ...], mesh: AnyMesh, rules: Rules) -> PartitionSpec:
    axes = AXES_OF.get(name, ())
    if axes[:1] == ("layers",) and len(axes) == len(shape) + 1:
        axes = axes[1:]
    if len(axes) != len(shape):
        return PartitionSpec()
    over = [rules.get(axis) if axis else None for axis in axes]
    fits = [
        axis if axis and size % mesh.shape[axis] == 0 else None for axis, size in zip(over, shape)
    ]
    return _canonical(mesh, fits)


def _name(path: tuple[Any, ...]) -> str:
    """The last name on the way to a leaf: `q_kernel` of params.layers[3]["q_kernel"]."""
    names = (getattr(part, "key", getattr(part, "name", None)) for part in reversed(path))
    return next((name for name in names if isinstance(name, str)), "")


def shardings(tree: Any, mesh: AnyMesh, *, rules: Rules = TRAIN) -> Any:
    """The sharding of every leaf of parameters, optimizer states, or of anything that holds them.

    Leaves may be `jax.ShapeDtypeStruct`s; `DecodeParams` have the rules DECODE.
    """
    place_leaf = lambda path, leaf: NamedSharding(mesh, _spec(_name(path), leaf.shape, mesh, rules))
    return jax.tree_util.tree_map_with_path(place_leaf, tree)


def sharding_of(mesh: AnyMesh) -> Callable[[str, tuple[int, ...]], NamedSharding]:
    """The table as a function of a leaf's path ("layers/q_kernel") and shape."""
    name_of = lambda path: path.rpartition("/")[2]
    return lambda path, shape: NamedSharding(mesh, _spec(name_of(path), shape, mesh, TRAIN))


def row_sharding(mesh: AnyMesh) -> NamedSharding:
    """Leading axis split over data x fsdp: batches, rollout rows, decode states."""
    return NamedSharding(mesh, _canonical(mesh, [ROW_AXES]))


def row_shards(mesh: AnyMesh | None, over: Sequence[str] = ROW_AXES) -> int:
    """Parts that rows are split into; their number must be a multiple of it."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in over)


def replicated(mesh: AnyMesh) -> NamedSharding:
    """The whole array on every device of every process."""
    return NamedSharding(mesh, PartitionSpec())


def place(tree: Any, sharding: Any) -> Any:
    """Host arrays (equal in all processes) as global ones, by one sharding or a tree of them."""

    def put(leaf: Any, where: NamedSharding) -> jax.Array:
        if isinstance(leaf, jax.Array):
            if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                # Keys can't be put on devices of other processes; their numbers can.
                data = put(np.asarray(jax.random.key_data(leaf)), where)
                return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
            return jax.device_put(leaf, where)
        host = np.asarray(leaf)
        host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
        return jax.make_array_from_callback(host.shape, where, lambda index: host[index])

    return jax.tree.map(put, tree, jax.tree.broadcast(sharding, tree))


def constrain(tree: Any, mesh: AnyMesh | None, *, rules: Rules = TRAIN) -> Any:
    """Inside jit: parameters, gradients or states are laid out by the table."""
    if mesh is None or mesh.size == 1:
        return tree
    return jax.lax.with_sharding_constraint(tree, shardings(tree, mesh, rules=rules))


def constrain_rows(
    tree: Any, mesh: AnyMesh | None, *, axis: int = 0, over: Sequence[str] = ROW_AXES
) -> Any:
    """Inside jit: axis `axis` of every array is split over data x fsdp, the others are whole.

    `over` leaves data out for what is done for each data-parallel copy by itself (`jax.vmap` with
    `spmd_axis_name="data"`).
    """
    if mesh is None or mesh.size == 1:
        return tree
    where = NamedSharding(mesh, _canonical(mesh, [*[None] * axis, tuple(over)]))
    return jax.lax.with_sharding_constraint(tree, where)


def constrain_embedded(x: jax.Array, mesh: AnyMesh | None, *, over: Sequence[str]) -> jax.Array:
    """Inside jit: embedded tokens of one data-parallel copy, columns split as the embedding's are.

    Without it the compiler fetches rows from other copies. Where rows are split over the copies
    too (`over`) nothing is asked for.
    """
    if mesh is None or "data" in over or x.shape[-1] % mesh.shape["fsdp"]:
        return x
    return jax.lax.with_sharding_constraint(
        x, NamedSharding(mesh, PartitionSpec(None, None, "fsdp"))
    )


def splits_vocab(mesh: AnyMesh, vocab_size: int) -> bool:
    """Whether output matrix and logits are split over `tensor`."""
    tensor = mesh.shape["tensor"]
    return tensor > 1 and vocab_size % tensor == 0


def logits_sharding(mesh: AnyMesh, vocab_size: int) -> NamedSharding:
    """Logits [R, V] as the output matrix leaves them: rows split, the vocabulary over `tensor`."""
    tensor = "tensor" if splits_vocab(mesh, vocab_size) else None
    return NamedSharding(mesh, _canonical(mesh, [ROW_AXES, tensor]))


def constrain_logits(logits: Any, mesh: AnyMesh | None) -> Any:
    """Inside jit: see `logits_sharding`."""
    if mesh is None or mesh.size == 1:
        return logits
    where = logits_sharding(mesh, logits.shape[-1])
    return jax.lax.with_sharding_constraint(logits, where)


def constrain_cache(tree: Any, mesh: AnyMesh | None) -> Any:
    """Inside jit: caches [B, ..., K, S, H] are split by rows, and by heads if `tensor` divides."""
    if mesh is None or mesh.size == 1:
        return tree

    def where(leaf: Any) -> NamedSharding:
        heads = "tensor" if leaf.shape[-3] % mesh.shape["tensor"] == 0 else None
        between = [None] * (leaf.ndim - 4)
        return NamedSharding(mesh, _canonical(mesh, [ROW_AXES, *between, heads]))

    return jax.lax.with_sharding_constraint(tree, jax.tree.map(where, tree))
