"""Loads tokenizers and renders chat templates of untrusted models, as a worker of `limited.py`.

`limited.py` runs this file as a script. The script reads JSON requests from stdin, one per line,
and writes JSON replies to stdout. The limits are enforced by the kernel, so that they also apply to
C and Rust code. The script does not import any other module of this package. It exits when its
parent process exits, or after a minute without a request.
"""

import contextlib
import datetime
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

Request = dict[str, Any]

# Time without a request after which the process exits, in seconds.
IDLE_SECONDS = 60
# Number of times a text is encoded, in order to detect nondeterministic tokenizers.
_REPEATS = 5
# Number of vocabulary entries whose decoded text is encoded in addition to `_TEXT`.
_SAMPLED_TOKENS = 500
_TEXT = (
    "Solve for x: 3x + 12 = 48. Then 12 * 4 = 48, so \\frac{36}{3} = 12.\n\n"
    "Weng earns $12 an hour for babysitting; yesterday, she just did 50 minutes. How much did she "
    "earn? Größe, 数学, \U0001f642, 1,234.56 and \\boxed{10}.\n"
)


def _memory_in_use() -> int | None:
    """Returns the size of the address space in bytes, or None if the system does not report it."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[0]
    except OSError:
        return None
    return int(pages) * resource.getpagesize()


@contextlib.contextmanager
def _limits(seconds: float, memory: int) -> Iterator[None]:
    """Limits a `with` block to `seconds` of CPU time and `memory` bytes of additional memory.

    SIGPROF terminates the process when the time is used up. Allocations beyond the memory limit
    fail.
    """
    used = _memory_in_use()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if used is not None:
        limit = used + memory
        if soft != resource.RLIM_INFINITY:
            limit = min(limit, soft)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class _Clock(datetime.datetime):
    """Replaces `datetime` in chat templates, so that `now()` is the same in every run.

    `now()` returns midnight on the date `data.prompt_date`.
    """

    date_of_prompts = "1970-01-01"

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> "_Clock":
        """Returns midnight on `date_of_prompts` instead of the current time."""
        return cls.fromisoformat(cls.date_of_prompts)


def render(request: Request) -> str:
    """Renders messages with a chat template at a fixed date.

    Raises:
      ValueError: If the rendered text is too long or differs between two renderings.
    """
    from transformers.utils import chat_template_utils

    # The library's strftime_now uses this clock. A function cannot be passed as a template
    # variable, because variables are sent as JSON.
    chat_template_utils.datetime = _Clock
    _Clock.date_of_prompts = request["date"]
    texts: Any = chat_template_utils.render_jinja_template(
        conversations=[request["messages"]] * 2,
        chat_template=request["template"],
        add_generation_prompt=request["add_generation_prompt"],
        **request["variables"],
    )[0]
    if len(texts[0]) > request["most_chars"]:
        raise ValueError(f"writes {len(texts[0]):,} characters")
    if texts[0] != texts[1]:
        raise ValueError("writes another text each time")
    return str(texts[0])


def read_variables(request: Request) -> list[str] | None:
    """Returns the variables that a template reads but does not set.

    Returns None if the template cannot be parsed by plain Jinja.
    """
    import jinja2
    import jinja2.meta

    language = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        return sorted(jinja2.meta.find_undeclared_variables(language.parse(request["template"])))
    # transformers extends Jinja with additional tags that this parser does not support.
    except jinja2.TemplateSyntaxError:
        return None


def read_tokenizer(request: Request) -> str:
    """Loads the tokenizer in a folder, and encodes and decodes sample texts with it.

    Returns:
      The reason why the tokenizer cannot be used, or an empty string if it can.
    """
    import tokenizers

    folder = Path(request["folder"])
    tokenizer_path = folder / "tokenizer.json"
    vocab_path = folder / "vocab.json"
    merges_path = folder / "merges.txt"
    if tokenizer_path.is_file():
        backend = tokenizers.Tokenizer.from_file(str(tokenizer_path))
    elif vocab_path.is_file() and merges_path.is_file():
        model = tokenizers.models.BPE.from_file(str(vocab_path), str(merges_path))
        backend = tokenizers.Tokenizer(model)
    else:
        return ""
    ids = sorted(backend.get_vocab(with_added_tokens=True).values())
    sampled = ids[:: max(len(ids) // _SAMPLED_TOKENS, 1)]
    texts = [_TEXT, backend.decode(sampled, skip_special_tokens=False)]
    encoded = [[_encoded(backend, text) for text in texts] for _ in range(_REPEATS)]
    if any(other != encoded[0] for other in encoded):
        return "it gives the same text other ids each time"
    return ""


def _encoded(backend: Any, text: str) -> list[int] | None:
    """Returns the token ids of a text, or None if the tokenizer cannot encode it."""
    # Some models cache the token ids of words, which would hide nondeterministic encoding.
    getattr(backend.model, "_clear_cache", lambda: None)()
    try:
        return list(backend.encode(text, add_special_tokens=False).ids)
    # The Rust library raises plain Exception. A panic is not an Exception and makes the request
    # fail.
    except Exception:
        return None


OPERATIONS: dict[str, Callable[[Request], Any]] = {
    "render": render,
    "read_variables": read_variables,
    "read_tokenizer": read_tokenizer,
}


def reply_to(request: Request) -> dict[str, Any]:
    """Handles a request. Returns its result or an error message."""
    operation = OPERATIONS[request["operation"]]
    try:
        with _limits(request["seconds"], request["memory"]):
            return {"value": operation(request)}
    except MemoryError:
        return {"error": f"needs more than {request['memory'] >> 20:,} MiB of memory"}
    except RecursionError:
        return {"error": "is nested too deeply"}
    # A panic in the Rust library is not an Exception.
    except BaseException as error:
        lines = str(error).strip().splitlines()
        return {"error": lines[0] if lines else type(error).__name__}


def serve(requests: TextIO, replies: TextIO) -> None:
    """Handles requests until the input ends or no request has arrived for a minute."""
    while True:
        # SIGALRM terminates the process after the idle timeout.
        signal.alarm(IDLE_SECONDS)
        line = requests.readline()
        signal.alarm(0)
        if not line:
            return
        replies.write(json.dumps(reply_to(json.loads(line))) + "\n")
        replies.flush()


def main() -> None:
    """Redirects the output, configures signals, and handles requests."""
    # Libraries may print, so stdout and stderr are redirected to /dev/null for them.
    replies = os.fdopen(os.dup(1), "w")
    sink = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        os.dup2(sink, stream)
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Imported here, so that the imports overlap with the parent's imports and do not count towards
    # the limits.
    import jinja2.meta  # noqa: F401
    import tokenizers  # noqa: F401
    import transformers.utils.chat_template_utils  # noqa: F401

    serve(sys.stdin, replies)


if __name__ == "__main__":
    main()
