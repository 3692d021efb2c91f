"""What a folder says of its prompts and answers, so that a server need not guess.

Section `thinking` of config.json holds the prompt format, the tokens that are forced, never sampled
or end something, the stop strings as tables over tokens, and the lengths of training.
"""

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.config.derived import LARGEST, cap
from bacr_jax.config.values import Misfit, convert, shown
from bacr_jax.errors import UserError
from bacr_jax.prompts.encoding import allowed_tokens, encode_text, eos_ids, line_breaks
from bacr_jax.prompts.formats import PromptFormat
from bacr_jax.prompts.stop_strings import compile_stop_string

# Keys of the section and the settings of a run that they are.
SETTINGS = {
    "answer_tokens": "rollout.answer_tokens",
    "prompt_tokens": "data.max_prompt_tokens",
    "min": "budget.min",
    "max": "budget.max",
    "cap": "budget.cap",
    "grace": "budget.grace",
}


def describe(config: Config, tokenizer: Any, style: PromptFormat, rows: int) -> dict[str, Any]:
    """The section `thinking` of a policy; docs/serving.md says what its keys mean."""
    allowed = allowed_tokens(tokenizer, style, rows)
    settings = config_io.flatten(config)
    # Most chat templates write no date.
    prompt_format = {k: v for k, v in dataclasses.asdict(style).items() if k != "date" or v}
    found: dict[str, Any] = {
        "prompt_format": prompt_format,
        "closing_ids": encode_text(tokenizer, style.forced_suffix).tolist(),
        "answer_ids": encode_text(tokenizer, style.natural_suffix).tolist(),
        "end_ids": list(eos_ids(tokenizer, style)),
        "never_sampled": ranges(np.flatnonzero(~allowed)),
        "think_close": _stop(tokenizer, style.think_close, rows),
        "answer_close": _stop(tokenizer, style.answer_close, rows),
        **{name: settings[key] for name, key in SETTINGS.items()},
        "cap": cap(config),
        "evaluated": list(config.eval.budgets),
    }
    if config.budget.grace:
        found["line_breaks"] = ranges(np.flatnonzero(line_breaks(tokenizer, rows)))
    return found


def ranges(ids: Sequence[int] | np.ndarray) -> str:
    """Rising ids as text: 3, 7, 8 and 9 are `3 7-9`."""
    numbers = np.asarray(ids, np.int64)
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1) if len(numbers) else []
    return " ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _stop(tokenizer: Any, text: str, rows: int) -> dict[str, Any]:
    """A stop string and the jumps of its table; an empty one never comes."""
    table = np.asarray(compile_stop_string(tokenizer, text, vocab_size=rows).next_state)
    return {"string": text, "states": len(table), "jumps": jumps(table)}


def jumps(next_state: np.ndarray) -> list[tuple[int | None, int, str]]:
    """Where tokens lead: (state, next state, ids), for what leads elsewhere than to state 0.

    Jumps of any state come first (None), which are those of state 0; then those in which one
    differs. The last state is absorbing and left out.
    """
    first = next_state[0]
    found: list[tuple[int | None, int, str]] = [
        (None, int(to), ranges(np.flatnonzero(first == to))) for to in np.unique(first) if to
    ]
    for state, row in enumerate(next_state[1:-1], 1):
        differs = row != first
        for to in np.unique(row[differs]):
            found.append((state, int(to), ranges(np.flatnonzero(differs & (row == to)))))
    return found


def read_style(raw: Mapping[str, Any], where: Path) -> PromptFormat:
    """The prompt format of a section; UserError: damaged, or written by another version.

    `where`: its file, for refusals.
    """
    inside = raw.get("prompt_format")
    hints = typing.get_type_hints(PromptFormat)
    if not isinstance(inside, dict) or set(inside) - set(hints) or "name" not in inside:
        raise _damaged(where, "prompt_format", inside)
    values: dict[str, Any] = {}
    for name, value in inside.items():
        try:
            values[name] = convert(hints[name], value)
        except Misfit:
            raise _damaged(where, f"prompt_format.{name}", value) from None
    return PromptFormat(**values)


def read_settings(raw: Mapping[str, Any], where: Path) -> list[str]:
    """The lengths of a section as config settings, `key=value` each; UserError as `read_style`."""
    found = []
    for name, key in SETTINGS.items():
        if type(raw.get(name)) is not int or not 0 <= raw[name] <= LARGEST:
            raise _damaged(where, name, raw.get(name))
        found.append(f"{key}={raw[name]}")
    return found


def _damaged(where: Path, name: str, value: Any) -> UserError:
    return UserError(f"{where}: thinking.{name} is {shown(value)}; export the folder again")
