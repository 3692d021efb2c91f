"""One decoding step, shared by trunks and branches: tokens in, the next tokens out.

`run_blocks` and `output_logits` run tokens through the model against whatever keys the caller shows
them; `draw_tokens` samples from logits and asks what every token ends; `count_tokens` keeps the
counters.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from bacr_jax import parallel
from bacr_jax.model.block import apply_block, rms_norm, rotation
from bacr_jax.model.budget import Conditioned
from bacr_jax.model.kv_cache import DecodeParams, LayerCache
from bacr_jax.prompts.decode_rules import Automaton
from bacr_jax.rollout.sampling import Draws, sample_tokens
from bacr_jax.rollout.spec import DecodeSpec
from bacr_jax.types import pytree

# From what a layer reads (its caches), queries, keys and values to its output and its new cache.
AttendLayer = Callable[[Any, Array, Array, Array], tuple[Array, LayerCache]]

_State = TypeVar("_State", bound=Any)


@pytree
class Drawn:
    """One draw per row, and what it does to the row; `...` are the rows' axes.

    Attributes:
      token: drawn ids; they count where `live`.
      logprob: of the token (nats).
      live: rows that the token belongs to.
      broken: rows that were to get a token, but whose logits are not finite.
      matched: state of the closing tag's automaton after the token.
      by_tag: rows whose tag it completes.
      by_eos: other rows whose turn it ends.
    """

    token: Int[Array, "..."]
    logprob: Float[Array, "..."]
    live: Bool[Array, "..."]
    broken: Bool[Array, "..."]
    matched: Int[Array, "..."]
    by_tag: Bool[Array, "..."]
    by_eos: Bool[Array, "..."]


def shard_rows(state: _State, mesh: parallel.AnyMesh | None) -> _State:
    """Inside jit: rows over data x fsdp; heads and logits over tensor where they divide."""
    split = lambda leaf: parallel.constrain_rows(leaf, mesh)
    phi = state.phi
    if phi is not None:
        phi = parallel.constrain_rows(phi, mesh, axis=phi.ndim - 2)
    cache = parallel.constrain_cache(state.cache, mesh)
    own: dict[str, Any] = {"cache": cache, "phi": phi}
    if hasattr(state, "logits"):
        own["logits"] = parallel.constrain_logits(state.logits, mesh)
    bare = dataclasses.replace(state, **dict.fromkeys(own, None))
    return dataclasses.replace(jax.tree.map(split, bare), **own)


def run_blocks(
    params: DecodeParams,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    attend: AttendLayer,
    read: Sequence[Any],
    *,
    spec: DecodeSpec,
    conditioned: Conditioned | None = None,
) -> tuple[Float[Array, "B T D"], tuple[LayerCache, ...]]:
    """Runs tokens through all blocks.

    Args:
      read: what `attend` is given of each layer, alike in shape.

    Returns:
      The residual stream, and the cache of each layer as `attend` made it.
    """
    x = params.embed[tokens]
    config = spec.config
    rotary = rotation(positions, config)

    # The layers are alike: one is traced and lowered for all of them.
    @jax.jit
    def block(x: Array, layer: dict[str, Any]) -> tuple[Array, LayerCache]:
        attend_layer = functools.partial(attend, layer["read"])
        return apply_block(
            layer["weights"],
            x,
            rotary,
            attend_layer,
            config=config,
            conditioned=layer["conditioned"],
            product_dtype=spec.product_dtype,
        )

    cache = []
    for index, weights in enumerate(params.layers):
        layer = {
            "weights": weights,
            "read": read[index],
            "conditioned": None if conditioned is None else conditioned.of_layer(index),
        }
        x, layer_cache = block(x, layer)
        cache.append(layer_cache)
    return x, tuple(cache)


def output_logits(
    params: DecodeParams, x: Float[Array, "R D"], spec: DecodeSpec
) -> Float[Array, "R V"]:
    """Final norm and output matrix: logits (fp32) of the token after each."""
    x = rms_norm(x, params.final_norm, spec.config.rms_norm_eps).astype(params.head.dtype)
    logits = jnp.einsum("bd,vd->bv", x, params.head, preferred_element_type=jnp.float32)
    return parallel.constrain_logits(logits, spec.mesh)


def draw_tokens(
    keys: Array,
    logits: Float[Array, "R V"],
    active: Bool[Array, "..."],
    matched: Int[Array, "..."],
    closing: Automaton,
    draws: Draws,
    streams: Int[Array, "R"],
    mesh: parallel.AnyMesh | None = None,
) -> Drawn:
    """Draws a token for every row and follows its closing tag.

    Args:
      logits: scores of each row's next token, fp32.
      active: rows that are to get a token; R in all.
    """
    rules, sampling = draws.rules, draws.sampling.for_rows(streams)
    token, logprob = sample_tokens(
        keys, logits, sampling=sampling, allowed_tokens=rules.allowed_tokens, mesh=mesh
    )
    token, logprob = token.reshape(active.shape), logprob.reshape(active.shape)
    broken = active & ~jnp.isfinite(logprob)
    live = active & ~broken
    matched = jnp.where(live, closing.next_state[matched, token], matched)
    by_tag = live & (matched == closing.accept)
    by_eos = live & ~by_tag & rules.eos[token]
    return Drawn(token, logprob, live, broken, matched, by_tag, by_eos)


def count_tokens(state: _State, drawn: Drawn, limit: Int[Array, "..."] | int) -> _State:
    """A state with a draw in its counters: a row ends by tag, turn, limit or broken logits."""
    sampled = state.sampled + drawn.live
    closed = drawn.by_tag | drawn.by_eos
    return dataclasses.replace(
        state,
        sampled=sampled,
        matched=drawn.matched,
        ended=state.ended | drawn.broken | closed | (sampled >= limit),
        broken=state.broken | drawn.broken,
    )
