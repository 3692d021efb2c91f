"""Contains the decoding functions shared by thinking (`trunks`) and answers (`branches`).

`run_blocks` and `output_logits` run tokens through the model with an attention function of the
caller. `draw_tokens` samples a token for each row (thinking or answer) and detects tokens that end
a row. `count_tokens` updates the counters of a decoding state.
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
from bacr_jax.rollout.sampling import SamplingInputs, sample_tokens
from bacr_jax.rollout.spec import DecodeSpec
from bacr_jax.types import pytree

# Maps a layer's cache, queries, keys and values to the attention output and the updated cache.
AttendLayer = Callable[[Any, Array, Array, Array], tuple[Array, LayerCache]]

_State = TypeVar("_State", bound=Any)


@pytree
class StepResult:
    """The token sampled for each row (thinking or answer) in a decoding step.

    The shape `...` is [traces] for thinking, and [traces, answers] for answers.

    Attributes:
      token: sampled token ids. Only valid where `live` is True.
      logprob: log-probability of the token, in nats.
      live: True if the token is appended to the row.
      broken: True if the row needed a token but its logits are non-finite.
      matched: state of the automaton that detects the closing tag, after the token.
      by_tag: True if the token completes the closing tag.
      by_eos: True if the token ends the turn without completing the closing tag.
    """

    token: Int[Array, "..."]
    logprob: Float[Array, "..."]
    live: Bool[Array, "..."]
    broken: Bool[Array, "..."]
    matched: Int[Array, "..."]
    by_tag: Bool[Array, "..."]
    by_eos: Bool[Array, "..."]


def shard_rows(state: _State, mesh: parallel.AnyMesh | None) -> _State:
    """Shards a decoding state over the devices of a mesh. Must be called inside jit.

    Rows are sharded over the mesh axes `data` and `fsdp`. Heads and logits are sharded over the
    axis `tensor` if its size divides their number.
    """
    phi = state.phi
    if phi is not None:
        phi = parallel.constrain_rows(phi, mesh, axis=phi.ndim - 2)
    cache = parallel.constrain_cache(state.cache, mesh)
    special: dict[str, Any] = {"cache": cache, "phi": phi}
    if hasattr(state, "logits"):
        special["logits"] = parallel.constrain_logits(state.logits, mesh)
    others = dataclasses.replace(state, **dict.fromkeys(special, None))
    others = jax.tree.map(lambda leaf: parallel.constrain_rows(leaf, mesh), others)
    return dataclasses.replace(others, **special)


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
    """Runs tokens through all transformer blocks.

    Args:
      attend: function that computes the attention of a layer.
      read: first argument of `attend` for each layer, such as its cache. The shapes must be the
        same for all layers.

    Returns:
      The residual stream, and the cache that `attend` returned for each layer.
    """
    x = params.embed[tokens]
    config = spec.config
    rotary = rotation(positions, config)

    # Use jit, so that the block is traced and lowered only once for all layers.
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
    """Applies the final norm and the output matrix, and returns fp32 logits of the next token."""
    x = rms_norm(x, params.final_norm, spec.config.rms_norm_eps)
    x = x.astype(params.head.dtype)
    logits = jnp.einsum("bd,vd->bv", x, params.head, preferred_element_type=jnp.float32)
    return parallel.constrain_logits(logits, spec.mesh)


def draw_tokens(
    keys: Array,
    logits: Float[Array, "R V"],
    active: Bool[Array, "..."],
    matched: Int[Array, "..."],
    closing: Automaton,
    draws: SamplingInputs,
    streams: Int[Array, "R"],
    mesh: parallel.AnyMesh | None = None,
) -> StepResult:
    """Samples a token for every row and advances the automaton that detects the closing tag.

    A row is the thinking of a trace, or one of its answers.

    Args:
      keys: one PRNG key per row.
      logits: fp32 logits of each row's next token.
      active: True for rows that need a token. The array has R entries, of any shape.
      matched: state of the closing tag's automaton in each row.
      closing: automaton of the closing tag.
      draws: decoding rules and sampling settings.
      streams: index of each row's temperature, if `draws.sampling` contains several.
      mesh: devices over which the logits are sharded. None for a single device.
    """
    rules = draws.rules
    sampling = draws.sampling.for_rows(streams)
    token, logprob = sample_tokens(
        keys, logits, sampling=sampling, allowed_tokens=rules.allowed_tokens, mesh=mesh
    )
    token = token.reshape(active.shape)
    logprob = logprob.reshape(active.shape)
    broken = active & ~jnp.isfinite(logprob)
    live = active & ~broken
    matched = jnp.where(live, closing.next_state[matched, token], matched)
    by_tag = live & (matched == closing.accept)
    by_eos = live & ~by_tag & rules.eos[token]
    return StepResult(token, logprob, live, broken, matched, by_tag, by_eos)


def count_tokens(state: _State, result: StepResult, limit: Int[Array, "..."] | int) -> _State:
    """Updates the counters of traces or answers that are being decoded with the result of a step.

    A trace or an answer (row) ends if the closing tag is complete, the turn has ended, the maximum
    number of sampled tokens is reached, or the logits are non-finite.

    Args:
      state: state of the prompts with thinking (trunks) or of the answers (branches).
      result: result of the step.
      limit: maximum number of sampled tokens of each row.
    """
    sampled = state.sampled + result.live
    closed = result.by_tag | result.by_eos
    return dataclasses.replace(
        state,
        sampled=sampled,
        matched=result.matched,
        ended=state.ended | result.broken | closed | (sampled >= limit),
        broken=state.broken | result.broken,
    )
