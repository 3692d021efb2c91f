"""A tokenizer's chat template: a program that somebody else wrote, run for a limited time."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

from bacr_jax.errors import UserError

# Two messages take a millisecond.
SECONDS = 2.0
# What a template may make of two messages.
MOST_CHARS = 1_000_000
# Asks the template of an exported folder for the base's, which it holds; others do not know it.
BASE = "base_template"


def render(
    tokenizer: Any, system: str, user: str, *, template: str | None = None, thinks: bool = True
) -> str:
    """The text of a system and a user message, up to where the answer begins.

    Args:
      system: empty: there is none.
      thinks: where a template can leave thinking out (Qwen3's), whether it is to come.
      template: instead of the tokenizer's own.

    Raises:
      UserError: the template fails, loops, or writes more than a million characters.
    """
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": user})
    try:
        with at_most(SECONDS, f"takes more than {SECONDS:g} s"):
            content = tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=True,
                chat_template=template,
                enable_thinking=thinks,
                **{BASE: True},
            )
        if len(content) > MOST_CHARS:
            raise ValueError(f"writes {len(content):,} characters")
    # It can be wrong, it can refuse (a system message, say), and it can ask for all memory.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"tokenizer: its chat template fails on a system and a user message ({reason}); "
            "write the folder of an Instruct model"
        ) from None
    return str(content)


@contextlib.contextmanager
def at_most(seconds: float, message: str) -> Iterator[None]:
    """TimeoutError with this message after some seconds of processor time.

    They are of this process's own work, so that a busy machine ends nothing. Works in the main
    thread, where signals arrive; elsewhere nothing is limited. Code inside one call of a C function
    is not ended before it returns.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> NoReturn:
        raise TimeoutError(message)

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
