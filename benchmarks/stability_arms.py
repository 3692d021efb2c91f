r"""Makes a table of the failures, gains and costs of each arm of a stability study, by machine.

    python benchmarks/stability_arms.py --study configs/studies/stability-twenty.yaml \
        --machine Xeon docs/results/stability-twenty-xeon-unfinished \
        --machine EPYC docs/results/stability-twenty-epyc-unfinished \
        --out docs/results/stability-twenty-tables/arms.md

`bacr study --report` needs one folder, and compares all of its runs with one policy before
training. The runs of these studies are from two machines, each of which has its own policy after
the warm-up. This script therefore reads one folder of cells (cells.jsonl.xz) for each machine.
`bacr_study.failures` defines which runs failed and which losses are shown.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bacr_jax.errors import UserError
from bacr_jax.evaluation.decline import ACCURACY
from bacr_jax.evaluation.samples import GREEDY, SAMPLED
from bacr_jax.files import write_atomically
from bacr_jax.report.table import Item, Table
from bacr_study import items
from bacr_study.archive import archived_cells
from bacr_study.cells import Cell
from bacr_study.failures import Change, changes_of, policy_before, shares_warmup, worst_change
from bacr_study.spec import Study
from bacr_study.statistics import clopper_pearson_interval
from bacr_study.study_file import read_study

# Tokens of the smallest budget of these studies. No trace reaches its result there, so losses at
# this budget are counted separately (stability-twenty.yaml, reading 7).
SMALLEST = 12
# Tokens of the budget whose gain is shown (stability-twenty.yaml, reading 1).
TIGHT = 20


class Run(NamedTuple):
    """A trained run.

    Attributes:
      cell: the stored results of the run.
      changes: changes since before training, by decoding mode.
    """

    cell: Cell
    changes: dict[str, list[Change]]


def runs_of(folder: Path, study: Study) -> Iterator[Run]:
    """Reads the trained runs of a folder, and compares them with the policies before training."""
    cells = [Cell(**record) for record in archived_cells(folder)]
    for cell in cells:
        untrained = [
            other for other in cells if (other.task, other.arm) == (cell.task, study.before)
        ]
        shared_warmup = shares_warmup(study, study.task(cell.task))
        before = policy_before(cell, untrained, shared_warmup=shared_warmup)
        if cell.steps and before is not None:
            (name,) = cell.sets
            modes = (GREEDY, SAMPLED)
            yield Run(cell, {mode: list(changes_of(cell, before, name, mode)) for mode in modes})


def failed_item(runs: Sequence[Run], mode: str) -> Item:
    """Formats the number of failed runs with the interval of their share: `1 of 6 [0, 64]`."""
    failed = sum(any(change.failed for change in run.changes[mode]) for run in runs)
    low, high = clopper_pearson_interval(failed, len(runs))
    return items.failed_item({"failed": failed, "runs": len(runs), "low": low, "high": high})


def shown_losses(runs: Sequence[Run], *, at_smallest: bool) -> int:
    """Counts the runs with a shown loss of greedy answers.

    Args:
      runs: the runs.
      at_smallest: True to count losses at the budget `SMALLEST`, False to count all others.
    """
    return sum(
        any(
            change.shown and (int(change.budget) == SMALLEST) == at_smallest
            for change in run.changes[GREEDY]
        )
        for run in runs
    )


def worst_text(runs: Sequence[Run]) -> str:
    """Returns the largest loss of greedy answers over runs, budgets and measures."""
    worst_of_runs = [(run.cell, worst_change(run.changes[GREEDY])) for run in runs]
    cell, change = min(worst_of_runs, key=lambda pair: pair[1].after - pair[1].before)
    text = items.loss_text(change._asdict() | {"seed": cell.seed})
    return f"{text} of {cell.task}"


def gain_text(runs: Sequence[Run], mode: str) -> str:
    """Returns the mean, lowest and highest gain in accuracy at the budget `TIGHT`, in points."""
    gains = [
        100 * (change.after - change.before)
        for run in runs
        for change in run.changes[mode]
        if (change.budget, change.measure) == (str(TIGHT), ACCURACY)
    ]
    mean = items.signed(float(np.mean(gains)))
    if len(gains) == 1:
        return mean
    return f"{mean} ({items.signed(min(gains))} to {items.signed(max(gains))})"


def row_of(label: str, machine: str, runs: Sequence[Run]) -> list[Item]:
    """Returns the table row of an arm's runs on a machine."""
    updates = {run.cell.steps for run in runs}
    tokens = np.mean([run.cell.generated_tokens for run in runs])
    return [
        label,
        machine,
        failed_item(runs, GREEDY),
        failed_item(runs, SAMPLED),
        str(shown_losses(runs, at_smallest=False)),
        str(shown_losses(runs, at_smallest=True)),
        worst_text(runs),
        gain_text(runs, GREEDY),
        gain_text(runs, SAMPLED),
        " to ".join(f"{count:,}" for count in sorted({min(updates), max(updates)})),
        f"{tokens:,.0f}",
    ]


