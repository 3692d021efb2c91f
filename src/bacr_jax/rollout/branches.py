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

from bacr_jax.data.decode_rules import DecodeRules
from bacr_jax.model import attention
from bacr_jax.model.kv_cache import DecodeParams, LayerCache
from bacr_jax.rollout.cudnn_decoding import partial_rows
from bacr_jax.rollout.decode import Phi, count_tokens, draw_tokens, next_logits, shard_rows
from bacr_jax.rollout.sampling import SamplingParams, row_keys
from bacr_jax.rollout.spec import DecodeSpec
from bacr_jax.types import CLOSED_BY_TAG, Branches, Trunks, pytree


@pytree
class BranchState:
    """Branches in flight.

    Attributes:
      cache: own keys and values per layer, [B M, K, A, H] each: the branches of a row beside each
        other, as their queries are put to them, so that a step writes its slice in place.
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
      calls: which of several keys and temperatures a row is drawn with.
      source: branch whose text serves each cut.
      phi: budget embedding of the trunks, or of each branch (`DecodeSpec.tells_cuts`).
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
    calls: Int[Array, "B"]
    source: Int[Array, "B M"]
    phi: Phi


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
    spec: DecodeSpec,
    answer_tokens: int,
    share: bool = True,
    phi: Phi = None,
    wanted: Bool[Array, "B M"] | None = None,
    calls: Int[Array, "B"] | None = None,
) -> BranchState:
    """Places a suffix at every cut.

    A cut at or past the natural end keeps the model's own closing text and gets the natural suffix;
    any other cut ends the thinking with the forced one.

    Args:
      trunks: sampled trunks.
      cuts: thinking tokens kept at each cut (larger than the thinking: all of it).
      rows: global row ids.
      rules: vocabulary facts.
      spec: model shape and compute type.
      answer_tokens: most sampled tokens per answer.
      share: cuts that fall on the same place have one source: the others start ended and copy its
        text at the end. False: each gets an answer of its own.
      phi: budget embedding of the trunks, or of each branch.
      wanted: answers that are wanted; all by default.
      calls: of the rows; all of one by default.
    """
    chex.assert_rank([cuts, rows], [2, 1])
    b, m = cuts.shape
    width = rules.suffix_length + answer_tokens
    kept = jnp.minimum(cuts, trunks.thinking[:, None])
    whole = (kept == trunks.thinking[:, None]) & (trunks.close == CLOSED_BY_TAG)[:, None]
    pad = lambda ids: jnp.zeros(width, jnp.int32).at[: ids.shape[0]].set(ids)
    own = jnp.broadcast_to(jnp.arange(m, dtype=jnp.int32), (b, m))
    source = first_equal(kept) if share else own
    idle = source != own
    zeros = jnp.zeros((b, m), jnp.int32)
    return BranchState(
        cache=_own_cache(spec, b * m, width),
        tokens=jnp.where(whole[..., None], pad(rules.natural_suffix), pad(rules.forced_suffix)),
        context=trunks.prompt_lengths[:, None] + jnp.where(whole, trunks.sampled[:, None], kept),
        forced=jnp.where(whole, rules.natural_suffix.shape[0], rules.forced_suffix.shape[0]),
        sampled=zeros,
        matched=zeros,
        ended=idle if wanted is None else idle | ~wanted,
        broken=jnp.zeros((b, m), bool),
        finished=jnp.zeros((b, m), bool),
        logprobs=jnp.zeros((b, m, answer_tokens), jnp.float32),
        rows=rows,
        calls=jnp.zeros_like(rows) if calls is None else calls,
        source=source,
        phi=phi,
    )


def _own_cache(spec: DecodeSpec, branches: int, width: int) -> tuple[LayerCache, ...]:
    """Zeroed keys and values of `width` tokens of every branch, per layer."""
    shape = (branches, spec.config.num_kv_heads, width, spec.config.head_dim)
    layer = lambda: LayerCache(jnp.zeros(shape, spec.dtype), jnp.zeros(shape, spec.dtype))
    return tuple(layer() for _ in range(spec.config.num_layers))


def feed_branches(
    params: DecodeParams,
    trunk_cache: tuple[LayerCache, ...],
    state: BranchState,
    at: Int[Array, ""],
    *,
    spec: DecodeSpec,
) -> tuple[Float[Array, "R V"], tuple[LayerCache, ...]]:
    """Runs token `at` of every branch against its trunk up to its cut and its own tokens.

    Returns:
      Logits of token `at + 1` of the B M branches (fp32), and their own caches with token `at`.
    """
    b, m, width = state.tokens.shape
    sees_trunk = jnp.arange(trunk_cache[0].length) < state.context[:, :, None]
    visible = jnp.where(state.ended, 1, state.context)
    sees_own = jnp.broadcast_to(jnp.arange(width) <= at, (1, 1, width))
    flat = lambda x: x.reshape(b * m, *x.shape[2:])

    def attend(
        seen: tuple[LayerCache, LayerCache], q: Array, k: Array, v: Array
    ) -> tuple[Array, LayerCache]:
        put = lambda old, new: jax.lax.dynamic_update_slice_in_dim(
            old, flat(new)[:, :, None], at, axis=2
        )
        trunk, own = seen
        own = LayerCache(put(own.k, k), put(own.v, v))
        if spec.attention == "cudnn":
            over_trunk = partial_rows(q, trunk, visible, spec.mesh)
        else:
            over_trunk = attention.cached_attention(
                q, trunk.k, trunk.v, sees_trunk, turned=trunk.turned
            )
        over_own = attention.cached_attention(flat(q)[:, None], own.k, own.v, sees_own)
        over_own = jax.tree.map(lambda x: x.reshape(b, m, *x.shape[2:]), over_own)
        return attention.merge([over_trunk, over_own], q.dtype), own

    token = jax.lax.dynamic_index_in_dim(state.tokens, at, axis=2, keepdims=False)
    # Under phi of the cuts, the token of branch j is told embedding j of its row.
    which = jnp.broadcast_to(jnp.eye(m), (b, m, m)) if spec.tells_cuts else None
    return next_logits(
        params,
        token,
        state.context + at,
        attend,
        list(zip(trunk_cache, state.cache, strict=True)),
        spec=spec,
        phi=state.phi,
        which=which,
    )


def branch_step(
    params: DecodeParams,
    trunk_cache: tuple[LayerCache, ...],
    state: BranchState,
    at: Int[Array, ""],
    key: Array,
    *,
    spec: DecodeSpec,
    rules: DecodeRules,
    sampling: SamplingParams,
    first_cut: Int[Array, ""] | int = 0,
) -> BranchState:
    """Feeds token `at` of every branch and samples token `at + 1` where the suffix is over.

    The random numbers of a branch are those of its cut, whose number is `first_cut` + its index.
    """
    b, m, _ = state.tokens.shape
    logits, cache = feed_branches(params, trunk_cache, state, at, spec=spec)
    stream = lambda j: first_cut + 1 + j
    of_cut = lambda j: row_keys(key, state.rows, state.sampled[:, j], stream(j), state.calls)
    cut_keys = [of_cut(j) for j in range(m)]
    drawn = draw_tokens(
        jnp.stack(cut_keys, axis=1).reshape(b * m),
        logits,
        ~state.ended & (at + 1 >= state.forced),
        state.matched,
        rules.answer_close,
        rules=rules,
        sampling=sampling.for_rows(jnp.repeat(state.calls, m)),
        mesh=spec.mesh,
    )
    following = jax.lax.dynamic_index_in_dim(state.tokens, at + 1, axis=2, keepdims=False)
    tokens = jax.lax.dynamic_update_slice_in_dim(
        state.tokens, jnp.where(drawn.live, drawn.token, following)[..., None], at + 1, axis=2
    )
    capacity = state.logprobs.shape[2]
    slot = jnp.where(drawn.live, state.sampled, capacity)[..., None] == jnp.arange(capacity)
    return dataclasses.replace(
        count_tokens(state, drawn, capacity),
        cache=cache,
        tokens=tokens,
        finished=state.finished | drawn.by_tag | drawn.by_eos,
        logprobs=jnp.where(slot, drawn.logprob[..., None], state.logprobs),
    )


@functools.partial(jax.jit, static_argnames=("spec", "num_steps"), donate_argnames=("state",))
def decode_branches(
    params: DecodeParams,
    trunk_cache: tuple[LayerCache, ...],
    state: BranchState,
    start: Int[Array, ""],
    key: Array,
    rules: DecodeRules,
    sampling: SamplingParams,
    first_cut: Int[Array, ""] | int = 0,
    *,
    spec: DecodeSpec,
    num_steps: int,
) -> BranchState:
    """Steps `start` .. `start + num_steps - 1` of every branch; see `trunks.decode_trunks`.

    The state is donated, the trunks' cache only read.
    """

    def advance(i: Array, state: BranchState) -> BranchState:
        state = branch_step(
            params,
            trunk_cache,
            state,
            start + i,
            key,
            spec=spec,
            rules=rules,
            sampling=sampling,
            first_cut=first_cut,
        )
        return shard_rows(state, spec.mesh, of_branches=spec.tells_cuts)

    advanced: BranchState = jax.lax.fori_loop(0, num_steps, advance, state)
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
