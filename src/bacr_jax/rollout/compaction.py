"""Rows that still think, moved together: what has ended waits apart for its answers.

A decoding step takes time for every slot, whether its row thinks or has ended. Once no row waits
for a slot, the rows that think are moved into fewer slots; the others keep their caches, as long as
they are, and are put back where they were before answers read them. Caches are split and joined
layer by layer, so that no more than one layer is held twice.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from bacr_jax.model import kv_cache
from bacr_jax.model.kv_cache import LayerCache
from bacr_jax.rollout.trunks import TrunkState


@jax.jit
def _taken(state: TrunkState, rows: Int[Array, "n"]) -> TrunkState:
    phi = state.phi
    if phi is not None:
        phi = jnp.take(phi, rows, axis=phi.ndim - 2)
    bare = dataclasses.replace(state, cache=(), phi=None)
    return dataclasses.replace(jax.tree.map(lambda x: x[rows], bare), phi=phi)


@jax.jit
def _layer_parts(layer: LayerCache, parts: Sequence[Array]) -> list[LayerCache]:
    return [jax.tree.map(lambda x: x[rows], layer) for rows in parts]  # noqa: B023


@jax.jit
def _layer_whole(layers: Sequence[LayerCache], order: Array) -> LayerCache:
    length = max(layer.length for layer in layers)
    resized = [kv_cache.resize(layer, length) for layer in layers]
    return jax.tree.map(lambda *x: jnp.concatenate(x)[order], *resized)


def _delete(layer: LayerCache) -> None:
    jax.tree.map(lambda x: x.delete(), layer)


def split(state: TrunkState, parts: Sequence[np.ndarray]) -> list[TrunkState]:
    """The rows of a state in several; its caches are used up. Not to be called inside jit.

    Args:
      state: rows.
      parts: indices of the rows of each part, every row in one of them, [n] each.
    """
    index = [jnp.asarray(rows, jnp.int32) for rows in parts]
    bare = dataclasses.replace(state, cache=())
    made = [_taken(bare, rows) for rows in index]
    layers = []
    for layer in state.cache:
        layers.append(jax.block_until_ready(_layer_parts(layer, index)))
        _delete(layer)
    return [dataclasses.replace(part, cache=cache) for part, cache in zip(made, zip(*layers))]


def join(states: Sequence[TrunkState], parts: Sequence[np.ndarray]) -> TrunkState:
    """The state whose rows `split` took apart, caches as long as the longest; see there."""
    order = jnp.asarray(np.argsort(np.concatenate(parts)), jnp.int32)
    bare = [dataclasses.replace(state, cache=(), phi=None) for state in states]
    whole = jax.tree.map(lambda *x: jnp.concatenate(x)[order], *bare)
    phi = None
    if states[0].phi is not None:
        axis = states[0].phi.ndim - 2
        phis: Any = [state.phi for state in states]
        phi = jnp.take(jnp.concatenate(phis, axis), order, axis=axis)
    cache = []
    for layers in zip(*[state.cache for state in states]):
        cache.append(jax.block_until_ready(_layer_whole(layers, order)))
        for layer in layers:
            _delete(layer)
    return dataclasses.replace(whole, cache=tuple(cache), phi=phi)
