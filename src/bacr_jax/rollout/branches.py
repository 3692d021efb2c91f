"""Branches: answers at every cut of every trunk, decoded together against the trunks' cache.

A branch reads its trunk's keys up to its cut and writes only its own few tokens: nothing is copied
or prefilled again. Token index a is the same for all branches at a step, so own keys are written
with one slice update.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from bacr_jax.model import attention, kv_cache
from bacr_jax.model.kv_cache import DecodeParams, LayerCache
from bacr_jax.prompts.decode_rules import DecodeRules
from bacr_jax.rewards import distinct_cuts
from bacr_jax.rollout.cudnn_decoding import partial_rows
from bacr_jax.rollout.decode import count_tokens, draw_tokens, output_logits, run_blocks, shard_rows
from bacr_jax.rollout.sampling import Draws, RowIds, row_keys
from bacr_jax.rollout.spec import DecodeSpec, Phi
from bacr_jax.types import CLOSED_BY_TAG, Branches, Trunks, pytree

# Of a dense trace, in an evaluation.
CUTS_AT_ONCE = 8


@dataclass(frozen=True)
class Chunk:
    """Cuts that are answered together.

    Attributes:
      first: number of the first of them.
      cuts: thinking tokens kept; the last one is repeated where there are fewer.
      wanted: cuts with an answer of their own: no earlier one is at the same place.
    """

    first: int
    cuts: Int[np.ndarray, "n m"]
    wanted: Bool[np.ndarray, "n m"]


def split(
    cuts: Int[np.ndarray, "n M"], source: Int[np.ndarray, "n M"], at_once: int
) -> list[Chunk]:
    """Chunks of the same width, those left out in which no cut wants an answer."""
    pad = ((0, 0), (0, -cuts.shape[1] % at_once))
    own = np.pad(source == np.arange(cuts.shape[1]), pad)
    wide = np.pad(cuts, pad, mode="edge")
    chunks = [
        Chunk(first, wide[:, first : first + at_once], own[:, first : first + at_once])
        for first in range(0, wide.shape[1], at_once)
    ]
    return [chunk for chunk in chunks if chunk.wanted.any()]


def answer(
    cuts: Int[np.ndarray, "n M"],
    thinking: Int[np.ndarray, "n"],
    at_once: int,
    decode: Callable[[Chunk], Branches],
) -> Branches:
    """Answers at all cuts, as if they had been decoded together.

    Args:
      decode: answers the wanted cuts of a chunk, on the host.

    Returns:
      Branches at every cut; cuts at the same place share an answer, and have one source.
    """
    source = distinct_cuts(cuts, thinking)
    chunks = split(cuts, source, at_once)
    joined = jax.tree.map(lambda *x: np.concatenate(x, axis=1), *map(decode, chunks))
    # Where the answer at each source stands among the parts.
    first = np.array([chunk.first for chunk in chunks])
    part = np.searchsorted(first, source, side="right") - 1
    index = source + part * at_once - first[part]
    pick = lambda x: np.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 2)), 1)
    return dataclasses.replace(jax.tree.map(pick, joined), source=source)


@pytree
class BranchState:
    """Branches in flight; what is not listed is that of `trunks.TrunkState`.

    Attributes:
      cache: own keys and values per layer, [B M, K, A, H] each: the branches of a row beside each
        other, as their queries are put to them, so that a step writes its slice in place.
      forced: forced tokens at the start.
      sampled: answer tokens sampled so far.
      finished: closed by the tag or an end token.
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
    ids: RowIds
    source: Int[Array, "B M"]
    phi: Phi


