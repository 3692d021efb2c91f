"""Devices and processes: a mesh, one table of shardings, and what several hosts must agree on."""

from bacr_jax.parallel.mesh import AXES, MeshShape, decode_mesh, layouts, make_mesh, resolve
from bacr_jax.parallel.shardings import (
    DECODE,
    ROW_AXES,
    TRAIN,
    AnyMesh,
    constrain,
    constrain_cache,
    constrain_embedded,
    constrain_rows,
    place,
    replicated,
    row_sharding,
    row_shards,
    sharding_of,
    shardings,
)

__all__ = [
    "AXES",
    "DECODE",
    "ROW_AXES",
    "TRAIN",
    "AnyMesh",
    "MeshShape",
    "constrain",
    "constrain_cache",
    "constrain_embedded",
    "constrain_rows",
    "decode_mesh",
    "layouts",
    "make_mesh",
    "place",
    "replicated",
    "resolve",
    "row_sharding",
    "row_shards",
    "sharding_of",
    "shardings",
]
