"""Fixes the date in chat templates, so that a resumed or later evaluated run uses the same date."""

import dataclasses
from pathlib import Path

from bacr_jax import files
from bacr_jax.config import Config
from bacr_jax.config.resolve import own_tokens
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


def with_prompt_date(config: Config, begun: Config | None = None, recorded: str = "") -> Config:
    """Sets the date of the prompts in a config if the chat template uses the current date.

    A date that is already set in the config is not changed.

    Args:
      begun: config of the run that is resumed, whose date is used. None for a new run.
      recorded: date of the evaluation that is resumed. Empty for a new evaluation.
    """
    if config.data.prompt_date is not None:
        return config
    folder = config.model.tokenizer or config.model.path
    if begun is not None:
        date = begun.data.prompt_date
    elif own_tokens(config.data) is None and folder is not None and reads_date(Path(folder)):
        date = recorded or today()
    else:
        date = None
    return dataclasses.replace(config, data=dataclasses.replace(config.data, prompt_date=date))
