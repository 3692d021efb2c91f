"""Trunks: thinking tokens sampled under a budget that holds to the token.

The pure core is `admit` (prefill prompts into a state) and `decode_chunk` (a fixed number of
steps); `generate.py` drives it. One step of a row samples a token from the logits it holds, asks
three questions (did the closing tag complete, did the turn end, is the budget spent) and feeds the
token into the cache, which gives the next logits.

A row's cache always holds every token of its trunk, the last one included, so branches can hang off
any cut.
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from bacr_jax.config import ConditioningConfig
from bacr_jax.model import attention, kv_cache, qwen2
from bacr_jax.model.kv_cache import DecodeParams, LayerCache
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.rollout.rules import DecodeRules
from bacr_jax.rollout.sampling import Sampler, draw, row_keys
from bacr_jax.types import (
    CLOSED_BY_BUDGET,
    CLOSED_BY_EOS,
    CLOSED_BY_TAG,
    Prompts,
    Trunks,
    pytree,
)


@pytree
class DecodeState:
    """Rows in flight.

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
      logprobs: of each sampled token under the sampling distribution.
      rows: global row ids, for the keys.
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
    logprobs: Float[Array, "B T"]
    rows: Int[Array, "B"]
    phi: Float[Array, "B D"] | Float[Array, "L B D"] | None


def layer_phi(phi: Array | None, layer: int) -> Array | None:
    """Phi of one layer: shared, or its own slice."""
    return phi[layer] if phi is not None and phi.ndim == 3 else phi


def next_logits(
    params: DecodeParams, x: Float[Array, "B D"], config: Qwen2Config
) -> Float[Array, "B V"]:
    """Final norm and output head, fp32."""
    x = qwen2.rms_norm(x, params.final_norm, config.rms_norm_eps)
    return jnp.einsum("bd,vd->bv", x, params.head, preferred_element_type=jnp.float32)


def admit(
    params: DecodeParams,
    prompts: Prompts,
    budgets: Int[Array, "B"],
    rows: Int[Array, "B"],
    *,
    config: Qwen2Config,
    length: int,
    max_new: int,
    phi: Float[Array, "B D"] | Float[Array, "L B D"] | None = None,
    conditioning: ConditioningConfig | None = None,
    implementation: attention.Implementation = "xla",
) -> DecodeState:
    """Prefills prompts and returns rows ready to decode.

    Args:
      params: decoding parameters.
      prompts: right-padded prompts.
      budgets: thinking tokens each row may sample, 0..max_new.
      rows: global row ids.
      config: model shape.
      length: cache positions, at least prompt width + max_new.
      max_new: width of the log-probability buffer.
      phi: budget embedding, explicit; None for the plain model.
      conditioning: how phi joins the stream.
      implementation: attention of the prefill.

    Returns:
      Rows that hold the logits of their first thinking token.
    """
    chex.assert_rank([prompts.tokens, budgets, rows], [2, 1, 1])
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
        pad = ((0, 0), (0, length - p), (0, 0), (0, 0))
        return out, LayerCache(jnp.pad(k, pad), jnp.pad(v, pad))

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
    zeros = jnp.zeros(b, jnp.int32)
    return DecodeState(
        cache=tuple(cache),
        logits=next_logits(params, last[:, 0], config),
        tokens=jnp.pad(prompts.tokens, ((0, 0), (0, length - p))).astype(jnp.int32),
        prompt_lengths=prompts.lengths.astype(jnp.int32),
        sampled=zeros,
        budgets=budgets.astype(jnp.int32),
        matched=zeros,
        tag_start=zeros,
        close=jnp.full(b, CLOSED_BY_BUDGET, jnp.int32),
        ended=budgets <= 0,
        logprobs=jnp.zeros((b, max_new), jnp.float32),
        rows=rows.astype(jnp.int32),
        phi=phi,
    )


def feed(
    params: DecodeParams,
    tokens: Int[Array, "B"],
    positions: Int[Array, "B"],
    cache: tuple[LayerCache, ...],
    *,
    config: Qwen2Config,
    window: int,
    phi: Float[Array, "B D"] | Float[Array, "L B D"] | None = None,
    conditioning: ConditioningConfig | None = None,
) -> tuple[Float[Array, "B V"], tuple[LayerCache, ...]]:
    """Runs one token per row through the model against its cache.

    Args:
      params: decoding parameters.
      tokens: one id per row.
      positions: where each token stands.
      cache: keys and values of earlier positions; extended in place.
      config: model shape.
      window: only the first `window` cache positions are read (static; must cover `positions`).
      phi: budget embedding.
      conditioning: how phi joins the stream.

    Returns:
      Logits of the next token (fp32) and the cache with this token in it.
    """
    x = params.embed[tokens][:, None]
    by = qwen2.rotation(positions[:, None], head_dim=config.head_dim, theta=config.rope_theta)
    visible = (jnp.arange(window) <= positions[:, None])[:, None]
    written = []
    for index, layer in enumerate(params.layers):

        def attend(q: Array, k: Array, v: Array, index: int = index) -> tuple[Array, LayerCache]:
            entry = kv_cache.write(cache[index], k, v, positions)
            seen = attention.partial_attention(q, entry.k[:, :window], entry.v[:, :window], visible)
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
    how: Sampler,
    window: int,
    conditioning: ConditioningConfig | None = None,
    truncated: bool = False,
) -> DecodeState:
    """Samples one token for every live row and feeds it; ended rows only keep the shapes.

    The budget rule: a row that has sampled b tokens without completing the closing tag is cut there
    (CLOSED_BY_BUDGET, thinking == b). A tag that completes, at the b-th token too, closes it.
    """
    keys = row_keys(key, state.rows, state.sampled, 0)
    token, logprob = draw(keys, state.logits, how=how, legal=rules.legal, truncated=truncated)

    live = ~state.ended
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
        window=window,
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
        ended=state.ended | by_tag | by_eos | (sampled >= state.budgets),
        logprobs=logprobs,
    )


@functools.partial(
    jax.jit,
    static_argnames=("config", "window", "num_steps", "conditioning", "truncated"),
    donate_argnames=("state",),
)
def decode_chunk(
    params: DecodeParams,
    state: DecodeState,
    key: Array,
    rules: DecodeRules,
    how: Sampler,
    *,
    config: Qwen2Config,
    window: int,
    num_steps: int,
    conditioning: ConditioningConfig | None = None,
    truncated: bool = False,
) -> DecodeState:
    """`num_steps` steps of every row; a trip count known at compile time never waits for the host.

    Args:
      params: decoding parameters.
      state: rows in flight (donated).
      key: key of the call; tokens depend on (key, row id, position) alone.
      rules: vocabulary facts.
      how: temperature and truncation.
      config: model shape.
      window: cache positions read; must cover every position reached in this chunk.
      num_steps: steps.
      conditioning: how phi joins the stream.
      truncated: apply top-k/top-p.
    """
    advance = functools.partial(
        step,
        params,
        key=key,
        config=config,
        rules=rules,
        how=how,
        window=window,
        conditioning=conditioning,
        truncated=truncated,
    )
    return jax.lax.fori_loop(0, num_steps, lambda _, s: advance(s), state)


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
