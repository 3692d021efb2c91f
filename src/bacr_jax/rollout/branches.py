"""Branches: answers at every cut of every trunk, decoded together against the trunks' cache.

A branch reads its trunk's keys up to its cut and writes only its own few tokens: nothing is copied
or prefilled again. Token index a is the same for all branches at a step, so own keys are written
with one slice update.
"""

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from bacr_jax import parallel
from bacr_jax.config import ConditioningConfig
from bacr_jax.data.decode_rules import DecodeRules
from bacr_jax.model import attention, qwen2
from bacr_jax.model.kv_cache import DecodeParams, LayerCache
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.rollout.decode import layer_phi, next_logits, shard
from bacr_jax.rollout.sampling import SamplingParams, draw, row_keys
from bacr_jax.types import CLOSED_BY_TAG, Branches, Trunks, pytree


@pytree
class BranchState:
    """Branches in flight.

    Attributes:
      cache: own keys and values per layer, [B, M, K, A, H] each.
      tokens: suffix then answer.
      context: trunk positions visible.
      forced: forced tokens at the start.
      sampled: answer tokens sampled so far.
      matched: state of the closing-tag automaton.
      ended: no token will be sampled any more.
      finished: closed by the tag or an end token.
      broken: ended because its logits were not finite.
      logprobs: of each sampled token.
      rows: global row ids.
      source: branch whose text serves each cut.
      phi: budget embedding of the trunks.
    """

    cache: tuple[LayerCache, ...]
    tokens: Int[Array, "B M A"]
    context: Int[Array, "B M"]
    forced: Int[Array, "B M"]
    sampled: Int[Array, "B M"]
    matched: Int[Array, "B M"]
    ended: Bool[Array, "B M"]
    finished: Bool[Array, "B M"]
    broken: Bool[Array, "B M"]
    logprobs: Float[Array, "B M T"]
    rows: Int[Array, "B"]
    source: Int[Array, "B M"]
    phi: Float[Array, "B D"] | Float[Array, "L B D"] | None


def first_equal(cuts: Int[Array, "B M"]) -> Int[Array, "B M"]:
    """For each cut the index of the first cut at the same place."""
    same = cuts[:, :, None] == cuts[:, None, :]
    return jnp.argmax(same, axis=-1).astype(jnp.int32)


def open_branches(
    trunks: Trunks,
    cuts: Int[Array, "B M"],
    rows: Int[Array, "B"],
    rules: DecodeRules,
    *,
    config: Qwen2Config,
    answer_tokens: int,
    dtype: Any,
    share: bool = True,
    phi: Float[Array, "B D"] | Float[Array, "L B D"] | None = None,
    real: Bool[Array, "B"] | None = None,
) -> BranchState:
    """Places a suffix at every cut.

    A cut at or past the natural end keeps the model's own closing text and gets the natural suffix;
    any other cut ends the thinking with the forced one.

    Args:
      trunks: sampled trunks.
      cuts: thinking tokens kept at each cut (larger than the thinking: all of it).
      rows: global row ids.
      rules: vocabulary facts.
      config: model shape.
      answer_tokens: most sampled tokens per answer.
      dtype: compute type of the cache.
      share: cuts that fall on the same place have one source: the others start ended and copy its
        text at the end. False: each gets an answer of its own.
      phi: budget embedding of the trunks.
      real: rows that are wanted; all by default.
    """
    chex.assert_rank([cuts, rows], [2, 1])
    b, m = cuts.shape
    width = rules.suffix_length + answer_tokens
    kept = jnp.minimum(cuts, trunks.thinking[:, None])
    whole = (kept == trunks.thinking[:, None]) & (trunks.close == CLOSED_BY_TAG)[:, None]
    context = trunks.prompt_lengths[:, None] + jnp.where(whole, trunks.sampled[:, None], kept)
    pad = lambda ids: jnp.zeros(width, jnp.int32).at[: ids.shape[0]].set(ids)
    tokens = jnp.where(whole[..., None], pad(rules.natural_suffix), pad(rules.forced_suffix))
    suffix = jnp.where(whole, rules.natural_suffix.shape[0], rules.forced_suffix.shape[0])
    own = jnp.broadcast_to(jnp.arange(m, dtype=jnp.int32), (b, m))
    source = first_equal(kept) if share else own
    shape = (b, m, config.num_kv_heads, width, config.head_dim)
    idle = source != own
    empty = lambda: LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
    zeros = jnp.zeros((b, m), jnp.int32)
    return BranchState(
        cache=tuple(empty() for _ in range(config.num_layers)),
        tokens=tokens,
        context=context,
        forced=suffix,
        sampled=zeros,
        matched=zeros,
        ended=idle if real is None else idle | ~real[:, None],
        broken=jnp.zeros((b, m), bool),
        finished=jnp.zeros((b, m), bool),
        logprobs=jnp.zeros((b, m, answer_tokens), jnp.float32),
        rows=rows,
        source=source,
        phi=phi,
    )


