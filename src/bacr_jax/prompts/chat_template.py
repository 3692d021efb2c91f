"""Renders a tokenizer's chat template in a limited process, because it is an untrusted program."""

import datetime
import functools
import inspect
import json
from collections.abc import Mapping
from typing import Any

from bacr_jax.config.values import shown
from bacr_jax.errors import UserError
from bacr_jax.prompts.formats import THINK_CLOSE, PromptFormat
from bacr_jax.prompts.limited import Failed, shared_process

# Limits of processor time (s) and new memory (bytes) of one rendering. Two messages take a
# millisecond.
SECONDS = 2.0
MEMORY = 1 << 30
# Largest number of characters that a template may write for two messages.
MOST_CHARS = 1_000_000
# Variable that makes the template of an exported folder render the base's template, which it
# contains. Other templates ignore it.
BASE = "base_template"
# Variables set by this module or by the template of an exported folder, in addition to
# transformers' variables.
_SET = ("messages", "enable_thinking", "budget", "strftime_now", BASE)
# Replaces an answer while its template is rendered: a private-use character.
_ANSWER = "\ue003"


def template_of(tokenizer: Any) -> str:
    """Returns the text of a tokenizer's chat template.

    A tokenizer has one template, or several with names, of which `default` is used.

    Raises:
      UserError: the tokenizer has several templates without a default, or the template is not a
        text.
    """
    templates = getattr(tokenizer, "chat_template", None)
    if isinstance(templates, Mapping):
        if "default" not in templates:
            names = ", ".join(shown(name, quote=False) for name in templates)
            raise UserError(
                f"tokenizer: has several chat templates ({names}) and none is called default; name "
                "one of them default in its tokenizer_config.json"
            )
        templates = templates["default"]
    if not isinstance(templates, str):
        raise UserError(
            f"tokenizer: its chat template is {shown(templates)}, not a text; write the folder of "
            "an Instruct model"
        )
    return templates


def check_variables(tokenizer: Any, variables: Mapping[str, Any]) -> None:
    """Checks the variables of a chat template in the config.

    Raises:
      UserError: a variable is set by another setting, or the template never reads it.
    """
    for name in variables:
        where = f"data.template_variables.{shown(name, quote=False)}"
        if name == "enable_thinking":
            raise UserError(
                f"{where}: the prompt format decides whether thinking follows; leave it out, and "
                "write data.prompt_format=native for thinking, boxed for none"
            )
        if name in _SET or name in inspect.signature(tokenizer.apply_chat_template).parameters:
            raise UserError(f"{where}: is set for every prompt; leave it out")
    if not variables:
        return
    try:
        read = _variables_read(template_of(tokenizer))
    except Failed as error:
        raise _failing(str(error)) from None
    unread = [name for name in variables if read is not None and name not in read]
    if unread:
        where = f"data.template_variables.{shown(unread[0], quote=False)}"
        raise UserError(f"{where}: the chat template never reads it; leave it out")


@functools.lru_cache(maxsize=64)
def _variables_read(template: str) -> list[str] | None:
    """Returns the names that a template reads; None if it has tags of transformers."""
    process = shared_process()
    names: list[str] | None = process.ask(
        "read_variables", seconds=SECONDS, memory=MEMORY, template=template
    )
    return names


def today() -> str:
    """Returns today's date in UTC, as YYYY-MM-DD."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def render(
    tokenizer: Any,
    style: PromptFormat,
    system: str,
    user: str,
    *,
    answer: str = "",
    template: str | None = None,
) -> str:
    """Renders a system and a user message in a format, up to the beginning of the answer.

    If the template writes a date, it is the format's, or today's if the format has none.

    Args:
      system: text of the system message; empty for none.
      user: text of the user's message.
      answer: text of a third message, the answer; empty for none.
      template: text of the template; None for the tokenizer's.

    Raises:
      UserError: the template fails or exceeds a limit.
    """
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": user})
    if answer:
        messages.append({"role": "assistant", "content": answer})
    # For templates that can omit thinking, such as Qwen3's.
    thinks = style.think_close == THINK_CLOSE
    special = tokenizer.special_tokens_map
    variables = {**special, "enable_thinking": thinks, **style.variables, BASE: True}
    request = {
        "template": template_of(tokenizer) if template is None else template,
        "messages": messages,
        "add_generation_prompt": not answer,
        "variables": variables,
        "date": style.date or today(),
        "most_chars": MOST_CHARS,
    }
    try:
        return _rendered(json.dumps(request, default=str))
    # A template can have errors, can refuse a message (a system message, for example), and can
    # exceed the memory limit.
    except Failed as error:
        raise _failing(str(error)) from None


@functools.lru_cache(maxsize=256)
def _rendered(request: str) -> str:
    """Returns the text for a request in JSON."""
    process = shared_process()
    return str(process.ask("render", seconds=SECONDS, memory=MEMORY, **json.loads(request)))


def _failing(reason: str) -> UserError:
    """Builds the error for a template that can't be rendered."""
    return UserError(
        "tokenizer: its chat template fails on a system and a user message "
        f"({reason}); write the folder of an Instruct model"
    )


def turn_end(tokenizer: Any, style: PromptFormat) -> str:
    """Returns the token with which the chat template ends an answer.

    The result is empty if the template writes no token there or refuses an answer.
    """
    try:
        text = render(tokenizer, style, style.system, "\ue000", answer=_ANSWER)
    except UserError:
        return ""
    _, answer, after = text.rpartition(_ANSWER)
    if not answer:
        return ""
    after = after.lstrip()
    ends = []
    for token in tokenizer.added_tokens_decoder.values():
        if token.content.strip() and after.startswith(token.content):
            ends.append(token.content)
    return max(ends, key=len, default="")
