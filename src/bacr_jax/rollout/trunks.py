"""Trunks: thinking tokens sampled under a budget that holds to the token.

The pure core is `prefill_prompts` and `insert_rows` (prompts enter free slots of a state) and
`decode_trunks` (a fixed number of steps of every slot). One step of a row samples a token from the
logits it holds, asks three questions (did the closing tag complete, did the turn end, is the budget
spent) and feeds the token into the cache, which gives the next logits.

A row's cache always holds every token of its trunk, the last one included, so branches can hang off
any cut. Caches are only as long as the longest row in flight needs: `resize_caches` makes them
longer or shorter, and whatever a step reads, it reads whole.
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from bacr_jax import parallel
from bacr_jax.model import attention, kv_cache
from bacr_jax.model.kv_cache import DecodeParams, LayerCache
from bacr_jax.rollout.cudnn_decoding import attend_rows
from bacr_jax.rollout.decode import count_tokens, draw_tokens, output_logits, run_blocks, shard_rows
from bacr_jax.rollout.sampling import Draws, RowIds, row_keys
from bacr_jax.rollout.spec import DecodeSpec, Phi
from bacr_jax.types import CLOSED_BY_BUDGET, CLOSED_BY_EOS, CLOSED_BY_TAG, Prompts, Trunks, pytree


@pytree
class TrunkState:
    """Slots with rows in flight; a free slot is a row that has ended.

    Attributes:
      cache: keys and values per layer; index == position.
      logits: scores of each row's next token, fp32.
      budgets: tokens after which a row is cut.
      matched: state of the closing-tag automaton.
      tag_start: sampled-token index where the tag match now alive began.
      close: how the row ended (meaningful once `ended`).
      ended: no token will be sampled any more.
      broken: ended because its logits were not finite.
      logprobs: of each sampled token under the sampling distribution.
      phi: budget embedding per row (or per layer and row); None without conditioning.
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
    """Prompts that went through the model.

    Attributes:
      logits: scores of each row's first thinking token, fp32.
      phi: budget embedding they were prefilled with.
    """

    cache: tuple[LayerCache, ...]
    logits: Float[Array, "B V"]
    phi: Phi


