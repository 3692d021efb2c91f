"""The process that runs math-verify. Started as a script, it imports modules of ours without JAX.

One JSON line in, one JSON line out. It can be killed at any moment and holds nothing worth saving.
Where the kernel allows it, the process gives up its rights before the first request. A verifier of
one's own is run by the same loop (`verifier_worker`).
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
    """Answers requests until standard input closes, in `memory_bytes` of address space."""
    requests, replies = open_pipes()
    import logging

    from bacr_grading import confinement

    logging.disable(logging.CRITICAL)
    # A second or two: before the limits and before "ready".
    from bacr_grading import algebra

    algebra.warm_up()
    limit(memory_bytes)
    if confinement.is_available():
        confinement.confine()
    serve(requests, replies, _answer, lambda request: seconds)


def open_pipes() -> tuple[TextIO, TextIO]:
    """Standard input and output for requests and replies alone: whoever else uses them finds none.

    The terminal's Ctrl-C and a job's SIGTERM are for the parent, which closes the pipe. They are
    not ignored, since programs that a verifier starts would then ignore them too.
    """
    for deaf in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(deaf, lambda *_: None)
    requests = os.fdopen(os.dup(0), encoding="ascii")
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    with open(os.devnull, "r+") as nowhere:
        os.dup2(nowhere.fileno(), 0)
        os.dup2(nowhere.fileno(), 1)
    return requests, replies


def limit(memory_bytes: int) -> None:
    """From here on: so many bytes of address space, no files, no cores."""
    sys.dont_write_bytecode = True
    sizes = {resource.RLIMIT_AS: memory_bytes, resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: 0}
    for kind, value in sizes.items():
        # Not every platform has every limit; the parent's deadline does not depend on them.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (value, value))


def serve(
    requests: TextIO,
    replies: TextIO,
    answer: Callable[[Any], dict[str, Any]],
    seconds: Callable[[Any], int],
) -> None:
    """Says that it is ready, then answers line by line until the parent wants no more.

    After `seconds` of a request, of the processor and of the clock, the kernel ends the process.
    The parent's deadline comes first; this one holds even when there is no parent left.
    """
    say(replies, {"ready": True})
    for line in requests:
        request = json.loads(line)
        _allow(seconds(request))
        reply = answer(request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        say(replies, reply)


def say(replies: TextIO, reply: dict[str, Any]) -> None:
    """Writes one line."""
    print(json.dumps(reply), file=replies, flush=True)


def _allow(seconds: int) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = int(usage.ru_utime + usage.ru_stime)
    with contextlib.suppress(ValueError, OSError):
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (used + seconds + 1, hard))


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    from bacr_grading import algebra

    try:
        return algebra.compare(**request)
    except MemoryError:
        return {"correct": False, "memory": True}
    except Exception as error:  # Whatever math-verify raises means: no verdict.
        return {"correct": False, "error": type(error).__name__}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
