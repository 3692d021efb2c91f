"""Reads the sampling settings that a model's publisher recommends in generation_config.json.

Exports copy them, and `bacr generate` and `bacr serve` use them as defaults, both only for models
that were trained to think (`PromptFormat.is_native`).
"""

import math
from pathlib import Path
from typing import Any

from bacr_jax.config.fields import SMALLEST_TEMPERATURE
from bacr_jax.config.values import shown
from bacr_jax.errors import UserError
from bacr_jax.model.hf.hf_config import read_json

# Valid values of each setting, for error messages.
_VALID = {
    "temperature": f"a number from {SMALLEST_TEMPERATURE:g}",
    "top_p": "a number above 0 and at most 1",
    "top_k": "a whole number of at least 0",
}


def read_sampling(folder: Path) -> dict[str, Any]:
    """Returns the entries of a folder's generation_config.json that describe how it is sampled.

    Returns:
      `do_sample`, which is True, and those of `temperature`, `top_p` and `top_k` that the file
      contains. Empty if the file is missing or does not enable sampling.

    Raises:
      UserError: if the file is not a JSON object, or a setting is not valid.
    """
    file = folder / "generation_config.json"
    if not file.is_file():
        return {}
    raw = read_json(file)
    if raw.get("do_sample") is not True:
        return {}
    sampling: dict[str, Any] = {"do_sample": True}
    for key, valid in _VALID.items():
        value = raw.get(key)
        if value is None:
            continue
        if not _is_valid(key, value):
            raise UserError(f"{file}: `{key}` is {shown(value)}, which is not valid; use {valid}")
        sampling[key] = value
    return sampling


def _is_valid(key: str, value: Any) -> bool:
    """True if a sampling setting has a valid type and value."""
    if key == "top_k":
        return type(value) is int and value >= 0
    if type(value) not in (int, float) or not math.isfinite(value):
        return False
    return value >= SMALLEST_TEMPERATURE if key == "temperature" else 0 < value <= 1