def step(
    params: DecodeParams,
    trunk_cache: tuple[LayerCache, ...],
    state: BranchState,
    at: Int[Array, ""],
    key: Array,
    *,
    config: Qwen2Config,
    rules: DecodeRules,
    sampling: SamplingParams,
    conditioning: ConditioningConfig | None = None,
    truncated: bool = False,
) -> BranchState:
    """Feeds token `at` of every branch and samples token `at + 1` where the suffix is over."""
    b, m, width = state.tokens.shape
    token = jax.lax.dynamic_index_in_dim(state.tokens, at, axis=2, keepdims=False)
    x = params.embed[token]
    positions = state.context + at
    by = qwen2.rotation(positions, head_dim=config.head_dim, theta=config.rope_theta)
    sees_trunk = jnp.arange(trunk_cache[0].k.shape[2]) < state.context[:, :, None]
    sees_own = jnp.broadcast_to(jnp.arange(width) <= at, (1, 1, width))
    written = []
    for index, layer in enumerate(params.layers):

        def attend(q: Array, k: Array, v: Array, index: int = index) -> tuple[Array, LayerCache]:
            put = lambda old, new: jax.lax.dynamic_update_slice_in_dim(
                old, new[:, :, :, None], at, axis=3
            )
            own = LayerCache(put(state.cache[index].k, k), put(state.cache[index].v, v))
            trunk = trunk_cache[index]
            over_trunk = attention.cached_attention(q, trunk.k, trunk.v, sees_trunk)
            flat = lambda a: a.reshape(b * m, -1, *a.shape[3:])
            over_own = attention.cached_attention(
                q.reshape(b * m, 1, *q.shape[2:]), flat(own.k), flat(own.v), sees_own
            )
            over_own = jax.tree.map(lambda a: a.reshape(b, m, *a.shape[2:]), over_own)
            return attention.merge([over_trunk, over_own], q.dtype), own

        x, entry = qwen2.apply_block(
            layer,
            x,
            by,
            attend,
            config=config,
            phi=layer_phi(state.phi, index),
            gate=params.gates[index] if params.gates else None,
            conditioning=conditioning,
        )
        written.append(entry)
    logits = next_logits(params, x.reshape(b * m, -1), config)
    cut_keys = [row_keys(key, state.rows, state.sampled[:, j], 1 + j) for j in range(m)]
    keys = jnp.stack(cut_keys, axis=1).reshape(b * m)
    drawn, logprob = draw(
        keys, logits, sampling=sampling, allowed_tokens=rules.allowed_tokens, truncated=truncated
    )
    drawn, logprob = drawn.reshape(b, m), logprob.reshape(b, m)

    due = ~state.ended & (at + 1 >= state.forced)
    broken = due & ~jnp.isfinite(logprob)
    live = due & ~broken
    matched = jnp.where(live, rules.answer_close.next_state[state.matched, drawn], state.matched)
    closed = live & ((matched == rules.answer_close.accept) | rules.eos[drawn])
    following = jax.lax.dynamic_index_in_dim(state.tokens, at + 1, axis=2, keepdims=False)
    tokens = jax.lax.dynamic_update_slice_in_dim(
        state.tokens, jnp.where(live, drawn, following)[..., None], at + 1, axis=2
    )
    capacity = state.logprobs.shape[2]
    slot = jnp.where(live, state.sampled, capacity)[..., None] == jnp.arange(capacity)
    sampled = state.sampled + live
    return dataclasses.replace(
        state,
        cache=tuple(written),
        tokens=tokens,
        sampled=sampled,
        matched=matched,
        finished=state.finished | closed,
        ended=state.ended | broken | closed | (sampled >= capacity),
        broken=state.broken | broken,
        logprobs=jnp.where(slot, logprob[..., None], state.logprobs),
    )


@functools.partial(
    jax.jit,
    static_argnames=("config", "num_steps", "conditioning", "truncated", "mesh"),
    donate_argnames=("state",),
)
def branch_chunk(
    params: DecodeParams,
    trunk_cache: tuple[LayerCache, ...],
    state: BranchState,
    start: Int[Array, ""],
    key: Array,
    rules: DecodeRules,
    sampling: SamplingParams,
    *,
    config: Qwen2Config,
    num_steps: int,
    conditioning: ConditioningConfig | None = None,
    truncated: bool = False,
    mesh: parallel.AnyMesh | None = None,
) -> BranchState:
    """Steps `start` .. `start + num_steps - 1` of every branch; the trunks' cache is only read."""
    advance = functools.partial(
        step,
        params,
        trunk_cache,
        key=key,
        config=config,
        rules=rules,
        sampling=sampling,
        conditioning=conditioning,
        truncated=truncated,
    )
    advanced: BranchState = jax.lax.fori_loop(
        0, num_steps, lambda i, s: shard(advance(s, start + i), mesh), state
    )
    return advanced


def branches_of(state: BranchState) -> Branches:
    """What was sampled; cuts that share a source get its text and counters."""
    share = lambda x: jnp.take_along_axis(
        x, state.source.reshape(*state.source.shape, *(1,) * (x.ndim - 2)), axis=1
    )
    return Branches(
        tokens=share(state.tokens),
        context=share(state.context),
        forced=share(state.forced),
        sampled=share(state.sampled),
        finished=share(state.finished),
        source=state.source,
        logprobs=share(state.logprobs),
    )


def no_branches(rows: int) -> Branches:
    """What `rows` trunks without any cut have, on the host."""
    none: Any = np.zeros((rows, 0), np.int32)
    flags: Any = none.astype(bool)
    text: Any = none[..., None]
    return Branches(
        tokens=text,
        context=none,
        forced=none,
        sampled=none,
        finished=flags,
        source=none,
        logprobs=text.astype(np.float32),
    )
