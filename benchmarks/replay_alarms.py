"""Replays the alarms of `bacr_jax.runs.health` on finished runs, and counts false alarms.

    python benchmarks/replay_alarms.py runs/*/ docs/results/quickstart-cpu

Each argument is a run folder (with metrics.jsonl and eval.jsonl), or a folder with a cells.jsonl.xz
that pack_runs.py wrote. Cells of studies are skipped, because they do not contain the metrics of
single steps.

The script prints a JSON line for each run with the keys run, steps, alarms (the step of each alarm,
by name) and failed. The value of failed is the list of budgets at which the accuracy is worse than
before training according to `evaluation.decline`, or null if an evaluation is missing. The last
line counts the runs and the failed runs. For the alarms in `OF_RUIN`, it also counts the failed
runs with such an alarm, and the false alarms by name. An alarm is false if the run did not fail.
"""

import argparse
import collections
import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bacr_jax.evaluation.decline import declines
from bacr_jax.runs.health import SYMPTOMS, RunHealth

# Alarms that indicate that the policy is collapsing. All other alarms concern the grader, the
# machine or the questions.
OF_RUIN = {"closed_answers", "repetition", "one_sided", "update_kl", "collapse"}
# A run: its name, its metrics records, and its evaluation records (None if they are not available).
Run = tuple[str, list[dict[str, Any]], list[dict[str, Any]] | None]


def read_lines(path: Path) -> list[Any]:
    """Reads a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def runs_in(folder: Path) -> Iterator[Run]:
    """Reads the run in a run folder, or all runs in a packed file."""
    if (folder / "metrics.jsonl").exists():
        yield folder.name, read_lines(folder / "metrics.jsonl"), read_lines(folder / "eval.jsonl")
        return
    packed = lzma.decompress((folder / "cells.jsonl.xz").read_bytes()).decode()
    for line in packed.splitlines():
        record = json.loads(line)
        if "metrics" in record:
            yield f"{folder.name}/{record['id']}", record["metrics"], record.get("eval")


def alarms_of(records: list[dict[str, Any]]) -> dict[str, int]:
    """Returns the step at which each alarm is raised, keyed by the alarm's name."""
    health = RunHealth()
    names = {symptom.message: name for name, symptom in SYMPTOMS.items()}
    steps = {}
    for record in records:
        numbers = {key: float(value) for key, value in record.items()}
        for message in health.warnings(numbers):
            steps[names[message]] = record["step"]
    return steps


def failures_of(evaluations: list[dict[str, Any]] | None) -> list[str] | None:
    """Returns the budgets at which accuracy is worse than before training.

    Returns None if the evaluation before or after training is missing.
    """
    by_time = {record["when"]: record["sets"] for record in evaluations or ()}
    if "before" not in by_time or "after" not in by_time:
        return None
    return [
        f"{name} {decline.mode} {decline.budget} {decline.measure}"
        for name, before in by_time["before"].items()
        for decline in declines(before, by_time["after"].get(name, {}))
    ]


def report_of(run: Run) -> dict[str, Any]:
    """Returns the output record of a run."""
    name, records, evaluations = run
    return {
        "run": name,
        "steps": len(records),
        "alarms": alarms_of(records),
        "failed": failures_of(evaluations),
    }


def counts_of(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts the alarms in `OF_RUIN`, separately for failed runs and for the other runs."""
    failed = [report for report in reports if report["failed"]]
    fine = [report for report in reports if report["failed"] == []]
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
    }


def main() -> None:
    """Replays the runs that the command line specifies."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path)
    folders = parser.parse_args().folders
    for folder in folders:
        if not any((folder / name).exists() for name in ("metrics.jsonl", "cells.jsonl.xz")):
            parser.error(f"{folder}: has neither metrics.jsonl nor cells.jsonl.xz; use a run")
    reports = [report_of(run) for folder in folders for run in runs_in(folder)]
    for line in (*reports, counts_of(reports)):
        print(json.dumps(line))


if __name__ == "__main__":
    main()
