"""Measured difficulty of problems, for data.groups=solve_rate."""

import json
from pathlib import Path

from bacr_jax.data.questions import groups_from_solve_rate
from bacr_jax.evaluation.graded import Graded
from bacr_jax.runs.files import write_atomically

# What the paper's groups are called, from the easiest on.
GROUPS = ("above .75", "above .5, up to .75", "above .25, up to .5", "up to .25")


def write_labels(path: Path, graded: Graded) -> dict[str, int]:
    """Writes each problem's avg@k: the share of its k samples that are right.

    The paper names pass@8, which is 0 or 1 for a single problem and can't be cut at .25, .5 and
    .75; the mean of the samples can.

    Args:
      path: JSONL file; a line {"id", "avg", "samples"} per problem.
      graded: sampled answers.

    Returns:
      Number of problems in each difficulty group, the easiest first.

    Raises:
      UserError: the file can't be written.
    """
    rates = graded.correct.mean(1)
    lines = [
        json.dumps({"id": id_, "avg": float(rate), "samples": graded.samples})
        for id_, rate in zip(graded.ids, rates)
    ]
    write_atomically(path, "".join(f"{line}\n" for line in lines))
    groups = groups_from_solve_rate(rates, num_groups=len(GROUPS))
    return {name: int((groups == group).sum()) for group, name in enumerate(GROUPS)}
