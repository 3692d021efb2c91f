"""A grading worker that is ready at once, with the pipes, limits and loop of math-verify's.

Two texts of the same characters are equal, and an integral takes for ever. A worker that has begun
with an integral writes a file named after its process into the folder of `BUSY_WORKERS`, if set.
"""

import os
import sys
from pathlib import Path

from bacr_grading import worker


def answer(request):
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
