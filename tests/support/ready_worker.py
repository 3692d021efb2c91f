"""Grading worker that starts at once, because it does not import math-verify.

It uses the pipes, the limits and the request loop of the real worker (`bacr_grading.worker`). An
answer is correct if it consists of the same characters as the reference. Grading an answer with
`\\int` never ends. If the environment variable `BUSY_WORKERS` contains the path of a folder, the
worker first creates a file in this folder, whose name is its process id.
"""

import os
import sys
from pathlib import Path

from bacr_grading import worker


def answer(request):
    """Grades the answer of a request."""
    folder = os.environ.get("BUSY_WORKERS")
    if folder and "\\int" in request["answer"]:
        Path(folder, str(os.getpid())).touch()
    while "\\int" in request["answer"]:
        pass
    return {"correct": sorted(request["answer"]) == sorted(request["reference"])}


if __name__ == "__main__":
    requests, replies = worker.open_pipes()
    worker.limit(int(sys.argv[1]))
    worker.serve(requests, replies, answer, lambda request: int(sys.argv[2]))
