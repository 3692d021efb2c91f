"""Several independent answers at every cut, by asking again from the text up to the cut.

`rollout.generate` gives one answer a cut, and one for all cuts at the same place. AnytimeReasoner
trains on several at each. Every further answer is a row whose prompt is the trunk up to the cut and
whose budget is 0, so that it starts with the bridge.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Int

from bacr_jax.asked import added
from bacr_jax.model.kv_cache import DecodeParams
from bacr_jax.rollout.engine import RolloutSpec
from bacr_jax.rollout.generate import Rollout, generate, precompile
from bacr_jax.rollout.rules import DecodeRules
from bacr_jax.rollout.sampling import Sampler
from bacr_jax.types import CLOSED_BY_TAG, Branches, Prompts, Trunks


def _settings(spec: RolloutSpec) -> RolloutSpec:
    return dataclasses.replace(spec, max_thinking=1)


def _bridges(rules: DecodeRules) -> tuple[tuple[bool, DecodeRules], ...]:
    """Rules whose forced bridge is the one of a cut trace, and of a trace that closed itself."""
    return (False, rules), (True, dataclasses.replace(rules, bridge_forced=rules.bridge_natural))


def _whole(trunks: Trunks, branches: Branches) -> Bool[np.ndarray, "B M"]:
    """Cuts that keep all of a trace that the model closed."""
    end = np.asarray(trunks.prompt_lengths) + np.asarray(trunks.sampled)
    closed = np.asarray(trunks.close) == CLOSED_BY_TAG
    return closed[:, None] & (np.asarray(branches.context) == end[:, None])


def precompile_more(
    params: DecodeParams,
    prompts: Prompts,
    *,
    spec: RolloutSpec,
    rules: DecodeRules,
    how: Sampler,
) -> None:
    """Runs every compiled form of `more_answers` once.

    Args:
      params: decoding parameters.
      prompts: any prompts of the width that will be used.
      spec: shapes of the rollout whose cuts will be asked.
      rules: vocabulary facts.
      how: temperature.
    """
    row = jax.tree.map(lambda x: np.asarray(x)[:1], prompts)
    wide = dataclasses.replace(row, tokens=np.pad(row.tokens, ((0, 0), (0, spec.max_thinking))))
    for _, bridge in _bridges(rules):
        precompile(params, wide, 1, spec=_settings(spec), rules=bridge, how=how)


def more_answers(
    params: DecodeParams,
    rollout: Rollout,
    key: jax.Array,
    *,
    answers: int,
    spec: RolloutSpec,
    rules: DecodeRules,
    how: Sampler,
    poll: Callable[[], None] | None = None,
) -> Rollout:
    """A rollout with A independent answers at each of its M cuts.

    Cuts that shared one answer get draws of their own too, as published.

    Args:
      params: decoding parameters of the plain model.
      rollout: with one answer a cut.
      key: of this call.
      answers: A.
      spec: shapes of the rollout.
      rules: vocabulary facts.
      how: temperature and truncation.
      poll: called between chunks.

    Returns:
      The rollout with branch m A + a the a-th answer at cut m; counters include the new tokens.
    """
    trunks, first = rollout.trunks, jax.tree.map(np.asarray, rollout.branches)
    b, m = first.sampled.shape
    spread = jax.tree.map(lambda x: np.repeat(x, answers, axis=1), first)
    own = first.source == np.arange(m)
    asked = np.ones((b, m, answers), bool)
    asked[:, :, 0] = ~own
    asked = asked.reshape(b, m * answers)
    natural = np.repeat(_whole(trunks, first), answers, axis=1)
    counters = [rollout.counters]
    for whole, bridge in _bridges(rules):
        row, branch = np.nonzero(asked & (natural == whole))
        if not len(row):
            continue
        found = generate(
            params,
            _prefixes(trunks, spread.context[row, branch], row),
            np.zeros(len(row), np.int32),
            np.zeros((len(row), 1), np.int32),
            key,
            spec=_settings(spec),
            rules=bridge,
            how=how,
            rows=row * m * answers + branch,
            poll=poll,
        )
        _place(spread, found.branches, row, branch)
        counters.append(found.counters)
    everyone = np.broadcast_to(np.arange(m * answers), (b, m * answers))
    return Rollout(trunks, dataclasses.replace(spread, source=everyone), added(counters))


def _prefixes(trunks: Trunks, context: Int[np.ndarray, "n"], row: np.ndarray) -> Prompts:
    """Text of the given rows up to `context`, as prompts."""
    whole = np.asarray(trunks.tokens)[row]
    tokens: Any = np.where(np.arange(whole.shape[1]) < context[:, None], whole, 0)
    zeros: Any = np.zeros(len(row), np.int32)
    lengths: Any = context.astype(np.int32)
    return Prompts(tokens, lengths, zeros, lengths)


def _place(into: Branches, found: Branches, row: np.ndarray, branch: np.ndarray) -> None:
    """Writes new answers over the copies that stand at their places."""
    width = found.tokens.shape[-1]
    tokens: Any = into.tokens
    tokens[row, branch, :] = 0
    tokens[row, branch, :width] = found.tokens[:, 0]
    for name in ("sampled", "finished", "logprobs", "bridge"):
        getattr(into, name)[row, branch] = getattr(found, name)[:, 0]