def arms_table(study: Study, machines: Sequence[tuple[str, Path]]) -> Table:
    """Returns the table of all arms with finished runs.

    Args:
      study: the study.
      machines: name of each machine, and the folder of its cells.
    """
    runs_by_machine = {name: list(runs_of(folder, study)) for name, folder in machines}
    rows: list[list[Item]] = []
    for arm in study.arms:
        by_machine = {}
        for name, runs in runs_by_machine.items():
            runs_of_arm = [run for run in runs if run.cell.arm == arm.id]
            if runs_of_arm:
                by_machine[name] = runs_of_arm
        if len(by_machine) > 1:
            by_machine["all"] = [run for runs in by_machine.values() for run in runs]
        rows += [row_of(arm.name, name, runs) for name, runs in by_machine.items()]
    header = [
        *("arm", "machine", "failed", "failed, sampled", f"loss above {SMALLEST}"),
        *(f"loss at {SMALLEST}", "worst change", f"gain at {TIGHT}", f"gain at {TIGHT}, sampled"),
        *("updates", "tokens"),
    ]
    measures = {
        change.measure
        for runs in runs_by_machine.values()
        for run in runs
        for change in run.changes[GREEDY]
    }
    caption = (
        "Greedy answers, except in columns with sampled. Failed: runs whose accuracy at some "
        "budget is below the 95 % Wilson interval of the accuracy before training, or whose share "
        f"of {items.answers_measure(measures)} is below 95 % and below the interval of before; "
        "with the 95 % Clopper-Pearson interval of the share of failed runs in %. Loss: runs with "
        "a loss of accuracy that an exact sign test shows (p < .025 / number of budgets), or with "
        f"such a share of answers, at budgets above {SMALLEST} tokens or at {SMALLEST}. Worst "
        "change: accuracy before and after in %, unless another measure is named. Gain: mean over "
        "runs in points (lowest to highest). Tokens: generated in training, mean over runs. Each "
        "run is compared with the policy after the warm-up on its machine."
    )
    return Table(f"Arms of {study.name}", header, rows, words=2, caption=caption, name="arms")


def main() -> int:
    """Writes the table that the command line specifies."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--study", required=True, type=Path, help="the study's file")
    parser.add_argument(
        "--machine",
        required=True,
        action="append",
        nargs=2,
        metavar=("NAME", "DIR"),
        help="name of a machine, and the folder of its cells; repeated for each machine",
    )
    parser.add_argument("--out", required=True, type=Path, help="Markdown file to write")
    arguments = parser.parse_args()
    try:
        study = read_study(arguments.study)
        table = arms_table(study, [(name, Path(folder)) for name, folder in arguments.machine])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(arguments.out, table.markdown())
    print(arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
