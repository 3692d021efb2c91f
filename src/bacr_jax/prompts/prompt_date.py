"""Fixes the date in chat templates, so that a resumed or later evaluated run uses the same date."""

import dataclasses
from pathlib import Path

from bacr_jax import files
from bacr_jax.config import DataConfig
from bacr_jax.config.derived import builtin_vocab
from bacr_jax.prompts.chat_template import today

# Tokenizer files that can contain chat templates, and the template function that returns the date.
_FILES = ("tokenizer_config.json", "chat_template.jinja", "chat_template.json")
_FUNCTION = b"strftime_now"


def reads_date(folder: Path) -> bool:
    """True if a chat template in a tokenizer's folder uses the current date."""
    for name in _FILES:
        try:
            content = files.read_file(folder / name)
        # Errors in these files are reported when the tokenizer is loaded.
        except (OSError, ValueError):
            continue
        if _FUNCTION in content:
            return True
    return False


def with_prompt_date(
    data: DataConfig, folder: str | None, begun: DataConfig | None = None, recorded: str = ""
) -> DataConfig:
    """Sets the date of the prompts in the data settings if the chat template uses the current date.

    A date that is already set is not changed.

    Args:
      folder: folder of the tokenizer, or None.
      begun: data settings of the run that is resumed, whose date is used. None for a new run.
      recorded: date of the evaluation that is resumed. Empty for a new evaluation.
    """
    if data.prompt_date is not None:
        return data
    if begun is not None:
        date = begun.prompt_date
    elif builtin_vocab(data) is None and folder is not None and reads_date(Path(folder)):
        date = recorded or today()
    else:
        date = None
    return dataclasses.replace(data, prompt_date=date)
