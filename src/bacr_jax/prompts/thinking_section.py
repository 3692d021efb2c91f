"""Writes and reads the section `thinking` of an exported model's config.json.

Inference servers read this section. It contains the prompt format, the tokens that are forced, the
tokens that are never sampled, the tokens that end a part of the response, the stop strings as
transition tables over tokens, and the lengths used in training.
"""

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bacr_jax.config.derived import LARGEST
from bacr_jax.config.settings import ResponseLimits
from bacr_jax.config.values import TypeMismatch, convert, shown
from bacr_jax.errors import UserError
from bacr_jax.prompts.encoding import allowed_tokens, encode_text, eos_ids, line_breaks
from bacr_jax.prompts.formats import PromptFormat
from bacr_jax.prompts.stop_strings import compile_stop_string

# Keys of the section that are copied from a run's settings, with the names of these settings.
SETTINGS = {
    "answer_tokens": "rollout.answer_tokens",
    "prompt_tokens": "data.max_prompt_tokens",
    "min": "budget.min",
    "max": "budget.max",
    "cap": "budget.cap",
    "grace": "budget.grace",
}


def describe(
    limits: ResponseLimits, tokenizer: Any, style: PromptFormat, rows: int
) -> dict[str, Any]:
    """Builds the section `thinking` of a policy. docs/serving.md describes its keys.

    Args:
      limits: lengths of the parts of a response.
      rows: number of rows of the model's embedding matrix.
    """
    allowed = allowed_tokens(tokenizer, style, rows)
    prompt_format = dataclasses.asdict(style)
    if not style.date:
        # Omitted if empty, because most chat templates do not contain a date.
        del prompt_format["date"]
    section: dict[str, Any] = {
        "prompt_format": prompt_format,
        "closing_ids": encode_text(tokenizer, style.forced_suffix).tolist(),
        "answer_ids": encode_text(tokenizer, style.natural_suffix).tolist(),
        "end_ids": list(eos_ids(tokenizer, style)),
        "never_sampled": ranges(np.flatnonzero(~allowed)),
        "think_close": _stop(tokenizer, style.think_close, rows),
        "answer_close": _stop(tokenizer, style.answer_close, rows),
        **{name: getattr(limits, name) for name in SETTINGS},
        "evaluated": list(limits.evaluated),
    }
    if limits.grace:
        section["line_breaks"] = ranges(np.flatnonzero(line_breaks(tokenizer, rows)))
    return section


def ranges(ids: Sequence[int] | np.ndarray) -> str:
    """Formats ids in ascending order as a text of ranges: 3, 7, 8 and 9 become `3 7-9`."""
    numbers = np.asarray(ids, np.int64)
    if not len(numbers):
        return ""
    gaps = np.flatnonzero(np.diff(numbers) > 1)
    texts = []
    for run in np.split(numbers, gaps + 1):
        texts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return " ".join(texts)


def _stop(tokenizer: Any, text: str, rows: int) -> dict[str, Any]:
    """Describes a stop string by its text, its number of states and its transitions."""
    table = np.asarray(compile_stop_string(tokenizer, text, vocab_size=rows).next_state)
    return {"string": text, "states": len(table), "jumps": jumps(table)}


def jumps(next_state: np.ndarray) -> list[tuple[int | None, int, str]]:
    """Lists the transitions of a stop string table as (state, next state, token ids).

    To save space, the list only contains transitions that differ from a default. It begins with the
    transitions of state 0 to other states, which are the default of all states. In these entries,
    the state is None. The last state is omitted, because the automaton never leaves it.
    """
    default_row = next_state[0]
    transitions: list[tuple[int | None, int, str]] = []
    for target in np.unique(default_row):
        if target:
            ids = np.flatnonzero(default_row == target)
            transitions.append((None, int(target), ranges(ids)))
    for state, row in enumerate(next_state[1:-1], 1):
        differs = row != default_row
        for target in np.unique(row[differs]):
            ids = np.flatnonzero(differs & (row == target))
            transitions.append((state, int(target), ranges(ids)))
    return transitions


def read_style(raw: Mapping[str, Any], where: Path) -> PromptFormat:
    """Parses the prompt format of a section.

    Args:
      raw: the section.
      where: path of its file, for error messages.

    Raises:
      UserError: If the format is incomplete or malformed.
    """
    fields = raw.get("prompt_format")
    hints = typing.get_type_hints(PromptFormat)
    # `describe` omits an empty date.
    if not isinstance(fields, dict) or {"date", *fields} != set(hints):
        raise _damaged(where, "prompt_format", fields)
    values: dict[str, Any] = {}
    for name, value in fields.items():
        try:
            values[name] = convert(hints[name], value)
        except TypeMismatch:
            raise _damaged(where, f"prompt_format.{name}", value) from None
    return PromptFormat(**values)


def read_settings(raw: Mapping[str, Any], where: Path) -> list[str]:
    """Parses the lengths in a section into config settings of the form `key=value`.

    Args:
      raw: the section.
      where: path of its file, for error messages.

    Raises:
      UserError: If a length is not an integer in the valid range.
    """
    settings = []
    for name, key in SETTINGS.items():
        value = raw.get(name)
        if type(value) is not int or not 0 <= value <= LARGEST:
            raise _damaged(where, name, value)
        settings.append(f"{key}={value}")
    return settings


def _damaged(where: Path, name: str, value: Any) -> UserError:
    """Builds the error for a key of the section that is missing or malformed."""
    return UserError(
        f"{where}: `thinking.{name}` is {shown(value)}, which is missing or not valid; run bacr "
        "export again"
    )
