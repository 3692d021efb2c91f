"""Contains the device mesh, shardings, and the communication between processes."""

from bacr_jax.parallel.mesh import (
    AXES as AXES,
    MeshShape as MeshShape,
    decode_mesh as decode_mesh,
    layouts as layouts,
    make_mesh as make_mesh,
    resolve as resolve,
)
from bacr_jax.parallel.shardings import (
    DECODE as DECODE,
    ROW_AXES as ROW_AXES,
    AnyMesh as AnyMesh,
    constrain as constrain,
    constrain_cache as constrain_cache,
    constrain_embedded as constrain_embedded,
    constrain_logits as constrain_logits,
    constrain_rows as constrain_rows,
    logits_sharding as logits_sharding,
    place as place,
    replicated as replicated,
    row_sharding as row_sharding,
    row_shards as row_shards,
    sharding_of as sharding_of,
    shardings as shardings,
    splits_vocab as splits_vocab,
)
