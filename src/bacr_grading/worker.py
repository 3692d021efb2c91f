"""Worker process that runs math-verify.

`pool` starts this module as a script and may kill it at any time. It reads one JSON request per
line from stdin and writes one JSON reply per line to stdout. It does not import JAX. If the kernel
supports it, the process sandboxes itself before the first request. `verifier_worker` uses the same
request loop for a user's verifier.
"""

import contextlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, TextIO


def main(memory_bytes: int, seconds: int) -> None:
    """Answers requests until stdin is closed.

    Args:
      memory_bytes: maximum size of the address space in bytes.
      seconds: time limit of a request, after which the kernel kills the process.
    """
    requests, replies = open_pipes()
    import logging

    from bacr_grading import confinement

    logging.disable(logging.CRITICAL)
    # Import before the first request, because the import takes one to two seconds, which must not
    # count towards the deadline of a request.
    from bacr_grading import algebra

    algebra.warm_up()
    limit(memory_bytes)
    if confinement.is_available():
        confinement.confine()
    serve(requests, replies, _answer, lambda request: seconds)


def open_pipes() -> tuple[TextIO, TextIO]:
    """Returns streams for requests and replies, and redirects stdin and stdout to /dev/null.

    The redirection prevents other code in this process from reading requests or writing replies.

    This function also installs handlers that do nothing for SIGINT, SIGTERM and SIGHUP. These
    signals are meant for the parent process, which then closes the pipe. The signals are handled
    instead of ignored because programs started by a verifier would inherit ignored signals.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _do_nothing)
    requests = os.fdopen(os.dup(0), encoding="ascii")
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    with open(os.devnull, "r+") as null:
        os.dup2(null.fileno(), 0)
        os.dup2(null.fileno(), 1)
    return requests, replies


def _do_nothing(number: int, frame: object) -> None:
    """Handles a signal by doing nothing."""


def limit(memory_bytes: int) -> None:
    """Limits the address space of this process, and disables writing files and core dumps."""
    sys.dont_write_bytecode = True
    sizes = {resource.RLIMIT_AS: memory_bytes, resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: 0}
    for kind, value in sizes.items():
        # Some platforms do not support all limits. The parent enforces the deadline without them.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (value, value))


def serve(
    requests: TextIO,
    replies: TextIO,
    answer: Callable[[Any], dict[str, Any]],
    seconds: Callable[[Any], int],
) -> None:
    """Sends a ready message, then answers requests until the stream ends.

    Args:
      requests: stream with one JSON request per line.
      replies: stream to which one JSON reply per line is written.
      answer: returns the reply to a request.
      seconds: returns the time limit of a request in seconds. The kernel kills this process if the
        request exceeds the limit in CPU time or wall-clock time. The limit is longer than the
        deadline enforced by the parent process, and also works if the parent has exited.
    """
    write_reply(replies, {"ready": True})
    for line in requests:
        request = json.loads(line)
        _limit_time(seconds(request))
        reply = answer(request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_reply(replies, reply)


def write_reply(replies: TextIO, reply: dict[str, Any]) -> None:
    """Writes a reply as one line of JSON."""
    print(json.dumps(reply), file=replies, flush=True)


def _limit_time(seconds: int) -> None:
    """Makes the kernel kill this process after the given wall-clock time or CPU time in seconds."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = int(usage.ru_utime + usage.ru_stime)
    with contextlib.suppress(ValueError, OSError):
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (used + seconds + 1, hard))


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """Returns the result of math-verify. If math-verify fails, the answer counts as incorrect."""
    from bacr_grading import algebra

    try:
        return algebra.compare(**request)
    except MemoryError:
        return {"correct": False, "memory": True}
    except Exception as error:
        # Answers can make math-verify raise any type of exception.
        return {"correct": False, "error": type(error).__name__}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
