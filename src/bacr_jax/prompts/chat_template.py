"""Renders a tokenizer's chat template, a program that somebody else wrote, in a limited process."""

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

# Processor time and new memory of one rendering; two messages take a millisecond.
SECONDS = 2.0
MEMORY = 1 << 30
# Most characters that a template may write for two messages.
MOST_CHARS = 1_000_000
# Asks the template of an exported folder for the base's, which it holds; others do not know it.
BASE = "base_template"
# Variables that are set here, or by the template of an exported folder, beside transformers' own.
_SET = ("messages", "enable_thinking", "budget", "strftime_now", BASE)
# Stands for an answer while its template is rendered: a private-use character.
_ANSWER = "\ue003"


def template_of(tokenizer: Any) -> str:
    """Returns the text of a tokenizer's chat template; UserError: it has several, and no default.

    A tokenizer has one text, or several by their names, of which `default` is used.
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
    """UserError: a variable that is set otherwise, or that the chat template never reads."""
    for name in variables:
        where = f"data.template_variables.{shown(name, quote=False)}"
        if name == "enable_thinking":
            raise UserError(
                f"{where}: the prompt format says whether thinking is to come; leave it out, and "
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
    """Renders a system and a user message in a format, up to where the answer begins.

    A template that writes the date writes that of the format, or today's.

    Args:
      system: empty: there is none.
      answer: text of a third message, the answer; empty: there is none.
      template: instead of the tokenizer's own.
    """
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": user})
    if answer:
        messages.append({"role": "assistant", "content": answer})
    # Where a template can leave thinking out (Qwen3's), whether it is to come.
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
    # A template can be wrong, it can refuse (a system message, say), and it can ask for all memory.
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

    Empty if it writes none there, or takes no answer.
    """
    try:
        text = render(tokenizer, style, style.system, "\ue000", answer=_ANSWER)
    except UserError:
        return ""
    _, found, after = text.rpartition(_ANSWER)
    added = [token.content for token in tokenizer.added_tokens_decoder.values()]
    ends = [token for token in added if after.lstrip().startswith(token) and token.strip()]
    return max(ends, key=len, default="") if found else ""
