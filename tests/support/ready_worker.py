"""A grading worker that is ready at once, with the pipes, limits and loop of math-verify's.

Two texts of the same characters are equal, and an integral takes for ever.
"""

import sys

from bacr_grading import worker


def answer(request):
    while "\\int" in request["answer"]:
        pass
    return {"correct": sorted(request["answer"]) == sorted(request["reference"])}


if __name__ == "__main__":
    requests, replies = worker.open_pipes()
    worker.limit(int(sys.argv[1]))
    worker.serve(requests, replies, answer, lambda request: int(sys.argv[2]))
