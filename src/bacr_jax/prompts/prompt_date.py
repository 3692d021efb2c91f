"""The date that chat templates may write: one for a run, whenever it is resumed or evaluated."""

import dataclasses
from pathlib import Path

from bacr_jax import documents
from bacr_jax.config import Config
from bacr_jax.config.derived import own_tokens
from bacr_jax.prompts.chat_template import today

# Files of a tokenizer that can hold chat templates, and the function that gives them the date.
_FILES = ("tokenizer_config.json", "chat_template.jinja", "chat_template.json")
_FUNCTION = b"strftime_now"


def reads_date(folder: Path) -> bool:
    """True if a chat template of a tokenizer's folder asks for the date."""
    for name in _FILES:
        try:
            content = documents.read_file(folder / name)
        # The reader of the tokenizer says what is wrong with a file.
        except (OSError, ValueError):
            continue
        if _FUNCTION in content:
            return True
    return False


def with_prompt_date(config: Config, begun: Config | None = None, recorded: str = "") -> Config:
    """Returns the config with the date of its prompts, if its chat template asks for one.

    A date that is in the config stays.

    Args:
      begun: config of the run to go on with, whose date is taken; None: a new run.
      recorded: date of the evaluation to go on with; empty: a new one.
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
