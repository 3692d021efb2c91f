"""Decodes trunks: prompts followed by thinking, which is sampled under an exact token budget.

`prefill_prompts` and `insert_rows` put prompts into free decoding slots of a state. A slot decodes
one trace (row) at a time. `decode_trunks` runs a fixed number of steps for all slots. A step
samples a token for each row from its logits. It then checks whether the closing tag is complete,
the turn has ended, or the budget is used up. Finally it runs the token through the model, which
updates the cache and returns the next logits. `engine` calls this module.

The cache of a row always contains every token of its prompt and thinking, including the last one,
so that an answer can start at any truncation point. Every step reads the full length of the caches.
The caches are therefore only as long as the longest row in progress needs, and `resize_caches`
changes their length.
"""

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from bacr_jax import parallel
from bacr_jax.model import attention, kv_cache
from bacr_jax.model.kv_cache import DecodeParams, LayerCache
from bacr_jax.rollout.cudnn_decoding import attend_rows
from bacr_jax.rollout.decode import count_tokens, draw_tokens, output_logits, run_blocks, shard_rows
from bacr_jax.rollout.sampling import RowIds, SamplingInputs, row_keys
from bacr_jax.rollout.spec import DecodeSpec, Phi
from bacr_jax.types import CLOSED_BY_BUDGET, CLOSED_BY_EOS, CLOSED_BY_TAG, Prompts, Trunks, pytree


@pytree
class TrunkState:
    """State of B decoding slots. Each slot decodes one trace (row), or is free.

    Free slots are marked as ended.

    Attributes:
      cache: keys and values per layer. The index within the cache is the position of the token.
      logits: fp32 logits of each row's next token.
      tokens: prompt tokens, then sampled tokens.
      prompt_lengths: number of prompt tokens.
      sampled: number of sampled tokens.
      budgets: number of thinking tokens after which a row is truncated.
      matched: state of the automaton that detects the closing tag of the thinking.
      tag_start: index of the sampled token at which the current match of the closing tag starts.
      close: reason why the thinking ended, for example `types.CLOSED_BY_TAG`. Only valid if `ended`
        is True.
      ended: True if no more tokens will be sampled.
      broken: True if the row ended because its logits were non-finite.
      logprobs: log-probability (nats) of each sampled token under the sampling distribution.
      ids: ids that determine the random numbers of each row.
      phi: budget embedding of each row, optionally per layer. None without budget conditioning.
    """

    cache: tuple[LayerCache, ...]
    logits: Float[Array, "B V"]
    tokens: Int[Array, "B S"]
    prompt_lengths: Int[Array, "B"]
    sampled: Int[Array, "B"]
    budgets: Int[Array, "B"]
    matched: Int[Array, "B"]
    tag_start: Int[Array, "B"]
    close: Int[Array, "B"]
    ended: Bool[Array, "B"]
    broken: Bool[Array, "B"]
    logprobs: Float[Array, "B T"]
    ids: RowIds
    phi: Phi


@pytree
class Prefilled:
    """Caches and logits of prompts after the prefill, the forward pass over the whole prompt.

    Attributes:
      cache: keys and values of the prompts per layer.
      logits: fp32 logits of the first thinking token after each prompt.
      phi: budget embedding of each prompt. None without budget conditioning.
    """

    cache: tuple[LayerCache, ...]
    logits: Float[Array, "B V"]
    phi: Phi


def free_slots(
    *, spec: DecodeSpec, slots: int, prompt_width: int, max_new: int, length: int, phi: Phi = None
) -> TrunkState:
    """Creates a state in which all decoding slots are free.

    Args:
      spec: static settings of the decoder.
      slots: number of slots. Each decodes one trace at a time.
      prompt_width: number of tokens per padded prompt.
      max_new: maximum number of sampled tokens per trace.
      length: number of positions in the caches.
      phi: budget embeddings with the same shape as for later traces. Their values are not used.
        None without budget conditioning.
    """
    zeros = jnp.zeros(slots, jnp.int32)
    state = TrunkState(
        cache=kv_cache.empty(
            spec.config,
            rows=slots,
            length=length,
            dtype=spec.dtype,
            transposed=spec.transposes_keys,
        ),
        logits=jnp.zeros((slots, spec.config.vocab_size), jnp.float32),
        tokens=jnp.zeros((slots, prompt_width + max_new), jnp.int32),
        prompt_lengths=zeros,
        sampled=zeros,
        budgets=zeros,
        matched=zeros,
        tag_start=zeros,
        close=zeros,
        ended=jnp.ones(slots, bool),
        broken=jnp.zeros(slots, bool),
        logprobs=jnp.zeros((slots, max_new), jnp.float32),
        ids=RowIds(zeros - 1, zeros),
        phi=None if phi is None else jnp.zeros_like(phi),
    )
    return shard_rows(state, spec.mesh)


