"""Sampled traces as HTML: budget, thinking with its cuts, answers and rewards."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from bacr_jax import rewards
from bacr_jax.config import Config
from bacr_jax.errors import UserError
from bacr_jax.runs.files import read_lines

# Steps that are shown, spread evenly from the first to the last.
_STEPS = 3


def _chosen(paths: Sequence[Path]) -> list[Path]:
    places = np.linspace(0, len(paths) - 1, min(_STEPS, len(paths)))
    return [paths[place] for place in places.round().astype(int)]


def _dense(outcomes: Sequence[float], config: Config) -> Float[np.ndarray, "M"] | None:
    """Rewards of the cuts, where the run trained on them."""
    if config.method != "bacr" or not config.reward.dense:
        return None
    return rewards.dense_reward(np.array(outcomes), coefficient=config.reward.coefficient)


def _thinking(trace: Mapping[str, Any]) -> str:
    segments = trace.get("segments")
    if segments is None:
        return html.escape(str(trace["thinking"]))
    *until, rest = [html.escape(str(segment)) for segment in segments]
    marks = [f"<span class=cut>cut {j}</span>" for j in range(1, len(until) + 1)]
    return "".join(text + mark for text, mark in zip(until, marks)) + rest


def _answers(trace: Mapping[str, Any], config: Config) -> str:
    outcomes = [float(r) for r in trace["outcomes"]]
    dense = _dense(outcomes, config)
    rows = []
    for j, (answer, outcome) in enumerate(zip(trace["answers"], outcomes)):
        colour = "right" if outcome > 0.5 else "wrong"
        reward = "" if dense is None else f", reward {dense[j]:+.2f}"
        rows.append(
            f"<div>cut {j + 1} at {int(trace['context'][j]):,} tokens: "
            f"<span class='text {colour}'>{html.escape(str(answer))}</span> "
            f"<span class=note>outcome {outcome:g}{reward}</span></div>\n"
        )
    return "".join(rows)


def _trace(trace: Mapping[str, Any], config: Config) -> str:
    closed = html.escape(str(trace["closed_by"]))
    return (
        f"<div class=trace><b>budget {int(trace['budget']):,}</b> <span class=note>"
        f"{int(trace['thinking_tokens']):,} thinking tokens, closed by {closed}</span>\n"
        f"<div class=text>{html.escape(str(trace['prompt']))}<b>{_thinking(trace)}</b></div>\n"
        f"{_answers(trace, config)}</div>\n"
    )


def traces_section(folder: Path, config: Config) -> str:
    """A few traces of the first, a middle and the last logged step.

    Args:
      folder: `rollouts/` of a run.
      config: of the run.

    Raises:
      UserError: a damaged file.
    """
    paths = sorted(folder.glob("*.jsonl"))
    if not paths:
        return ""
    parts = ["<h2>Traces</h2>\n"]
    for path in _chosen(paths):
        try:
            records = read_lines(path)
            if records:
                parts.append(f"<h3>step {int(records[0]['step']):,}</h3>\n")
            parts += [_trace(record, config) for record in records]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{path}: holds something else than traces; remove it") from None
    return "".join(parts)
