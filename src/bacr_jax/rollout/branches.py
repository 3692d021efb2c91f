"""Decodes branches: the answers at all truncation points (cuts) of all thinking traces.

A trunk is a prompt with its thinking. A branch is an answer that continues a trunk from a cut. It
starts with a forced suffix, such as the tag that closes the thinking. A branch attends to the
cached keys of its trunk up to its cut, and its cache contains only the keys of its suffix and its
answer. The trunk is therefore neither copied nor prefilled again. In each step, all branches
process the same token index, so the new keys are written with one slice update. `engine` calls this
module.
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
from bacr_jax.rollout.sampling import RowIds, SamplingInputs, row_keys
from bacr_jax.rollout.spec import DecodeSpec, Phi
from bacr_jax.types import CLOSED_BY_TAG, Branches, Trunks, pytree

# If a trace has more truncation points than this number, an evaluation answers this number of them
# at a time, to limit the memory for keys and values.
CUTS_AT_ONCE = 8


@dataclass(frozen=True)
class Chunk:
    """m consecutive truncation points (cuts) of n traces, whose answers are decoded together.

    Attributes:
      first: index of the chunk's first cut among all cuts of a trace.
      cuts: number of thinking tokens before each cut. The last cut is repeated to fill the chunk.
      wanted: True if an answer must be decoded at the cut. False if an earlier cut is at the same
        position, or if the cut only fills the chunk.
    """

    first: int
    cuts: Int[np.ndarray, "n m"]
    wanted: Bool[np.ndarray, "n m"]


def split(
    cuts: Int[np.ndarray, "n M"], source: Int[np.ndarray, "n M"], at_once: int
) -> list[Chunk]:
    """Splits the truncation points (cuts) of n traces into chunks of `at_once` cuts.

    Chunks in which no cut needs an answer are omitted.

    Args:
      cuts: number of thinking tokens before each cut.
      source: index of the cut whose answer is used at each cut (`rewards.distinct_cuts`).
      at_once: number of cuts per chunk and trace.
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
    """Decodes an answer at every truncation point (cut), in chunks of cuts to limit memory.

    The result is the same as if the answers at all cuts were decoded together.

    Args:
      cuts: number of thinking tokens before each cut.
      thinking: number of thinking tokens of each trace.
      at_once: number of cuts per chunk.
      decode: function that decodes an answer at the wanted cuts of a chunk, and returns the answers
        on the host.

    Returns:
      The answers (branches) at all cuts. Cuts at the same position share an answer.
    """
    source = distinct_cuts(cuts, thinking)
    chunks = split(cuts, source, at_once)
    decoded = [decode(chunk) for chunk in chunks]
    joined = jax.tree.map(lambda *x: np.concatenate(x, axis=1), *decoded)
    # Convert `source` to indices into the joined answers, which lack the omitted chunks.
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
    """State of branches (answers at truncation points of a trace) that are being decoded.

    B traces have M branches each. A is the number of token positions per branch, and T the maximum
    number of sampled tokens per answer.

    Attributes:
      cache: keys and values of the branches per layer, [B M, K, A, H] each. The branches of a trace
        are adjacent.
      tokens: forced tokens, then sampled tokens of each branch.
      context: number of tokens of prompt and thinking that each branch attends to.
      forced: number of forced tokens at the start of each branch.
      sampled: number of answer tokens sampled so far.
      matched: state of the automaton that detects the closing tag of the answer.
      ended: True if no more tokens will be sampled in this branch.
      finished: True if the answer was closed by its closing tag or by an end token.
      broken: True if the branch ended because its logits were non-finite.
      logprobs: log-probability (nats) of each sampled token under the sampling distribution.
      ids: ids that determine the random numbers of each trace.
      source: index of the branch whose answer is used at each truncation point.
      phi: budget embedding of each trace. None without budget conditioning.
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
    """Starts an answer (branch) at every truncation point (cut), with a forced suffix.

    At most cuts, the forced suffix closes the thinking. The exception is a cut at or after the end
    of thinking that the model closed with the tag. This branch keeps the model's closing tag and
    continues with `rules.natural_suffix`.

    Args:
      trunks: prompts with their sampled thinking.
      cuts: number of thinking tokens before each cut. A cut after the end of the thinking is moved
        to the end.
      ids: ids that determine the random numbers of each trace.
      rules: decoding rules, which contain the suffixes.
      spec: static settings of the decoder.
      answer_tokens: maximum number of sampled tokens per answer.
      share: if True, cuts at the same position share an answer. Only one of their branches is
        decoded, and the others copy its result. If False, an answer is decoded for each cut.
      phi: budget embedding of each trace. None without budget conditioning.
      wanted: True for cuts at which an answer is decoded. None for all cuts. The branches at all
        other cuts are marked as ended.
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
    """Runs token `at` of every branch (answer at a truncation point) through the model.

    Each branch attends to the prompt and the thinking before its truncation point, and to its own
    tokens up to `at`.

    Args:
      trunk_cache: cached keys and values of prompts and thinking, per layer.
      state: state of the branches.
      at: index of the token within the branches.

    Returns:
      The fp32 logits of token `at + 1` of all B M branches, and the updated caches of the branches.
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
    draws: SamplingInputs,
    *,
    spec: DecodeSpec,
    first_cut: Int[Array, ""] | int = 0,
) -> BranchState:
    """Runs token `at` of every branch (answer) through the model, and samples token `at + 1`.

    Tokens of the forced suffix are not sampled.

    Args:
      trunk_cache: cached keys and values of prompts and thinking, per layer.
      state: state of the branches.
      at: index of the token within the branches.
      draws: PRNG key, decoding rules and sampling settings.
      first_cut: index of the first branch's truncation point among all truncation points of a
        trace. The PRNG key of a branch depends on the index of its truncation point.
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
    # Ended branches use an out-of-range index, so their log-probability is not written.
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
    draws: SamplingInputs,
    first_cut: Int[Array, ""] | int = 0,
    *,
    spec: DecodeSpec,
    num_steps: int,
) -> BranchState:
    """Runs `num_steps` decoding steps of all branches (answers), beginning with step `start`.

    The other arguments are as for `branch_step`. The state is donated, so it is updated in place.
    The loop runs entirely on the device.
    """

    def advance(i: Array, state: BranchState) -> BranchState:
        state = branch_step(
            params, trunk_cache, state, start + i, draws, spec=spec, first_cut=first_cut
        )
        return shard_rows(state, spec.mesh)

    return jax.lax.fori_loop(0, num_steps, advance, state)


def branches_of(state: BranchState) -> Branches:
    """Returns the sampled answers (branches) at all truncation points.

    Truncation points that share an answer receive the tokens and counters of the branch in
    `source`.
    """

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