def prefill_prompts(
    params: DecodeParams, prompts: Prompts, *, spec: DecodeSpec, phi: Phi = None
) -> Prefilled:
    """Runs prompts through the model.

    Args:
      params: parameters of the policy, as a copy in the layout for decoding.
      prompts: padded prompts and their lengths.
      spec: static settings of the decoder.
      phi: budget embedding of each prompt. None without budget conditioning.

    Returns:
      The keys and values of the prompts, and the logits of the first thinking token.
    """
    chex.assert_rank([prompts.tokens, prompts.lengths], [2, 1])
    rows, width = prompts.tokens.shape
    mask = None
    if spec.conditioning is not None and spec.conditioning.positions == "response":
        mask = jnp.zeros((rows, width), bool)

    def attend(_: None, q: Array, k: Array, v: Array) -> tuple[Array, LayerCache]:
        out = attention.causal_attention(
            q, k, v, implementation=spec.implementation, lengths=prompts.lengths
        )
        return out, kv_cache.make(k, v, transposed=spec.transposes_keys)

    positions = jnp.broadcast_to(jnp.arange(width), (rows, width))
    none = [None] * len(params.layers)
    x, cache = run_blocks(
        params,
        prompts.tokens,
        positions,
        attend,
        none,
        spec=spec,
        conditioned=spec.condition(params, phi, mask),
    )
    last = (prompts.lengths - 1)[:, None, None]
    last_states = jnp.take_along_axis(x, last, axis=1)[:, 0]
    logits = output_logits(params, last_states, spec)
    return shard_rows(Prefilled(cache, logits, phi), spec.mesh)


def insert_rows(
    state: TrunkState,
    prefilled: Prefilled,
    prompts: Prompts,
    budgets: Int[Array, "F"],
    ids: RowIds,
    slots: Int[Array, "F"],
    sources: Int[Array, "F"] | None = None,
    *,
    mesh: parallel.AnyMesh | None = None,
) -> TrunkState:
    """Inserts prefilled rows (one trace each) into decoding slots.

    Args:
      state: state of all slots. The given slots are overwritten.
      prefilled: result of `prefill_prompts`.
      prompts: prompt of each row.
      budgets: number of thinking tokens after which each row is truncated.
      ids: ids that determine the random numbers of each row.
      slots: slot of each row. A row is dropped if its slot is the index after the last slot.
      sources: index of each row's prompt in `prefilled`. None if `prefilled` contains one entry per
        row.
    """
    chex.assert_equal_shape([budgets, ids.row, slots])

    def put(old: Array, new: Any) -> Array:
        new = jnp.asarray(new, old.dtype)
        return old.at[slots].set(new, mode="drop")

    def put_layer(old: LayerCache, new: LayerCache) -> LayerCache:
        return kv_cache.put_rows(old, new, slots)

    if sources is not None:
        cache, logits = jax.tree.map(lambda x: x[sources], (prefilled.cache, prefilled.logits))
        prefilled = dataclasses.replace(prefilled, cache=cache, logits=logits)
    free_columns = state.tokens.shape[1] - prompts.tokens.shape[1]
    phi = state.phi
    if phi is not None:
        # If phi has one embedding per layer, rows are its second axis.
        put_phi = put if phi.ndim == 2 else jax.vmap(put)
        phi = put_phi(phi, prefilled.phi)
    filled = TrunkState(
        cache=tuple(map(put_layer, state.cache, prefilled.cache)),
        logits=put(state.logits, prefilled.logits),
        tokens=put(state.tokens, jnp.pad(prompts.tokens, ((0, 0), (0, free_columns)))),
        prompt_lengths=put(state.prompt_lengths, prompts.lengths),
        sampled=put(state.sampled, 0),
        budgets=put(state.budgets, budgets),
        matched=put(state.matched, 0),
        tag_start=put(state.tag_start, 0),
        close=put(state.close, CLOSED_BY_BUDGET),
        ended=put(state.ended, budgets <= 0),
        broken=put(state.broken, False),
        logprobs=put(state.logprobs, 0.0),
        ids=jax.tree.map(put, state.ids, ids),
        phi=phi,
    )
    return shard_rows(filled, mesh)


