"""Replays the alarms of `bacr_jax.runs.health` on finished runs, and counts false alarms.

    python benchmarks/replay_alarms.py [--table] [--study FILE] runs/*/ docs/results/*-cpu

Each argument is a run folder (with metrics.jsonl and eval.jsonl) or a folder with a cells.jsonl.xz.
The latter contains whole runs that pack_runs.py wrote, or the cells of a study. Cells contain only
some metrics of each step: the mean reward, and in newer studies the shares of closed answers and of
filled budgets. The alarms that need other metrics are not replayed on them.

--study is the file of a study. It is needed if the study sets `warmup.seed`: then the runs of all
seeds are compared with the policy after the shared warm-up.

If a whole run and its cell are both in the given folders, the run is counted once, with its metrics
and with the cell's failures, because the cell's evaluation has more questions.

The script prints a JSON line for each run with the keys

    run, steps
    alarms     the step of each alarm, by name. The alarm `evaluation` is an evaluation during
               training that is worse than before training.
    failed     budgets at which the policy is worse than before training (`evaluation.decline`, for
               cells `bacr_study.failures`); null if the policy before training was not evaluated
    mean_fell  true if the held-out accuracy, averaged over budgets, is below the 95 % interval of
               before training; null if it was not measured

The last line counts the runs. A run ended worse if `failed` is not empty, or if `failed` is null
and `mean_fell` is true. An alarm of `OF_RUIN` in any other run is false. With --table, the script
prints two Markdown tables instead: these counts for each argument, and the runs in which each alarm
of `OF_RUIN` was raised.
"""

import argparse
import collections
import json
import lzma
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bacr_jax.errors import UserError
from bacr_jax.evaluation.decline import accuracy_declined, declines
from bacr_jax.evaluation.samples import GREEDY
from bacr_jax.runs.health import SYMPTOMS, RunHealth
from bacr_study.cells import Cell
from bacr_study.failures import changes_of, policy_before, shares_warmup
from bacr_study.study_file import read_study

# Alarms that indicate that the policy is collapsing. All other alarms concern the grader, the
# machine or the questions.
OF_RUIN = {
    "closed_answers",
    "repetition",
    "one_sided",
    "update_kl",
    "collapse",
    "lost_reward",
    "evaluation",
}
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
      key: id and number of generated tokens, which a packed run and its cell have in common. None
        for a run folder.
    """

    name: str
    metrics: list[Record]
    evaluations: list[Record]
    failed: list[str] | None
    mean_fell: bool | None = None
    key: tuple[str, int] | None = None


def read_lines(path: Path) -> list[Any]:
    """Reads a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def runs_in(folder: Path, shared_warmups: Collection[str] = ()) -> Iterator[Run]:
    """Reads the run in a run folder, or all runs in a packed file.

    Args:
      folder: the run folder, or the folder of the packed file.
      shared_warmups: ids of tasks on which the runs of all seeds start from the same warm-up.
    """
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
            tokens = record.get("summary", {}).get("generated_tokens")
            key = None if tokens is None else (record["id"], tokens)
            failed = failures_of(evaluations)
            yield Run(name, record["metrics"], evaluations, failed, key=key)
        else:
            cells.append(Cell(**record))
    for cell in cells:
        if cell.steps:
            yield Run(
                name=f"{folder.name}/{cell.id}",
                metrics=metrics_of_cell(cell),
                evaluations=[],
                failed=failures_of_cell(cell, cells, cell.task in shared_warmups),
                mean_fell=mean_fell(cell),
                key=(cell.id, cell.generated_tokens),
            )


def joined(runs: Mapping[str, Sequence[Run]]) -> dict[str, list[Run]]:
    """Gives each whole run the failures of its cell, and removes the run of this cell.

    Runs without a cell, and cells without a whole run, stay as they are.

    Args:
      runs: runs by folder.
    """
    failures_by_key = {}
    whole_keys = set()
    for of_folder in runs.values():
        for run in of_folder:
            if run.evaluations:
                whole_keys.add(run.key)
            elif run.failed is not None:
                failures_by_key[run.key] = run.failed
    joined_runs: dict[str, list[Run]] = {}
    for folder, of_folder in runs.items():
        joined_runs[folder] = []
        for run in of_folder:
            if run.evaluations:
                failed = failures_by_key.get(run.key, run.failed)
                joined_runs[folder].append(run._replace(failed=failed))
            elif run.key is None or run.key not in whole_keys:
                joined_runs[folder].append(run)
    return joined_runs


def shared_warmups_of(files: Sequence[Path]) -> set[str]:
    """Returns the ids of the tasks of studies on which all seeds start from the same warm-up."""
    studies = [read_study(file, size=None, overrides=[]) for file in files]
    return {task.id for study in studies for task in study.tasks if shares_warmup(study, task)}


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


def failures_of_cell(
    cell: Cell, cells: Sequence[Cell], shared_warmup: bool = False
) -> list[str] | None:
    """Returns the budgets at which a run is worse than the policy that it started from.

    Returns None if the study has no cell of this policy.

    Args:
      cell: the run.
      cells: all cells of its study.
      shared_warmup: True if the runs of all seeds start from the same warm-up.
    """
    untrained = [
        other
        for other in cells
        if other.steps == 0 and GREEDY in other.samples and other.task == cell.task
    ]
    before = policy_before(cell, untrained, shared_warmup=shared_warmup)
    if before is None:
        return None
    return [
        f"{name} {GREEDY} {change.budget} {change.measure}"
        for name in cell.sets
        for change in changes_of(cell, before, name)
        if change.failed
    ]


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


def alarm_table(reports: Sequence[Record]) -> str:
    """Returns a Markdown table of the runs in which each alarm of `OF_RUIN` was raised.

    It has the number of runs and the step of the alarm in each of them, for runs that ended worse,
    for other runs, and for runs whose end is unknown.
    """
    names = ("alarm", "ended worse", "steps", "others (false)", "steps", "end unknown", "steps")
    lines = [f"| {' | '.join(names)} |", "| --- |" + " ---: | --- |" * 3]
    for alarm in sorted(OF_RUIN):
        cells: list[str] = [f"`{alarm}`"]
        for end in (True, False, None):
            steps = sorted(
                report["alarms"][alarm]
                for report in reports
                if alarm in report["alarms"] and ended_worse(report) is end
            )
            cells += [str(len(steps)), ", ".join(map(str, steps)) or "-"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Replays the runs that the command line specifies."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--table", action="store_true", help="print only Markdown tables")
    parser.add_argument(
        "--study",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="file of a study of these cells, if it sets warmup.seed; can be repeated",
    )
    options = parser.parse_args()
    for folder in options.folders:
        if not any((folder / name).exists() for name in ("metrics.jsonl", "cells.jsonl.xz")):
            parser.error(f"{folder}: has neither metrics.jsonl nor cells.jsonl.xz; use a run")
    try:
        shared_warmups = shared_warmups_of(options.study)
    except UserError as error:
        parser.error(str(error))
    runs = {}
    for folder in options.folders:
        runs[folder.resolve().name] = list(runs_in(folder, shared_warmups))
    reports = {}
    for name, of_folder in joined(runs).items():
        reports[name] = [report_of(run) for run in of_folder]
    flat = [report for of_folder in reports.values() for report in of_folder]
    if options.table:
        print(table_of(reports), alarm_table(flat), sep="\n\n")
        return
    for line in (*flat, counts_of(flat)):
        print(json.dumps(line))


if __name__ == "__main__":
    main()