def open_branches(
    trunks: Trunks,
    cuts: Int[Array, "B M"],
    ids: RowIds,
    rules: DecodeRules,
    *,
    spec: DecodeSpec,
    answer_tokens: int,
    share: bool = True,
    phi: Phi = None,
    wanted: Bool[Array, "B M"] | None = None,
) -> BranchState:
    """Places a suffix at every cut.

    A cut at or past the natural end keeps the model's own closing text and gets the natural suffix;
    any other cut ends the thinking with the forced one.

    Args:
      cuts: thinking tokens kept at each cut (larger than the thinking: all of it).
      share: cuts that fall on the same place have one source: the others start ended and copy its
        text at the end. False: each gets an answer of its own.
    """
    chex.assert_rank([cuts, ids.row], [2, 1])
    b, m = cuts.shape
    width = rules.suffix_length + answer_tokens
    kept = jnp.minimum(cuts, trunks.thinking[:, None])
    whole = (kept == trunks.thinking[:, None]) & (trunks.close == CLOSED_BY_TAG)[:, None]
    pad = lambda ids: jnp.zeros(width, jnp.int32).at[: ids.shape[0]].set(ids)
    own = jnp.broadcast_to(jnp.arange(m, dtype=jnp.int32), (b, m))
    source = distinct_cuts(cuts, trunks.thinking) if share else own
    idle = source != own
    zeros = jnp.zeros((b, m), jnp.int32)
    return BranchState(
        cache=kv_cache.empty(spec.config, rows=b * m, length=width, dtype=spec.dtype),
        tokens=jnp.where(whole[..., None], pad(rules.natural_suffix), pad(rules.forced_suffix)),
        context=trunks.prompt_lengths[:, None] + jnp.where(whole, trunks.sampled[:, None], kept),
        forced=jnp.where(whole, rules.natural_suffix.shape[0], rules.forced_suffix.shape[0]),
        sampled=zeros,
        matched=zeros,
        ended=idle if wanted is None else idle | ~wanted,
        broken=jnp.zeros((b, m), bool),
        finished=jnp.zeros((b, m), bool),
        logprobs=jnp.zeros((b, m, answer_tokens), jnp.float32),
        ids=ids,
        source=source,
        phi=phi,
    )


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
        caches: tuple[LayerCache, LayerCache], q: Array, k: Array, v: Array
    ) -> tuple[Array, LayerCache]:
        def put(old: Array, new: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(old, flat(new)[:, :, None], at, axis=2)

        trunk, own = caches
        own = LayerCache(put(own.k, k), put(own.v, v))
        if spec.attention == "cudnn":
            over_trunk = partial_rows(q, trunk, visible, spec.mesh)
        else:
            over_trunk = attention.cached_attention(
                q, trunk.k, trunk.v, sees_trunk, transposed=trunk.transposed
            )
        over_own = attention.cached_attention(flat(q)[:, None], own.k, own.v, sees_own)
        over_own = jax.tree.map(lambda x: x.reshape(b, m, *x.shape[2:]), over_own)
        return attention.merge([over_trunk, over_own], q.dtype), own

    token = jax.lax.dynamic_index_in_dim(state.tokens, at, axis=2, keepdims=False)
    x, cache = run_blocks(
        params,
        token,
        state.context + at,
        attend,
        list(zip(trunk_cache, state.cache, strict=True)),
        spec=spec,
        conditioned=spec.condition(params, state.phi),
    )
    return output_logits(params, x.reshape(-1, x.shape[-1]), spec), cache


def branch_step(
    params: DecodeParams,
    trunk_cache: tuple[LayerCache, ...],
    state: BranchState,
    at: Int[Array, ""],
    draws: Draws,
    *,
    spec: DecodeSpec,
    first_cut: Int[Array, ""] | int = 0,
) -> BranchState:
    """Feeds token `at` of every branch and samples token `at + 1` where the suffix is over.

    The random numbers of a branch are those of its cut, whose number is `first_cut` + its index.
    """
    b, m, _ = state.tokens.shape
    logits, cache = feed_branches(params, trunk_cache, state, at, spec=spec)
    cut_keys = [
        row_keys(draws.key, state.ids, state.sampled[:, j], first_cut + 1 + j) for j in range(m)
    ]
    drawn = draw_tokens(
        jnp.stack(cut_keys, axis=1).reshape(b * m),
        logits,
        ~state.ended & (at + 1 >= state.forced),
        state.matched,
        draws.rules.answer_close,
        draws,
        jnp.repeat(state.ids.stream, m),
        spec.mesh,
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
    draws: Draws,
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
            params, trunk_cache, state, start + i, draws, spec=spec, first_cut=first_cut
        )
        return shard_rows(state, spec.mesh)

    return jax.lax.fori_loop(0, num_steps, advance, state)


def branches_of(state: BranchState) -> Branches:
    """What was sampled; cuts that share a source get its text and counters."""

    def share(x: Array) -> Array:
        source = state.source.reshape(*state.source.shape, *(1,) * (x.ndim - 2))
        return jnp.take_along_axis(x, source, axis=1)

    return Branches(
        tokens=share(state.tokens),
        context=share(state.context),
        forced=share(state.forced),
        sampled=share(state.sampled),
        finished=share(state.finished),
        source=state.source,
        logprobs=share(state.logprobs),
    )
