"""Data-parallel copies of the policy: rows of their own, and gradients summed once per update.

Copies (`mesh.data`) are in different boxes, and the links between boxes are slow. Left to itself
the compiler sums every layer's gradient over all devices in every micro-batch, in the compute type.
Here the gradient of each copy is a slice of one array with a leading axis, which is split over the
copies: a copy adds up its own micro-batches in fp32, and the sum over that axis is taken once.
"""

import dataclasses
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from bacr_jax.learner.spec import LearnerSpec
from bacr_jax.parallel import constrain, constrain_rows, row_shards, shardings


def num_copies(spec: LearnerSpec) -> int:
    """Copies, each of which accumulates gradients of its own."""
    return row_shards(spec.mesh, over=("data",))


def split(rows: Any, spec: LearnerSpec) -> Any:
    """Leading axis B as [copies, B / copies]; every row stays on its device."""
    copies, mesh = num_copies(spec), spec.mesh
    rows = jax.tree.map(lambda x: x.reshape(copies, x.shape[0] // copies, *x.shape[1:]), rows)
    inside = lambda rows: constrain_rows(rows, mesh, over=("fsdp",))
    return jax.vmap(inside, spmd_axis_name="data")(rows)


def gradient_shardings(grads: Any, spec: LearnerSpec) -> Any:
    """Places of `train_step.Gradients`: those of the parameters, in every copy."""
    assert spec.mesh is not None
    mesh, where = spec.mesh, shardings(grads, spec.mesh)
    if num_copies(spec) == 1:
        return where
    apart = {"policy": grads.policy, "head": grads.head}
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), apart)
    of_copy = lambda where: NamedSharding(mesh, PartitionSpec("data", *where.spec))
    return dataclasses.replace(where, **jax.tree.map(of_copy, shardings(one, mesh)))


def laid_out(grads: Any, spec: LearnerSpec) -> Any:
    """Inside jit: gradients in their places."""
    if spec.mesh is None or spec.mesh.size == 1:
        return grads
    return jax.lax.with_sharding_constraint(grads, gradient_shardings(grads, spec))


def summed(grads: Any, spec: LearnerSpec) -> Any:
    """Gradients of the whole batch from those of the copies, fp32."""
    if num_copies(spec) == 1:
        return grads
    return constrain(jax.tree.map(lambda x: x.sum(0), grads), spec.mesh)