def feed_tokens(
    params: DecodeParams,
    tokens: Int[Array, "B"],
    positions: Int[Array, "B"],
    cache: tuple[LayerCache, ...],
    *,
    spec: DecodeSpec,
    phi: Phi = None,
    live: Bool[Array, "B"] | None = None,
) -> tuple[Float[Array, "B V"], tuple[LayerCache, ...]]:
    """Runs one token of each row (trace) through the model, attending to the cache.

    Args:
      params: parameters of the policy, as a copy in the layout for decoding.
      tokens: one token id per row.
      positions: position of each token. It must be within the cache for live rows.
      cache: keys and values of previous positions. Updated in place.
      spec: static settings of the decoder.
      phi: budget embedding of each row. None without budget conditioning.
      live: True for rows whose result is used. None for all rows. Attention may skip the keys of
        all other rows.

    Returns:
      The fp32 logits of the next token, and the cache including this token.
    """
    length = cache[0].length
    visible = jnp.arange(length) <= positions[:, None]
    lengths = jnp.clip(positions + 1, 1, length)
    if live is not None:
        lengths = jnp.where(live, lengths, 1)

    def attend(cache: LayerCache, q: Array, k: Array, v: Array) -> tuple[Array, LayerCache]:
        written = kv_cache.write(cache, k, v, positions)
        if spec.attention == "cudnn":
            return attend_rows(q, written, lengths, spec.mesh), written
        keys = written.k
        values = written.v
        transposed = written.transposed
        if spec.product_dtype is not None:
            # `token_attention` is 1.4 times as fast as `cached_attention` on two CPU cores. Their
            # results differ in the last bits, which are inexact anyway for products in this dtype.
            out = attention.token_attention(q, keys, values, visible, transposed=transposed)
            return out, written
        partial = attention.cached_attention(
            q, keys, values, visible[:, None], transposed=transposed
        )
        return attention.merge([partial], q.dtype), written

    x, cache = run_blocks(
        params,
        tokens[:, None],
        positions[:, None],
        attend,
        cache,
        spec=spec,
        conditioned=spec.condition(params, phi),
    )
    states = x.reshape(-1, x.shape[-1])
    return output_logits(params, states, spec), cache


