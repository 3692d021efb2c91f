"""Runs math-verify in a process that `pool` starts as a script and may kill at any moment.

Reads one request per line of standard input and writes one reply per line of standard output, both
in JSON. Imports no JAX. If the kernel supports it, the process gives up its rights before the first
request. `verifier_worker` uses the same loop for a user's verifier.
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
    """Answers requests until standard input closes.

    Args:
      memory_bytes: limit of the address space.
      seconds: limit of a request, after which the kernel ends the process.
    """
    requests, replies = open_pipes()
    import logging

    from bacr_grading import confinement

    logging.disable(logging.CRITICAL)
    # Imported here, because the import takes a second or two, which must not count for a request.
    from bacr_grading import algebra

    algebra.warm_up()
    limit(memory_bytes)
    if confinement.is_available():
        confinement.confine()
    serve(requests, replies, _answer, lambda request: seconds)


def open_pipes() -> tuple[TextIO, TextIO]:
    """Returns streams for requests and replies, and connects standard input and output to null.

    Other code in this process then cannot read requests or write replies. Signals of a terminal and
    of a job scheduler are for the parent, which closes the pipe, so that the process handles them
    without an action. Programs that a verifier starts would inherit signals that are ignored.
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
    """Handles a signal without an action."""


def limit(memory_bytes: int) -> None:
    """Limits the address space of this process, and forbids files and core dumps."""
    sys.dont_write_bytecode = True
    sizes = {resource.RLIMIT_AS: memory_bytes, resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: 0}
    for kind, value in sizes.items():
        # Some platforms lack a limit. The deadline of the parent does not depend on them.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (value, value))


def serve(
    requests: TextIO,
    replies: TextIO,
    answer: Callable[[Any], dict[str, Any]],
    seconds: Callable[[Any], int],
) -> None:
    """Reports that the process is ready, then answers requests until the stream ends.

    Args:
      requests: stream with one JSON request per line.
      replies: stream for one JSON reply per line.
      answer: returns the reply to a request.
      seconds: returns the limit of a request, in seconds of the processor and of the clock, after
        which the kernel ends the process. The parent's deadline is shorter. This limit also works
        when the parent has ended.
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
    """Makes the kernel end this process after some seconds of the clock or the processor."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = int(usage.ru_utime + usage.ru_stime)
    with contextlib.suppress(ValueError, OSError):
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (used + seconds + 1, hard))


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """Returns the verdict of math-verify; "incorrect" if it fails."""
    from bacr_grading import algebra

    try:
        return algebra.compare(**request)
    except MemoryError:
        return {"correct": False, "memory": True}
    except Exception as error:
        # math-verify can raise any exception.
        return {"correct": False, "error": type(error).__name__}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
