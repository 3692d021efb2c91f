"""A tokenizer's chat template: a program that somebody else wrote, run for a limited time."""

import contextlib
import inspect
import signal
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import jinja2
import jinja2.meta

from bacr_jax.config.values import shown
from bacr_jax.errors import UserError, reason_of
from bacr_jax.prompts.formats import THINK_CLOSE, PromptFormat

# Two messages take a millisecond.
SECONDS = 2.0
# What a template may make of two messages.
MOST_CHARS = 1_000_000
# Asks the template of an exported folder for the base's, which it holds; others do not know it.
BASE = "base_template"
# Variables that are set here, or by the template of an exported folder, beside transformers' own.
_SET = ("messages", "enable_thinking", "budget", BASE)


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
    # Of tags that transformers adds to the language nothing can be told.
    with contextlib.suppress(jinja2.TemplateSyntaxError):
        language = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
        read = jinja2.meta.find_undeclared_variables(language.parse(tokenizer.get_chat_template()))
        if unread := [name for name in variables if name not in read]:
            where = f"data.template_variables.{shown(unread[0], quote=False)}"
            raise UserError(f"{where}: the chat template never reads it; leave it out")


def render(
    tokenizer: Any, style: PromptFormat, system: str, user: str, *, template: str | None = None
) -> str:
    """The text of a system and a user message in a format, up to where the answer begins.

    Args:
      system: empty: there is none.
      template: instead of the tokenizer's own.
    """
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": user})
    try:
        with _limited():
            content = tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=True,
                chat_template=template,
                # Where a template can leave thinking out (Qwen3's), whether it is to come.
                enable_thinking=style.think_close == THINK_CLOSE,
                **{**style.variables, BASE: True},
            )
        if len(content) > MOST_CHARS:
            raise ValueError(f"writes {len(content):,} characters")
    # It can be wrong, it can refuse (a system message, say), and it can ask for all memory.
    except Exception as error:
        raise UserError(
            "tokenizer: its chat template fails on a system and a user message "
            f"({reason_of(error)}); write the folder of an Instruct model"
        ) from None
    return str(content)


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """TimeoutError after `SECONDS` of processor time.

    They are of this process's own work, so that a busy machine ends nothing. Works in the main
    thread, where signals arrive; elsewhere nothing is limited. Code inside one call of a C function
    is not ended before it returns.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> NoReturn:
        raise TimeoutError(f"takes more than {SECONDS:g} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