def trunk_step(
    params: DecodeParams, state: TrunkState, draws: SamplingInputs, *, spec: DecodeSpec
) -> TrunkState:
    """Samples one token for every unfinished row (trace) and runs it through the model.

    A row with a budget of b tokens is truncated after b tokens if it has not completed the closing
    tag by then (CLOSED_BY_BUDGET, thinking == b). If the b-th token completes the tag, the row
    counts as closed by the tag (CLOSED_BY_TAG).

    With a grace window of g tokens (`spec.grace`), the row is truncated at the first line break
    from the b-th token on, and after b + g tokens at the latest. A budget of 0 has no grace window.

    Args:
      params: parameters of the policy, as a copy in the layout for decoding.
      state: state of the decoding slots.
      draws: PRNG key, decoding rules and sampling settings.
      spec: static settings of the decoder.

    Returns:
      The new state. Rows that have ended do not change.
    """
    rules = draws.rules
    result = draw_tokens(
        row_keys(draws.key, state.ids, state.sampled, 0),
        state.logits,
        ~state.ended,
        state.matched,
        rules.think_close,
        draws,
        state.ids.stream,
        spec.mesh,
    )
    opens = rules.think_close.opens[state.matched, result.token]
    positions = state.prompt_lengths + state.sampled
    rows = jnp.arange(positions.shape[0])

    def drop_ended(index: Array) -> Array:
        # Use an out-of-range index for ended rows, because writes to it are dropped.
        out_of_range = jnp.int32(state.tokens.shape[1])
        return jnp.where(result.live, index, out_of_range)

    tokens = state.tokens.at[rows, drop_ended(positions)].set(result.token, mode="drop")
    logprobs = state.logprobs.at[rows, drop_ended(state.sampled)].set(result.logprob, mode="drop")
    # For an ended row, the token is written after the last token of the row, where no query attends
    # to it.
    logits, cache = feed_tokens(
        params, result.token, positions, state.cache, spec=spec, phi=state.phi, live=result.live
    )
    natural = jnp.where(result.by_eos, CLOSED_BY_EOS, state.close)
    limits = state.budgets
    if spec.grace:
        is_line_break = rules.line_breaks[result.token]
        limits = limits + jnp.where(is_line_break, 0, spec.grace)
    counted = count_tokens(state, result, limits)
    starts_tag = (result.live & opens) | result.by_eos
    return dataclasses.replace(
        counted,
        cache=cache,
        logits=logits,
        tokens=tokens,
        logprobs=logprobs,
        tag_start=jnp.where(starts_tag, state.sampled, state.tag_start),
        close=jnp.where(result.by_tag, CLOSED_BY_TAG, natural),
    )


@functools.partial(jax.jit, static_argnames=("spec", "num_steps"), donate_argnames=("state",))
def decode_trunks(
    params: DecodeParams,
    state: TrunkState,
    draws: SamplingInputs,
    *,
    spec: DecodeSpec,
    num_steps: int,
) -> TrunkState:
    """Runs `num_steps` decoding steps of the thinking of all traces in decoding slots.

    The number of steps is static, so the loop never waits for the host. The state is donated, so it
    is updated in place. The other arguments are as for `trunk_step`.
    """

    def advance(_: Array, state: TrunkState) -> TrunkState:
        state = trunk_step(params, state, draws, spec=spec)
        return shard_rows(state, spec.mesh)

    return jax.lax.fori_loop(0, num_steps, advance, state)


def resize_caches(state: TrunkState, length: int) -> TrunkState:
    """Changes the length of the caches, one layer at a time.

    The old cache of each layer is freed before the next layer is resized. Do not call this function
    inside jit, where the old and new caches of all layers would be in memory at the same time.
    """
    resized = []
    for layer in state.cache:
        resized.append(_resize(layer, length))
        layer.k.delete()
        layer.v.delete()
    return dataclasses.replace(state, cache=tuple(resized))


_resize = jax.jit(kv_cache.resize, static_argnums=1)


def take_slots(
    state: TrunkState, slots: Int[Array, "F"], *, mesh: parallel.AnyMesh | None = None
) -> tuple[tuple[LayerCache, ...], Trunks, Phi]:
    """Copies the state of some decoding slots, so that answers (branches) can be decoded from it.

    Returns:
      The caches per layer, the prompts with their sampled thinking (trunks), and the budget
      embeddings (None without budget conditioning).
    """
    cache = jax.tree.map(lambda x: x[slots], state.cache)
    cache = parallel.constrain_cache(cache, mesh)
    phi = state.phi
    if phi is not None:
        phi = jnp.take(phi, slots, axis=phi.ndim - 2)
    trunks = jax.tree.map(lambda x: x[slots], trunks_of(state))
    return cache, trunks, phi


def trunks_of(state: TrunkState) -> Trunks:
    """Returns the prompts with their sampled thinking (trunks).

    Lengths are computed from the counters of the state, not from token values.
    """
    is_forced = state.close == CLOSED_BY_BUDGET
    return Trunks(
        tokens=state.tokens,
        prompt_lengths=state.prompt_lengths,
        sampled=state.sampled,
        thinking=jnp.where(is_forced, state.sampled, state.tag_start),
        close=state.close,
        budgets=state.budgets,
        logprobs=state.logprobs,
    )
