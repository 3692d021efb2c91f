"""Accumulates the gradients of data-parallel copies of the policy separately.

The copies (`mesh.data`) are on different machines, which are connected by slow links. By default,
XLA would all-reduce the gradient of every layer over all devices in every micro-batch, in the
compute dtype. This module adds a leading axis to the gradients, which is sharded over the copies.
Each copy accumulates the gradients of its micro-batches in fp32, so an update needs only one
all-reduce. `train_step` calls this module.
"""

import dataclasses
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from bacr_jax.learner.spec import LearnerSpec
from bacr_jax.parallel import constrain, constrain_rows, row_shards, shardings


def num_copies(spec: LearnerSpec) -> int:
    """Returns the number of copies of the policy that accumulate gradients separately."""
    return row_shards(spec.mesh, over=("data",))


def split(rows: Any, spec: LearnerSpec) -> Any:
    """Splits the leading axis B (traces) into [copies, B / copies].

    Every trace stays on its device.
    """
    copies = num_copies(spec)

    def split_leaf(x: Array) -> Array:
        size = x.shape[0] // copies
        return x.reshape(copies, size, *x.shape[1:])

    def constrain_copy(rows: Any) -> Any:
        return constrain_rows(rows, spec.mesh, over=("fsdp",))

    by_copy = jax.tree.map(split_leaf, rows)
    return jax.vmap(constrain_copy, spmd_axis_name="data")(by_copy)


def gradient_shardings(grads: Any, spec: LearnerSpec) -> Any:
    """Returns the shardings of gradients with a leading axis for the copies.

    The gradients of each copy are sharded like the parameters.

    Args:
      grads: instance of `train_step.Gradients`.
    """
    mesh = spec.mesh
    assert mesh is not None
    layout = shardings(grads, mesh)
    if num_copies(spec) == 1:
        return layout
    per_copy = {"policy": grads.policy, "head": grads.head}

    def drop_copy_axis(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)

    def add_copy_axis(sharding: NamedSharding) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec("data", *sharding.spec))

    one_copy = jax.tree.map(drop_copy_axis, per_copy)
    per_copy_shardings = jax.tree.map(add_copy_axis, shardings(one_copy, mesh))
    return dataclasses.replace(layout, **per_copy_shardings)


def laid_out(grads: Any, spec: LearnerSpec) -> Any:
    """Applies the shardings of `gradient_shardings` to gradients. Called inside jit."""
    if spec.mesh is None or spec.mesh.size == 1:
        return grads
    return jax.lax.with_sharding_constraint(grads, gradient_shardings(grads, spec))


def summed(grads: Any, spec: LearnerSpec) -> Any:
    """Sums the gradients over all copies, in fp32."""
    if num_copies(spec) == 1:
        return grads
    total = jax.tree.map(lambda x: x.sum(0), grads)
    return constrain(total, spec.mesh)
