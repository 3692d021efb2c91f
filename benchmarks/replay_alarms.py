"""Replays the alarms of `bacr_jax.runs.health` on finished runs, and counts false alarms.

    python benchmarks/replay_alarms.py [--table] runs/*/ docs/results/*-cpu

Each argument is a run folder (with metrics.jsonl and eval.jsonl) or a folder with a cells.jsonl.xz.
The latter contains whole runs that pack_runs.py wrote, or the cells of a study. Cells contain only
some metrics of each step: the mean reward, and in newer studies the shares of closed answers and of
filled budgets. The alarms that need other metrics are not replayed on them.

The script prints a JSON line for each run with the keys

    run, steps
    alarms     the step of each alarm, by name. The alarm `evaluation` is an evaluation during
               training that is worse than before training.
    failed     budgets at which the policy is worse than before training (`evaluation.decline`);
               null if the policy before training was not evaluated
    mean_fell  true if the held-out accuracy, averaged over budgets, is below the 95 % interval of
               before training; null if it was not measured

The last line counts the runs. A run ended worse if `failed` is not empty, or if `failed` is null
and `mean_fell` is true. An alarm of `OF_RUIN` in any other run is false. With --table, the script
prints a Markdown table with these counts for each argument instead.
"""

import argparse
import collections
import json
import lzma
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bacr_jax.evaluation.decline import accuracy_declined, declines
from bacr_jax.evaluation.samples import GREEDY
from bacr_jax.runs.health import SYMPTOMS, RunHealth
from bacr_study.cells import Cell
from bacr_study.failures import changes_of

# Alarms that indicate that the policy is collapsing. All other alarms concern the grader, the
# machine or the questions.
OF_RUIN = {"closed_answers", "repetition", "one_sided", "update_kl", "collapse", "evaluation"}
# Metrics that a cell's training curve contains, by their name in the curve. The mean reward is used
# instead of the accuracy, because the alarm `collapse` compares this metric only with its own best
# value.
_OF_CURVE = {
    "reward": "reward/cut_1",
    "closed_answers": "rollout/closed_answers",
    "forced_share": "rollout/forced_share",
}
# Number of held-out questions in the committed studies (eval.holdout).
_HELD_OUT = 256

Record = dict[str, Any]


class Run(NamedTuple):
    """A finished run.

    Attributes:
      name: name of the run.
      metrics: metrics of each step.
      evaluations: evaluations in the format of eval.jsonl; empty for a cell of a study.
      failed: budgets at which the policy became worse, or None if unknown.
      mean_fell: True if the held-out mean accuracy became worse, or None if unknown.
    """

    name: str
    metrics: list[Record]
    evaluations: list[Record]
    failed: list[str] | None
    mean_fell: bool | None = None


def read_lines(path: Path) -> list[Any]:
    """Reads a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def runs_in(folder: Path) -> Iterator[Run]:
    """Reads the run in a run folder, or all runs in a packed file."""
    if (folder / "metrics.jsonl").exists():
        evaluations = read_lines(folder / "eval.jsonl")
        metrics = read_lines(folder / "metrics.jsonl")
        yield Run(folder.name, metrics, evaluations, failures_of(evaluations))
        return
    packed = lzma.decompress((folder / "cells.jsonl.xz").read_bytes()).decode()
    records = [json.loads(line) for line in packed.splitlines()]
    cells = []
    for record in records:
        name = f"{folder.name}/{record['id']}"
        if "metrics" in record:
            evaluations = record.get("eval") or []
            yield Run(name, record["metrics"], evaluations, failures_of(evaluations))
        else:
            cells.append(Cell(**record))
    for cell in cells:
        if cell.steps:
            name = f"{folder.name}/{cell.id}"
            failed = failures_of_cell(cell, cells)
            yield Run(name, metrics_of_cell(cell), [], failed, mean_fell(cell))


def failures_of(evaluations: Sequence[Record]) -> list[str] | None:
    """Returns the budgets at which accuracy is worse than before training.

    Returns None if the evaluation before or after training is missing.
    """
    by_time = {record["when"]: record["sets"] for record in evaluations}
    if "before" not in by_time or "after" not in by_time:
        return None
    return declined(by_time["before"], by_time["after"])


def declined(before: Record, after: Record) -> list[str]:
    """Returns the budgets at which one evaluation is worse than another, over all sets."""
    return [
        f"{name} {decline.mode} {decline.budget} {decline.measure}"
        for name, summary in before.items()
        for decline in declines(summary, after.get(name, {}))
    ]


def failures_of_cell(cell: Cell, cells: Sequence[Cell]) -> list[str] | None:
    """Returns the budgets at which a run is worse than the untrained policy of the same seed.

    Returns None if the study has no cell of this policy.
    """
    for other in cells:
        is_untrained = other.steps == 0 and GREEDY in other.samples
        if is_untrained and (other.task, other.seed) == (cell.task, cell.seed):
            return [
                f"{name} {GREEDY} {change.budget} {change.measure}"
                for name in cell.sets
                for change in changes_of(cell, other, name)
                if change.failed
            ]
    return None


def metrics_of_cell(cell: Cell) -> list[Record]:
    """Returns the metrics of each training step that a cell contains."""
    return [
        {"step": point["step"]}
        | {metric: point[name] for name, metric in _OF_CURVE.items() if name in point}
        for point in cell.curve
        if point["step"] and point["reward"] is not None
    ]


def mean_fell(cell: Cell) -> bool | None:
    """True if the held-out accuracy, averaged over budgets, fell in training.

    Returns None if it was not measured before and at the end of training. The interval is that of a
    single answer per question, which is wider than the interval of a mean over budgets.
    """
    measured = [point for point in cell.curve if point["accuracy"] is not None]
    if not measured or measured[0]["step"] != 0 or measured[-1]["step"] != cell.steps:
        return None
    return accuracy_declined(measured[0]["accuracy"], measured[-1]["accuracy"], _HELD_OUT)


def alarms_of(run: Run) -> dict[str, int]:
    """Returns the step at which each alarm is raised, keyed by the alarm's name."""
    health = RunHealth()
    names = {symptom.message: name for name, symptom in SYMPTOMS.items()}
    steps = {}
    for record in run.metrics:
        numbers = {key: float(value) for key, value in record.items()}
        for message in health.warnings(numbers):
            steps[names[message]] = record["step"]
    by_time = {record["when"]: record["sets"] for record in run.evaluations}
    for record in run.evaluations:
        is_during = record["when"] == "during" and "before" in by_time
        if is_during and declined(by_time["before"], record["sets"]):
            steps.setdefault("evaluation", record["step"])
    if not run.evaluations:
        # The mean reward of a cell is not an accuracy, so `no_reward` and `always_right` mean
        # nothing.
        return {name: step for name, step in steps.items() if name in OF_RUIN}
    return steps


