"""One call from prompts and budgets to trunks and branches, in waves of a fixed number of rows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bacr_jax.config import ConditioningConfig
from bacr_jax.model import attention
from bacr_jax.model.kv_cache import DecodeParams
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.rollout import branches as branching
from bacr_jax.rollout import decode
from bacr_jax.rollout.rules import DecodeRules
from bacr_jax.rollout.sampling import Sampler
from bacr_jax.types import Branches, Prompts, Trunks

_admit = jax.jit(
    decode.admit,
    static_argnames=("config", "length", "max_new", "conditioning", "implementation"),
)
_open_branches = jax.jit(
    branching.open_branches, static_argnames=("config", "answer_tokens", "dtype")
)


@dataclass(frozen=True)
class RolloutSpec:
    """Everything about a rollout that fixes a compiled shape.

    Attributes:
      config: model shape.
      conditioning: how phi joins the stream; None for the plain model.
      max_thinking: largest budget, width of the thinking buffers.
      answer_tokens: most sampled tokens per answer.
      slots: rows decoded together.
      chunk: tokens per call of the inner loop.
      windows: lengths of cache that chunks may read; more of them read less and compile longer.
      dtype: compute type.
      implementation: attention of the prefill.
    """

    config: Qwen2Config
    conditioning: ConditioningConfig | None
    max_thinking: int
    answer_tokens: int
    slots: int
    chunk: int = 16
    windows: int = 4
    dtype: Any = jnp.float32
    implementation: attention.Implementation = "xla"


@dataclass
class Rollout:
    """Result of `generate`, on the host, in the order of the prompts.

    Attributes:
      trunks: sampled thinking.
      branches: sampled answers, one per cut.
      counters: decode work: `row_steps` run, `useful_steps` of them on live rows, `tokens` sampled
        (thinking and distinct answers), `prefill_tokens`.
    """

    trunks: Trunks
    branches: Branches
    counters: dict[str, int]


def window_for(spec: RolloutSpec, prompt_width: int, sampled: int) -> int:
    """Cache positions to read while the longest row has at most `sampled` sampled tokens."""
    bucket = -(-spec.max_thinking // spec.windows)
    reach = -(-min(sampled, spec.max_thinking) // bucket) * bucket
    return prompt_width + min(reach, spec.max_thinking)


def _windows(spec: RolloutSpec, prompt_width: int) -> list[int]:
    """Every window that `window_for` can give."""
    chunks = range(spec.chunk, spec.max_thinking + spec.chunk, spec.chunk)
    return sorted({window_for(spec, prompt_width, sampled) for sampled in chunks})


def precompile(
    params: DecodeParams,
    prompts: Prompts,
    num_cuts: int,
    *,
    spec: RolloutSpec,
    rules: DecodeRules,
    how: Sampler,
    phi_of: Callable[[jax.Array], jax.Array] | None = None,
    truncated: bool = False,
) -> None:
    """Runs every compiled form that `generate` can need once, whatever lengths come up later.

    Args:
      params: decoding parameters.
      prompts: any prompts of the width that will be used.
      num_cuts: M of the calls to come.
      spec: shapes.
      rules: vocabulary facts.
      how: temperature and truncation; only its types matter.
      phi_of: budget embedding; None for the plain model.
      truncated: apply top-k/top-p.
    """
    width = prompts.tokens.shape[1]
    budgets = np.zeros(spec.slots, np.int32)
    rows, cuts = budgets, np.zeros((spec.slots, num_cuts), np.int32)
    common = {"config": spec.config, "conditioning": spec.conditioning, "truncated": truncated}
    phi = None if phi_of is None else phi_of(jnp.asarray(budgets))
    state = _start(params, _take(prompts, np.zeros(1, int), spec.slots), budgets, rows, phi, spec)
    hung = _hang(decode.trunks_of(state), cuts, rows, rules, phi, spec)
    steps = min(spec.chunk, rules.bridge_length + spec.answer_tokens - 1)
    key = jax.random.key(0)
    for window in _windows(spec, width):
        state = decode.decode_chunk(
            params, state, key, rules, how, window=window, num_steps=spec.chunk, **common
        )
        hung = branching.branch_chunk(
            params,
            state.cache,
            hung,
            jnp.int32(0),
            key,
            rules,
            how,
            window=window,
            num_steps=steps,
            **common,
        )


def _start(
    params: DecodeParams,
    prompts: Prompts,
    budgets: np.ndarray,
    rows: np.ndarray,
    phi: jax.Array | None,
    spec: RolloutSpec,
) -> decode.DecodeState:
    """Prefills one wave."""
    state: decode.DecodeState = _admit(
        params,
        prompts,
        budgets,
        rows,
        config=spec.config,
        length=prompts.tokens.shape[1] + spec.max_thinking,
        max_new=spec.max_thinking,
        phi=phi,
        conditioning=spec.conditioning,
        implementation=spec.implementation,
    )
    return state


def _hang(
    trunks: Trunks,
    cuts: np.ndarray,
    rows: np.ndarray,
    rules: DecodeRules,
    phi: jax.Array | None,
    spec: RolloutSpec,
) -> branching.BranchState:
    """Opens the branches of one wave."""
    hung: branching.BranchState = _open_branches(
        trunks,
        cuts,
        rows,
        rules,
        config=spec.config,
        answer_tokens=spec.answer_tokens,
        dtype=spec.dtype,
        phi=phi,
    )
    return hung


def _take(prompts: Prompts, index: np.ndarray, slots: int) -> Prompts:
    """Rows `index` of the prompts, padded to `slots` rows that end at once."""
    pad = slots - len(index)
    rows = np.concatenate([index, np.repeat(index[:1], pad)])
    return jax.tree.map(lambda x: np.asarray(x)[rows], prompts)


def _first_rows(arrays: Any, count: int) -> Any:
    """The first `count` rows of every leaf, on the host."""
    return jax.tree.map(lambda x: np.asarray(x)[:count], arrays)


def generate(
    params: DecodeParams,
    prompts: Prompts,
    budgets: np.ndarray,
    cuts: np.ndarray,
    key: jax.Array,
    *,
    spec: RolloutSpec,
    rules: DecodeRules,
    how: Sampler,
    phi_of: Callable[[jax.Array], jax.Array] | None = None,
    rows: np.ndarray | None = None,
    truncated: bool = False,
    poll: Callable[[], None] | None = None,
) -> Rollout:
    """Samples thinking under budgets, then an answer at every cut.

    Rows with long budgets are decoded first and together; what a row says depends only on `key`,
    its row id and its own text.

    Args:
      params: decoding parameters.
      prompts: B right-padded prompts.
      budgets: thinking tokens per row, 0..spec.max_thinking.
      cuts: [B, M] thinking tokens kept at each cut.
      key: key of this call.
      spec: shapes.
      rules: vocabulary facts.
      how: temperature and truncation.
      phi_of: maps budgets [B] to the budget embedding; None for the plain model.
      rows: global row ids; 0..B-1 by default.
      truncated: apply top-k/top-p.
      poll: called between chunks, so that a caller can stop a long rollout by raising.
    """
    budgets = np.asarray(budgets, np.int32)
    cuts = np.asarray(cuts, np.int32)
    row_ids = np.arange(len(budgets)) if rows is None else rows
    row_ids = np.asarray(row_ids, np.int32)
    order = np.argsort(-budgets, kind="stable")
    width = prompts.tokens.shape[1]
    common = {"config": spec.config, "conditioning": spec.conditioning, "truncated": truncated}
    counters = {"row_steps": 0, "useful_steps": 0, "tokens": 0, "prefill_tokens": 0}
    waves: list[tuple[Trunks, Branches]] = []
    for start in range(0, len(order), spec.slots):
        index = order[start : start + spec.slots]
        pad = spec.slots - len(index)
        wave = _take(prompts, index, spec.slots)
        wave_budgets = np.pad(budgets[index], (0, pad))
        wave_cuts = np.pad(cuts[index], ((0, pad), (0, 0)))
        wave_rows = np.pad(row_ids[index], (0, pad), constant_values=-1)
        phi = None if phi_of is None else phi_of(jnp.asarray(wave_budgets))
        state = _start(params, wave, wave_budgets, wave_rows, phi, spec)
        done, most = 0, int(wave_budgets.max())
        while done < most and not bool(state.ended.all()):
            done += spec.chunk
            window = window_for(spec, width, done)
            state = decode.decode_chunk(
                params, state, key, rules, how, window=window, num_steps=spec.chunk, **common
            )
            counters["row_steps"] += spec.chunk * spec.slots
            if poll is not None:
                poll()
        trunks = decode.trunks_of(state)
        hung = _hang(trunks, wave_cuts, wave_rows, rules, phi, spec)
        window, steps = window_for(spec, width, done), rules.bridge_length + spec.answer_tokens - 1
        done = 0
        while done < steps and not bool(hung.ended.all()):
            now = min(spec.chunk, steps)
            hung = branching.branch_chunk(
                params,
                state.cache,
                hung,
                jnp.int32(done),
                key,
                rules,
                how,
                window=window,
                num_steps=now,
                **common,
            )
            done += now
            counters["row_steps"] += now * hung.sampled.size
            if poll is not None:
                poll()
        finished = (trunks, branching.branches_of(hung))
        waves.append(_first_rows(finished, len(index)))
    back = np.argsort(order, kind="stable")
    joined = jax.tree.map(lambda *parts: np.concatenate(parts)[back], *waves)
    trunks, answers = joined
    distinct = answers.source == np.arange(cuts.shape[1])
    counters["tokens"] = int(trunks.sampled.sum() + (answers.sampled * distinct).sum())
    counters["useful_steps"] = counters["tokens"]
    counters["prefill_tokens"] = int(np.asarray(prompts.lengths).sum())
    return Rollout(trunks, answers, counters)
