"""Reads questions in chat form, a list of messages with role and content, from rows of tables.

`math_sets` uses this module to parse the question column. A question is a single user message,
optionally after a system message. Conversations with several turns are not supported.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from bacr_jax.config import DataConfig
from bacr_jax.config.values import shown
from bacr_jax.errors import UserError

# Reason to leave out a row whose messages are not a single turn of a user.
NO_SINGLE_TURN = "messages other than one user turn"


class ChatQuestion(NamedTuple):
    """A question in chat form.

    Attributes:
      text: content of the user's message.
      system: content of the system message, or "" if there is none.
    """

    text: str
    system: str


def is_chat(value: Any) -> bool:
    """True if the value of a question column is a list of messages."""
    return isinstance(value, list) and all(
        isinstance(message, dict) and "role" in message for message in value
    )


def single_turn(messages: list[dict[str, Any]]) -> ChatQuestion | None:
    """Returns the question in a list of messages, or None if it is not a single user turn.

    Args:
      messages: messages with the fields role and content.
    """
    system: Any = ""
    if messages and messages[0]["role"] == "system":
        system = messages[0].get("content")
        messages = messages[1:]
    if len(messages) != 1 or messages[0]["role"] != "user":
        return None
    text = messages[0].get("content")
    if not isinstance(text, str) or not isinstance(system, str):
        return None
    return ChatQuestion(text, system)


def check_system(messages: Iterable[str], config: DataConfig, where: str) -> None:
    """Rejects questions with system messages unless `data.system_prompt` is set.

    A run uses the same system message for all questions, which `data.system_prompt` specifies.

    Args:
      messages: system message of each question, or an empty string for none.
      where: name of the set in the error message.

    Raises:
      UserError: a question has a system message and `data.system_prompt` is null.
    """
    distinct = list(dict.fromkeys(message for message in messages if message.strip()))
    if not distinct or config.system_prompt is not None:
        return
    if len(distinct) > 1:
        raise UserError(
            f"{where}: the prompts of this data set have {len(distinct):,} different system "
            "messages, but a run uses a single one; set data.system_prompt to one text for all, "
            "or \"data.system_prompt=''\" for none"
        )
    raise UserError(
        f"{where}: the prompts of this data set have the system message {shown(distinct[0])}; set "
        "data.system_prompt to this text, or \"data.system_prompt=''\" for none"
    )
