"""Decodes branches, the answers at every cut of every trunk, against the trunks' cache.

A branch reads its trunk's keys up to its cut and writes only the keys of its answer, so nothing is
copied or prefilled again. All branches are at the same token index in a step, so the keys of the
step are written with one slice update. `engine` calls this module.
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

# Cuts of a trace that an evaluation answers together if a trace has more cuts than this.
CUTS_AT_ONCE = 8


@dataclass(frozen=True)
class Chunk:
    """Cuts that are answered together.

    Attributes:
      first: index of the chunk's first cut.
      cuts: thinking tokens before each cut; the last cut is repeated to fill the chunk.
      wanted: True if the cut needs an answer, because no earlier cut is at the same position.
    """

    first: int
    cuts: Int[np.ndarray, "n m"]
    wanted: Bool[np.ndarray, "n m"]


def split(
    cuts: Int[np.ndarray, "n M"], source: Int[np.ndarray, "n M"], at_once: int
) -> list[Chunk]:
    """Splits cuts into chunks of equal width; omits chunks in which no cut needs an answer.

    Args:
      source: index of the cut whose answer serves each cut (`rewards.distinct_cuts`).
      at_once: cuts per chunk.
    """
    num_cuts = cuts.shape[1]
    padding = ((0, 0), (0, -num_cuts % at_once))
    wanted = np.pad(source == np.arange(num_cuts), padding)
    padded = np.pad(cuts, padding, mode="edge")
    chunks = []
    for first in range(0, padded.shape[1], at_once):
        columns = slice(first, first + at_once)
        if wanted[:, columns].any():
            chunks.append(Chunk(first, padded[:, columns], wanted[:, columns]))
    return chunks


def answer(
    cuts: Int[np.ndarray, "n M"],
    thinking: Int[np.ndarray, "n"],
    at_once: int,
    decode: Callable[[Chunk], Branches],
) -> Branches:
    """Answers all cuts chunk by chunk; the result equals decoding all cuts together.

    Args:
      thinking: thinking tokens of each row.
      at_once: cuts per chunk.
      decode: answers the wanted cuts of a chunk, on the host.

    Returns:
      Branches at every cut. Cuts at the same position share one answer and one source.
    """
    source = distinct_cuts(cuts, thinking)
    chunks = split(cuts, source, at_once)
    decoded = [decode(chunk) for chunk in chunks]
    joined = jax.tree.map(lambda *x: np.concatenate(x, axis=1), *decoded)
    # Column of each source in the joined answers, which lack the omitted chunks.
    first = np.array([chunk.first for chunk in chunks])
    chunk_index = np.searchsorted(first, source, side="right") - 1
    column = source + chunk_index * at_once - first[chunk_index]

    def take_columns(x: np.ndarray) -> np.ndarray:
        added_axes = (1,) * (x.ndim - 2)
        index = column.reshape(*column.shape, *added_axes)
        return np.take_along_axis(x, index, 1)

    return dataclasses.replace(jax.tree.map(take_columns, joined), source=source)


@pytree
class BranchState:
    """Branches in flight. Fields not listed below mean the same as in `trunks.TrunkState`.

    Attributes:
      cache: the branches' keys and values per layer, [B M, K, A, H] each. The branches of a row are
        adjacent, in the order of their queries, so that a step writes its slice in place.
      tokens: forced and sampled tokens.
      context: tokens of the trunk that each branch reads (prompt included).
      forced: number of forced tokens at the start.
      sampled: number of answer tokens sampled so far.
      finished: True if the closing tag or an end token closed the answer.
      source: index of the branch whose text serves each cut.
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
    """Starts a branch with its suffix at every cut.

    If a trunk closed its thinking with the tag, a cut at or after the end of the thinking keeps the
    model's closing text and gets the natural suffix. Every other cut closes the thinking with the
    forced suffix.

    Args:
      cuts: thinking tokens before each cut; a cut after the end of the thinking means its end.
      share: if True, cuts at the same position have one source; the other branches start as ended
        and copy the source's text at the end. If False, each cut gets a separate answer.
      wanted: cuts to answer; None for all. The other branches start as ended.
    """
    chex.assert_rank([cuts, ids.row], [2, 1])
    b, m = cuts.shape
    width = rules.suffix_length + answer_tokens
    ends = jnp.minimum(cuts, trunks.thinking[:, None])
    at_end = ends == trunks.thinking[:, None]
    is_natural = at_end & (trunks.close == CLOSED_BY_TAG)[:, None]

    def pad(ids: Array) -> Array:
        length = ids.shape[0]
        return jnp.zeros(width, jnp.int32).at[:length].set(ids)

    index = jnp.broadcast_to(jnp.arange(m, dtype=jnp.int32), (b, m))
    source = distinct_cuts(cuts, trunks.thinking) if share else index
    is_idle = source != index
    zeros = jnp.zeros((b, m), jnp.int32)
    return BranchState(
        cache=kv_cache.empty(spec.config, rows=b * m, length=width, dtype=spec.dtype),
        tokens=jnp.where(
            is_natural[..., None], pad(rules.natural_suffix), pad(rules.forced_suffix)
        ),
        context=trunks.prompt_lengths[:, None]
        + jnp.where(is_natural, trunks.sampled[:, None], ends),
        forced=jnp.where(is_natural, rules.natural_suffix.shape[0], rules.forced_suffix.shape[0]),
        sampled=zeros,
        matched=zeros,
        ended=is_idle if wanted is None else is_idle | ~wanted,
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
    """Runs token `at` of every branch against its trunk up to its cut and the branch's tokens.

    Returns:
      Logits of token `at + 1` of the B M branches (fp32), and the branches' caches including token
      `at`.
    """
    b, m, width = state.tokens.shape
    trunk_positions = jnp.arange(trunk_cache[0].length)
    sees_trunk = trunk_positions < state.context[:, :, None]
    visible = jnp.where(state.ended, 1, state.context)
    is_written = jnp.arange(width) <= at
    sees_branch = jnp.broadcast_to(is_written, (1, 1, width))

    def flatten(x: Array) -> Array:
        return x.reshape(b * m, *x.shape[2:])

    def attend(
        caches: tuple[LayerCache, LayerCache], q: Array, k: Array, v: Array
    ) -> tuple[Array, LayerCache]:
        def write(old: Array, new: Array) -> Array:
            new = flatten(new)[:, :, None]
            return jax.lax.dynamic_update_slice_in_dim(old, new, at, axis=2)

        trunk, branch = caches
        branch = LayerCache(write(branch.k, k), write(branch.v, v))
        if spec.attention == "cudnn":
            over_trunk = partial_rows(q, trunk, visible, spec.mesh)
        else:
            over_trunk = attention.cached_attention(
                q, trunk.k, trunk.v, sees_trunk, transposed=trunk.transposed
            )
        over_branch = attention.cached_attention(
            flatten(q)[:, None], branch.k, branch.v, sees_branch
        )
        over_branch = jax.tree.map(lambda x: x.reshape(b, m, *x.shape[2:]), over_branch)
        return attention.merge([over_trunk, over_branch], q.dtype), branch

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
    states = x.reshape(-1, x.shape[-1])
    return output_logits(params, states, spec), cache


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
    """Feeds token `at` of every branch and samples token `at + 1` if it is after the suffix.

    The random numbers of a branch depend on the index of its cut, which is `first_cut` plus the
    index of the branch.
    """
    b, m, _ = state.tokens.shape
    logits, cache = feed_branches(params, trunk_cache, state, at, spec=spec)
    cut_keys = []
    for j in range(m):
        position = state.sampled[:, j]
        keys = row_keys(draws.key, state.ids, position, first_cut + 1 + j)
        cut_keys.append(keys)
    result = draw_tokens(
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
        state.tokens, jnp.where(result.live, result.token, following)[..., None], at + 1, axis=2
    )
    capacity = state.logprobs.shape[2]
    # Ended branches write to an index out of range.
    index = jnp.where(result.live, state.sampled, capacity)
    is_written = index[..., None] == jnp.arange(capacity)
    return dataclasses.replace(
        count_tokens(state, result, capacity),
        cache=cache,
        tokens=tokens,
        finished=state.finished | result.by_tag | result.by_eos,
        logprobs=jnp.where(is_written, result.logprob[..., None], state.logprobs),
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
    """Runs steps `start` .. `start + num_steps - 1` of every branch (see `trunks.decode_trunks`).

    The state is donated; the trunks' cache is only read.
    """

    def advance(i: Array, state: BranchState) -> BranchState:
        state = branch_step(
            params, trunk_cache, state, start + i, draws, spec=spec, first_cut=first_cut
        )
        return shard_rows(state, spec.mesh)

    return jax.lax.fori_loop(0, num_steps, advance, state)


def branches_of(state: BranchState) -> Branches:
    """Returns the sampled answers; cuts that share a source get the source's text and counters."""

    def share(x: Array) -> Array:
        added_axes = (1,) * (x.ndim - 2)
        source = state.source.reshape(*state.source.shape, *added_axes)
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
