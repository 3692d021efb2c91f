"""Renders chat templates in a resource-limited process, because they are untrusted code."""

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

# Limits for rendering one template: CPU time in seconds and additional memory in bytes. Rendering
# two messages usually takes about a millisecond.
SECONDS = 2.0
MEMORY = 1 << 30
# Maximum number of characters in a rendered template.
MOST_CHARS = 1_000_000
# Template variable that makes the template of an exported model render the base model's template,
# which is embedded in it. Other templates ignore the variable.
BASE = "base_template"
# Template variables that users cannot override. They are set by this module or by the template of
# an exported model, in addition to those set by transformers.
_SET = ("messages", "enable_thinking", "budget", "strftime_now", BASE)
# Placeholder for the answer while its template is rendered: a private-use character.
_ANSWER = "\ue003"


def template_of(tokenizer: Any) -> str:
    """Returns the text of a tokenizer's chat template.

    A tokenizer has either a single template or several named templates. In the latter case, the
    template named `default` is used.

    Raises:
      UserError: If none of several templates is named `default`, or the template is not a string.
    """
    templates = getattr(tokenizer, "chat_template", None)
    if isinstance(templates, Mapping):
        if "default" not in templates:
            names = ", ".join(shown(name, quote=False) for name in templates)
            raise UserError(
                f"tokenizer: it has several chat templates ({names}), but none with the name "
                "`default`; give one of them this name in its tokenizer_config.json"
            )
        templates = templates["default"]
    if not isinstance(templates, str):
        raise UserError(
            f"tokenizer: the chat template is {shown(templates)} instead of a string; use the "
            "folder of an Instruct model"
        )
    return templates


def check_variables(tokenizer: Any, variables: Mapping[str, Any]) -> None:
    """Validates the chat template variables in the config.

    Args:
      variables: values of the variables, keyed by name.

    Raises:
      UserError: If another setting controls a variable, or the template does not use it.
    """
    for name in variables:
        where = f"data.template_variables.{shown(name, quote=False)}"
        if name == "enable_thinking":
            raise UserError(
                f"{where}: this variable switches thinking on or off, which the prompt format "
                "already decides; leave the variable out, and set data.prompt_format=native for "
                "thinking, or boxed for no thinking"
            )
        if name in _SET or name in inspect.signature(tokenizer.apply_chat_template).parameters:
            raise UserError(
                f"{where}: bacr sets this variable for every prompt, so it can't be set here; "
                "leave it out"
            )
    if not variables:
        return
    try:
        read = _variables_read(template_of(tokenizer))
    except Failed as error:
        raise _failing(str(error)) from None
    unread = [name for name in variables if read is not None and name not in read]
    if unread:
        where = f"data.template_variables.{shown(unread[0], quote=False)}"
        raise UserError(
            f"{where}: the chat template of the tokenizer does not use this variable; leave it out"
        )


@functools.lru_cache(maxsize=64)
def _variables_read(template: str) -> list[str] | None:
    """Returns the names of the variables that a template reads.

    Returns None if the template uses tags that only transformers supports, and not plain Jinja.
    """
    process = shared_process()
    names: list[str] | None = process.ask(
        "read_variables", seconds=SECONDS, memory=MEMORY, template=template
    )
    return names


def today() -> str:
    """Returns the current date in UTC, as YYYY-MM-DD."""
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
    """Renders messages with a chat template. The text ends where the assistant would continue.

    If the template contains the current date, the date of the format is used, or today's date if
    the format does not specify one.

    Args:
      system: system message, or an empty string to omit it.
      user: user message.
      answer: assistant message after which the text ends, or an empty string to omit it.
      template: template text, or None for the tokenizer's template.

    Raises:
      UserError: If the template raises an error or exceeds a limit.
    """
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": user})
    if answer:
        messages.append({"role": "assistant", "content": answer})
    # For templates in which thinking can be disabled, such as the template of Qwen3.
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
    # A template can contain errors, reject a message (such as a system message) or exceed the
    # memory limit.
    except Failed as error:
        raise _failing(str(error)) from None


@functools.lru_cache(maxsize=256)
def _rendered(request: str) -> str:
    """Renders a chat template in a process with limits on time and memory. Results are cached."""
    process = shared_process()
    return str(process.ask("render", seconds=SECONDS, memory=MEMORY, **json.loads(request)))


def _failing(reason: str) -> UserError:
    """Builds the error for a template that cannot be rendered."""
    return UserError(
        "tokenizer: the chat template can't be applied to a system and a user message "
        f"({reason}); use the folder of an Instruct model"
    )


def turn_end(tokenizer: Any, style: PromptFormat) -> str:
    """Returns the token with which the chat template ends an assistant message.

    Returns an empty string if the template does not write a token after the message, or rejects
    assistant messages.
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