def report_of(run: Run) -> Record:
    """Returns the output record of a run."""
    return {
        "run": run.name,
        "steps": len(run.metrics),
        "alarms": alarms_of(run),
        "failed": run.failed,
        "mean_fell": run.mean_fell,
    }


def ended_worse(report: Record) -> bool | None:
    """True if the run ended worse than it began. None if this is unknown."""
    if report["failed"] is None:
        return report["mean_fell"]
    return bool(report["failed"])


def counts_of(reports: Sequence[Record]) -> Record:
    """Counts the alarms in `OF_RUIN`, separately for runs that ended worse and for other runs."""
    failed = [report for report in reports if ended_worse(report)]
    fine = [report for report in reports if ended_worse(report) is False]
    false_alarms = collections.Counter(
        name for report in fine for name in report["alarms"] if name in OF_RUIN
    )
    return {
        "runs": len(reports),
        "failed": len(failed),
        "failed_with_alarm": sum(not OF_RUIN.isdisjoint(report["alarms"]) for report in failed),
        "fine": len(fine),
        "fine_with_alarm": sum(not OF_RUIN.isdisjoint(report["alarms"]) for report in fine),
        "false_alarms": dict(false_alarms),
        "mean_measured": sum(report["mean_fell"] is not None for report in reports),
        "mean_fell": sum(bool(report["mean_fell"]) for report in reports),
    }


def table_of(reports: dict[str, list[Record]]) -> str:
    """Returns a Markdown table of the counts for each folder."""
    names = ("runs", "ended worse", "with an alarm", "others", "false alarms", "mean fell")
    lines = [f"| {' | '.join(('folder', *names))} |", "| --- |" + " ---: |" * len(names)]
    total = [report for of_folder in reports.values() for report in of_folder]
    for folder, of_folder in (*reports.items(), ("all", total)):
        counts = counts_of(of_folder)
        cells = [counts[name] for name in ("runs", "failed", "failed_with_alarm", "fine")]
        cells.append(counts["fine_with_alarm"])
        cells.append(f"{counts['mean_fell']} of {counts['mean_measured']}")
        lines.append(f"| {' | '.join(map(str, (folder, *cells)))} |")
    return "\n".join(lines)


def main() -> None:
    """Replays the runs that the command line specifies."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--table", action="store_true", help="print only a Markdown table")
    options = parser.parse_args()
    for folder in options.folders:
        if not any((folder / name).exists() for name in ("metrics.jsonl", "cells.jsonl.xz")):
            parser.error(f"{folder}: has neither metrics.jsonl nor cells.jsonl.xz; use a run")
    reports: dict[str, list[Record]] = {}
    for folder in options.folders:
        reports[folder.resolve().name] = [report_of(run) for run in runs_in(folder)]
    if options.table:
        print(table_of(reports))
        return
    flat = [report for of_folder in reports.values() for report in of_folder]
    for line in (*flat, counts_of(flat)):
        print(json.dumps(line))


if __name__ == "__main__":
    main()
