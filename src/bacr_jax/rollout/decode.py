"""Trunks: thinking tokens sampled under a budget that holds to the token.

The pure core is `admit` (prompts enter free slots of a state) and `decode_chunk` (a fixed number of
steps of every slot); `generate.py` drives it. One step of a row samples a token from the logits it
holds, asks three questions (did the closing tag complete, did the turn end, is the budget spent)
and feeds the token into the cache, which gives the next logits.

A row's cache always holds every token of its trunk, the last one included, so branches can hang off
any cut. Caches are only as long as the longest row in flight needs: `resize` makes them longer or
shorter, and whatever a step reads, it reads whole.
"""

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from bacr_jax import parallel
from bacr_jax.config import ConditioningConfig
from bacr_jax.data.decode_rules import DecodeRules
from bacr_jax.model import attention, kv_cache, qwen2
from bacr_jax.model.kv_cache import DecodeParams, LayerCache
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.rollout.sampling import SamplingParams, draw, row_keys
from bacr_jax.types import CLOSED_BY_BUDGET, CLOSED_BY_EOS, CLOSED_BY_TAG, Prompts, Trunks, pytree

Phi = Float[Array, "B D"] | Float[Array, "L B D"] | None


@pytree
class DecodeState:
    """Slots with rows in flight; a free slot is a row that has ended.

    Attributes:
      cache: keys and values per layer; index == position.
      logits: scores of each row's next token, fp32.
      tokens: prompt then sampled tokens.
      prompt_lengths: prompt tokens.
      sampled: tokens sampled so far.
      budgets: most tokens a row may sample.
      matched: state of the closing-tag automaton.
      tag_start: sampled-token index where the tag match now alive began.
      close: how the row ended (meaningful once `ended`).
      ended: no token will be sampled any more.
      broken: ended because its logits were not finite.
      logprobs: of each sampled token under the sampling distribution.
      rows: global row ids, for the keys; -1 in a free slot.
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
    rows: Int[Array, "B"]
    phi: Phi


@pytree
class Arrivals:
    """Prefilled prompts.

    Attributes:
      cache: keys and values of the prompts, per layer.
      logits: scores of each row's first thinking token, fp32.
      phi: budget embedding they were prefilled with.
    """

    cache: tuple[LayerCache, ...]
    logits: Float[Array, "B V"]
    phi: Phi


def layer_phi(phi: Array | None, layer: int) -> Array | None:
    """Phi of one layer: shared, or its own slice."""
    return phi[layer] if phi is not None and phi.ndim == 3 else phi


def next_logits(
    params: DecodeParams, x: Float[Array, "B D"], config: Qwen2Config
) -> Float[Array, "B V"]:
    """Final norm and output head, fp32."""
    x = qwen2.rms_norm(x, params.final_norm, config.rms_norm_eps)
    return jnp.einsum("bd,vd->bv", x, params.head, preferred_element_type=jnp.float32)


def shard(state: Any, mesh: parallel.AnyMesh | None) -> Any:
    """Inside jit: rows over data x fsdp, key/value heads over tensor where they divide."""
    if mesh is None or mesh.size == 1:
        return state
    split = lambda leaf: parallel.constrain_rows(leaf, mesh)
    phi = state.phi
    if phi is not None:
        phi = parallel.constrain_rows(phi, mesh, axis=phi.ndim - 2)
    cache = parallel.constrain_cache(state.cache, mesh)
    bare = dataclasses.replace(state, cache=(), phi=None)
    return dataclasses.replace(jax.tree.map(split, bare), cache=cache, phi=phi)


def empty(
    *,
    config: Qwen2Config,
    slots: int,
    prompt_width: int,
    max_new: int,
    length: int,
    dtype: Any,
    phi: Phi = None,
    mesh: parallel.AnyMesh | None = None,
) -> DecodeState:
    """Free slots.

    Args:
      config: model shape.
      slots: rows decoded together.
      prompt_width: longest prompt.
      max_new: most tokens a row can sample.
      length: positions of the caches for now.
      dtype: compute type.
      phi: any budget embedding of `slots` rows, for its shape; None without conditioning.
      mesh: devices over which slots are spread.
    """
    zeros = jnp.zeros(slots, jnp.int32)
    state = DecodeState(
        cache=kv_cache.empty(config, rows=slots, length=length, dtype=dtype),
        logits=jnp.zeros((slots, config.vocab_size), jnp.float32),
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
        rows=zeros - 1,
        phi=None if phi is None else jnp.zeros_like(phi),
    )
    sharded: DecodeState = shard(state, mesh)
    return sharded


def prefill(
    params: DecodeParams,
    prompts: Prompts,
    *,
    config: Qwen2Config,
    phi: Phi = None,
    conditioning: ConditioningConfig | None = None,
    implementation: attention.Implementation = "xla",
    mesh: parallel.AnyMesh | None = None,
) -> Arrivals:
    """Runs prompts through the model.

    Args:
      params: decoding parameters.
      prompts: right-padded prompts.
      config: model shape.
      phi: budget embedding, explicit; None for the plain model.
      conditioning: how phi joins the stream.
      implementation: attention of the prefill.
      mesh: devices over which rows are spread.
    """
    chex.assert_rank([prompts.tokens, prompts.lengths], [2, 1])
    b, p = prompts.tokens.shape
    x = params.embed[prompts.tokens]
    positions = jnp.broadcast_to(jnp.arange(p), (b, p))
    by = qwen2.rotation(positions, head_dim=config.head_dim, theta=config.rope_theta)
    mask = None
    if conditioning is not None and conditioning.positions == "response":
        mask = jnp.zeros((b, p), bool)

    def attend(q: Array, k: Array, v: Array) -> tuple[Array, LayerCache]:
        out = attention.causal_attention(
            q, k, v, implementation=implementation, lengths=prompts.lengths
        )
        return out, LayerCache(kv_cache.heads_first(k), kv_cache.heads_first(v))

    cache = []
    for index, layer in enumerate(params.layers):
        x, entry = qwen2.apply_block(
            layer,
            x,
            by,
            attend,
            config=config,
            phi=layer_phi(phi, index),
            gate=params.gates[index] if params.gates else None,
            conditioning=conditioning,
            mask=mask,
        )
        cache.append(entry)
    last = jnp.take_along_axis(x, (prompts.lengths - 1)[:, None, None], axis=1)
    arrivals = Arrivals(tuple(cache), next_logits(params, last[:, 0], config), phi)
    sharded: Arrivals = shard(arrivals, mesh)
    return sharded


def insert(
    state: DecodeState,
    arrivals: Arrivals,
    prompts: Prompts,
    budgets: Int[Array, "F"],
    rows: Int[Array, "F"],
    slots: Int[Array, "F"],
    *,
    mesh: parallel.AnyMesh | None = None,
) -> DecodeState:
    """Puts prefilled rows into slots.

    Args:
      state: slots; those named here are overwritten.
      arrivals: prefilled prompts.
      prompts: the same prompts.
      budgets: thinking tokens each row may sample, 0..max_new.
      rows: global row ids.
      slots: where each row goes; a slot that does not exist drops the row.
      mesh: devices over which slots are spread.
    """
    chex.assert_equal_shape([budgets, rows, slots])
    put = lambda old, new: old.at[slots].set(new.astype(old.dtype), mode="drop")
    fill = lambda old, value: old.at[slots].set(value, mode="drop")
    widen = lambda x, like: jnp.pad(x, ((0, 0), (0, like.shape[1] - x.shape[1])))

    def put_cache(old: Array, new: Array) -> Array:
        length = min(old.shape[2], new.shape[2])
        return old.at[slots, :, :length].set(new[:, :, :length], mode="drop")

    phi = state.phi
    if phi is not None:
        phi = put(phi, arrivals.phi) if phi.ndim == 2 else jax.vmap(put)(phi, arrivals.phi)
    entered = DecodeState(
        cache=jax.tree.map(put_cache, state.cache, arrivals.cache),
        logits=put(state.logits, arrivals.logits),
        tokens=put(state.tokens, widen(prompts.tokens, state.tokens)),
        prompt_lengths=put(state.prompt_lengths, prompts.lengths),
        sampled=fill(state.sampled, 0),
        budgets=put(state.budgets, budgets),
        matched=fill(state.matched, 0),
        tag_start=fill(state.tag_start, 0),
        close=fill(state.close, CLOSED_BY_BUDGET),
        ended=put(state.ended, budgets <= 0),
        broken=fill(state.broken, False),
        logprobs=fill(state.logprobs, 0.0),
        rows=put(state.rows, rows),
        phi=phi,
    )
    sharded: DecodeState = shard(entered, mesh)
    return sharded


def admit(
    params: DecodeParams,
    state: DecodeState,
    prompts: Prompts,
    budgets: Int[Array, "F"],
    rows: Int[Array, "F"],
    slots: Int[Array, "F"],
    *,
    config: Qwen2Config,
    phi: Phi = None,
    conditioning: ConditioningConfig | None = None,
    implementation: attention.Implementation = "xla",
    mesh: parallel.AnyMesh | None = None,
) -> DecodeState:
    """Prefills prompts into slots, ready to decode; see `prefill` and `insert`."""
    arrivals = prefill(
        params,
        prompts,
        config=config,
        phi=phi,
        conditioning=conditioning,
        implementation=implementation,
        mesh=mesh,
    )
    return insert(state, arrivals, prompts, budgets, rows, slots, mesh=mesh)


def feed(
    params: DecodeParams,
    tokens: Int[Array, "B"],
    positions: Int[Array, "B"],
    cache: tuple[LayerCache, ...],
    *,
    config: Qwen2Config,
    phi: Phi = None,
    conditioning: ConditioningConfig | None = None,
) -> tuple[Float[Array, "B V"], tuple[LayerCache, ...]]:
    """Runs one token per row through the model against its cache.

    Args:
      params: decoding parameters.
      tokens: one id per row.
      positions: where each token stands; inside the cache for rows whose result matters.
      cache: keys and values of earlier positions; extended in place.
      config: model shape.
      phi: budget embedding.
      conditioning: how phi joins the stream.

    Returns:
      Logits of the next token (fp32) and the cache with this token in it.
    """
    x = params.embed[tokens][:, None]
    by = qwen2.rotation(positions[:, None], head_dim=config.head_dim, theta=config.rope_theta)
    visible = (jnp.arange(cache[0].k.shape[2]) <= positions[:, None])[:, None]
    written = []
    for index, layer in enumerate(params.layers):

        def attend(q: Array, k: Array, v: Array, index: int = index) -> tuple[Array, LayerCache]:
            entry = kv_cache.write(cache[index], k, v, positions)
            seen = attention.cached_attention(q, entry.k, entry.v, visible)
            return attention.merge([seen], q.dtype), entry

        x, entry = qwen2.apply_block(
            layer,
            x,
            by,
            attend,
            config=config,
            phi=layer_phi(phi, index),
            gate=params.gates[index] if params.gates else None,
            conditioning=conditioning,
        )
        written.append(entry)
    return next_logits(params, x[:, 0], config), tuple(written)


def step(
    params: DecodeParams,
    state: DecodeState,
    key: Array,
    *,
    config: Qwen2Config,
    rules: DecodeRules,
    sampling: SamplingParams,
    conditioning: ConditioningConfig | None = None,
    truncated: bool = False,
) -> DecodeState:
    """Samples one token for every live row and feeds it; ended rows only keep the shapes.

    The budget rule: a row that has sampled b tokens without completing the closing tag is cut there
    (CLOSED_BY_BUDGET, thinking == b). A tag that completes, at the b-th token too, closes it.
    """
    keys = row_keys(key, state.rows, state.sampled, 0)
    token, logprob = draw(
        keys,
        state.logits,
        sampling=sampling,
        allowed_tokens=rules.allowed_tokens,
        truncated=truncated,
    )

    broken = ~state.ended & ~jnp.isfinite(logprob)
    live = ~state.ended & ~broken
    at = state.prompt_lengths + state.sampled
    rows = jnp.arange(at.shape[0])
    nowhere = jnp.int32(state.tokens.shape[1])
    opens = rules.think_close.opens[state.matched, token]
    matched = jnp.where(live, rules.think_close.next_state[state.matched, token], state.matched)
    by_tag = live & (matched == rules.think_close.accept)
    by_eos = live & ~by_tag & rules.eos[token]
    sampled = state.sampled + live
    tokens = state.tokens.at[rows, jnp.where(live, at, nowhere)].set(token, mode="drop")
    logprobs = state.logprobs.at[rows, jnp.where(live, state.sampled, nowhere)].set(
        logprob, mode="drop"
    )
    # What an ended row feeds lands behind its last token, where no query looks.
    logits, cache = feed(
        params,
        token,
        at,
        state.cache,
        config=config,
        phi=state.phi,
        conditioning=conditioning,
    )
    return dataclasses.replace(
        state,
        cache=cache,
        logits=logits,
        tokens=tokens,
        sampled=sampled,
        matched=matched,
        tag_start=jnp.where((live & opens) | by_eos, state.sampled, state.tag_start),
        close=jnp.where(by_tag, CLOSED_BY_TAG, jnp.where(by_eos, CLOSED_BY_EOS, state.close)),
        ended=state.ended | broken | by_tag | by_eos | (sampled >= state.budgets),
        broken=state.broken | broken,
        logprobs=logprobs,
    )


@functools.partial(
    jax.jit,
    static_argnames=("config", "num_steps", "conditioning", "truncated", "mesh"),
    donate_argnames=("state",),
)
def decode_chunk(
    params: DecodeParams,
    state: DecodeState,
    key: Array,
    rules: DecodeRules,
    sampling: SamplingParams,
    *,
    config: Qwen2Config,
    num_steps: int,
    conditioning: ConditioningConfig | None = None,
    truncated: bool = False,
    mesh: parallel.AnyMesh | None = None,
) -> DecodeState:
    """`num_steps` steps of every row; a trip count known at compile time never waits for the host.

    Args:
      params: decoding parameters.
      state: rows in flight (donated).
      key: key of the call; tokens depend on (key, row id, position) alone.
      rules: vocabulary facts.
      sampling: temperature and truncation.
      config: model shape.
      num_steps: steps; the caches must be long enough for every position reached.
      conditioning: how phi joins the stream.
      truncated: apply top-k/top-p.
      mesh: devices over which slots are spread.
    """
    advance = functools.partial(
        step,
        params,
        key=key,
        config=config,
        rules=rules,
        sampling=sampling,
        conditioning=conditioning,
        truncated=truncated,
    )
    advanced: DecodeState = jax.lax.fori_loop(
        0, num_steps, lambda _, s: shard(advance(s), mesh), state
    )
    return advanced


def resize(state: DecodeState, length: int) -> DecodeState:
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


def take(
    state: DecodeState, slots: Int[Array, "F"], *, mesh: parallel.AnyMesh | None = None
) -> tuple[tuple[LayerCache, ...], Trunks, Phi]:
    """Copies of some slots: caches, trunks and budget embeddings (what `branches` needs)."""
    pick = lambda x: x[slots]
    cache = parallel.constrain_cache(jax.tree.map(pick, state.cache), mesh)
    phi = state.phi
    if phi is not None:
        phi = jnp.take(phi, slots, axis=phi.ndim - 2)
    trunks: Trunks = jax.tree.map(pick, trunks_of(state))
    return cache, trunks, phi


def trunks_of(state: DecodeState) -> Trunks:
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