def free_slots(
    *, spec: DecodeSpec, slots: int, prompt_width: int, max_new: int, length: int, phi: Phi = None
) -> TrunkState:
    """A state without any row; of `phi` the shape alone is read."""
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
    """Runs prompts through the model."""
    chex.assert_rank([prompts.tokens, prompts.lengths], [2, 1])
    b, p = prompts.tokens.shape
    mask = None
    if spec.conditioning is not None and spec.conditioning.positions == "response":
        mask = jnp.zeros((b, p), bool)

    def attend(_: None, q: Array, k: Array, v: Array) -> tuple[Array, LayerCache]:
        out = attention.causal_attention(
            q, k, v, implementation=spec.implementation, lengths=prompts.lengths
        )
        return out, kv_cache.make(k, v, transposed=spec.transposes_keys)

    positions = jnp.broadcast_to(jnp.arange(p), (b, p))
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
    last = jnp.take_along_axis(x, (prompts.lengths - 1)[:, None, None], axis=1)
    return shard_rows(Prefilled(cache, output_logits(params, last[:, 0], spec), phi), spec.mesh)


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
    """Puts prefilled rows into slots.

    Args:
      state: slots; those named here are overwritten.
      slots: where each row goes; one past the last drops the row.
      sources: prefilled prompt of each row; by default there is one for each.
    """
    chex.assert_equal_shape([budgets, ids.row, slots])
    put = lambda old, new: old.at[slots].set(jnp.asarray(new, old.dtype), mode="drop")
    widen = lambda x, like: jnp.pad(x, ((0, 0), (0, like.shape[1] - x.shape[1])))
    put_layer = lambda old, new: kv_cache.put_rows(old, new, slots)
    if sources is not None:
        own = lambda x: x[sources]
        cache, logits = jax.tree.map(own, (prefilled.cache, prefilled.logits))
        prefilled = dataclasses.replace(prefilled, cache=cache, logits=logits)
    phi = state.phi
    if phi is not None:
        phi = put(phi, prefilled.phi) if phi.ndim == 2 else jax.vmap(put)(phi, prefilled.phi)
    filled = TrunkState(
        cache=tuple(map(put_layer, state.cache, prefilled.cache)),
        logits=put(state.logits, prefilled.logits),
        tokens=put(state.tokens, widen(prompts.tokens, state.tokens)),
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
    """Runs one token per row through the model against its cache.

    Args:
      positions: where each token stands; inside the cache for rows whose result matters.
      cache: keys and values of earlier positions; extended in place.
      live: rows whose result matters; all by default. The others' keys need not be read.

    Returns:
      Logits of the next token (fp32) and the cache with this token in it.
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
        keys, values, transposed = written.k, written.v, written.transposed
        if spec.product_dtype is not None:
            # 1.4 times as fast on two CPU cores. Its last bits differ, as those of the products do.
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
    return output_logits(params, x.reshape(-1, x.shape[-1]), spec), cache


def trunk_step(
    params: DecodeParams, state: TrunkState, draws: Draws, *, spec: DecodeSpec
) -> TrunkState:
    """Samples one token for every live row and feeds it; ended rows only keep the shapes.

    The budget rule: a row that has sampled b tokens without completing the closing tag is cut there
    (CLOSED_BY_BUDGET, thinking == b). A tag that completes, at the b-th token too, closes it. With
    a grace window of g tokens the cut comes at the first line break from the b-th token on, and at
    b + g at the latest; a budget of 0 has no grace.
    """
    rules = draws.rules
    drawn = draw_tokens(
        row_keys(draws.key, state.ids, state.sampled, 0),
        state.logits,
        ~state.ended,
        state.matched,
        rules.think_close,
        draws,
        state.ids.stream,
        spec.mesh,
    )
    opens = rules.think_close.opens[state.matched, drawn.token]
    at = state.prompt_lengths + state.sampled
    rows = jnp.arange(at.shape[0])
    place = lambda index: jnp.where(drawn.live, index, jnp.int32(state.tokens.shape[1]))
    tokens = state.tokens.at[rows, place(at)].set(drawn.token, mode="drop")
    logprobs = state.logprobs.at[rows, place(state.sampled)].set(drawn.logprob, mode="drop")
    # What an ended row feeds lands behind its last token, where no query looks.
    logits, cache = feed_tokens(
        params, drawn.token, at, state.cache, spec=spec, phi=state.phi, live=drawn.live
    )
    natural = jnp.where(drawn.by_eos, CLOSED_BY_EOS, state.close)
    limits = state.budgets
    if spec.grace:
        limits = limits + jnp.where(rules.line_breaks[drawn.token], 0, spec.grace)
    return dataclasses.replace(
        count_tokens(state, drawn, limits),
        cache=cache,
        logits=logits,
        tokens=tokens,
        logprobs=logprobs,
        tag_start=jnp.where((drawn.live & opens) | drawn.by_eos, state.sampled, state.tag_start),
        close=jnp.where(drawn.by_tag, CLOSED_BY_TAG, natural),
    )


@functools.partial(jax.jit, static_argnames=("spec", "num_steps"), donate_argnames=("state",))
def decode_trunks(
    params: DecodeParams, state: TrunkState, draws: Draws, *, spec: DecodeSpec, num_steps: int
) -> TrunkState:
    """Steps of every row; a trip count known at compile time never waits for the host."""

    def advance(_: Array, state: TrunkState) -> TrunkState:
        state = trunk_step(params, state, draws, spec=spec)
        return shard_rows(state, spec.mesh)

    return jax.lax.fori_loop(0, num_steps, advance, state)


def resize_caches(state: TrunkState, length: int) -> TrunkState:
    """The same rows with caches of another length; the old caches are freed layer by layer.

    Not to be called inside jit, where all layers would be held twice.
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
    """Copies of some slots: caches, trunks and budget embeddings (what `branches` needs)."""
    pick = lambda x: x[slots]
    cache = parallel.constrain_cache(jax.tree.map(pick, state.cache), mesh)
    phi = state.phi
    if phi is not None:
        phi = jnp.take(phi, slots, axis=phi.ndim - 2)
    return cache, jax.tree.map(pick, trunks_of(state)), phi


def trunks_of(state: TrunkState) -> Trunks:
    """What was sampled; lengths derived from counters, never from token values."""
    forced = state.close == CLOSED_BY_BUDGET
    return Trunks(
        tokens=state.tokens,
        prompt_lengths=state.prompt_lengths,
        sampled=state.sampled,
        thinking=jnp.where(forced, state.sampled, state.tag_start),
        close=state.close,
        budgets=state.budgets,
        logprobs=state.logprobs,
    )
