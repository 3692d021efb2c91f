"""One run of a study, from its config to its cell: ordinary training, ordinary evaluation."""

import datetime
import hashlib
import json
import platform
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bacr_jax import evaluate, train
from bacr_jax.config import io as config_io
from bacr_jax.evaluation.folder import RESULTS, read_samples
from bacr_jax.evaluation.graded import Graded, graded
from bacr_jax.evaluation.samples import SAMPLED
from bacr_jax.runs.folder import RunPaths, WarmupPaths, read_lines, write_atomically, write_json
from bacr_jax.runs.provenance import VERSIONED
from bacr_jax.study.plan import PlannedRun, StudyPaths
from bacr_jax.study.spec import Study

# Seconds between looks at a warm-up that another process is making.
_LOOK_AGAIN = 2.0


def run_one(study: Study, run: PlannedRun, paths: StudyPaths) -> int:
    """Trains and evaluates one run and writes its cells; goes on where it was stopped.

    Returns:
      0, or the exit code of the command that did not get through.
    """
    config = paths.configs / f"{run.id}.yaml"
    config.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(config, config_io.to_yaml(run.config))
    if not run.trained:
        wait_for_warmup(run)
        code = train.main(["--config", str(config)])
        if code:
            return code
    code = evaluate.main(evaluation_arguments(study, run))
    if code:
        return code
    write_cells(study, run, paths)
    return 0


def wait_for_warmup(run: PlannedRun) -> None:
    """Waits while another process makes the warm-up that this run shares, and no longer."""
    from bacr_jax.errors import UserError
    from bacr_jax.runs.folder import lock_folder

    said = False
    while not run.warmed_up:
        assert run.warmup is not None
        run.warmup.mkdir(parents=True, exist_ok=True)
        try:
            # Free: nobody is at it, and training will make it.
            with lock_folder(run.warmup, str(run.warmup)):
                return
        except UserError:
            if not said:
                print(f"waiting for the warm-up in {run.warmup}", flush=True)
            said = True
            time.sleep(_LOOK_AGAIN)


def evaluation_arguments(study: Study, run: PlannedRun) -> list[str]:
    """The command line of `evaluate` for a run of the study.

    All arms and seeds answer the same problems, at the same budgets.
    """
    how, task = study.evaluation, study.tasks[run.task]
    arguments = ["--run", str(run.folder), "--budgets", ",".join(map(str, task.budgets))]
    samples = study.samples_of(run.arm)
    arguments += ["--samples", str(samples), "--greedy", "--seed", str(how.seed)]
    arguments += ["--slots", str(how.slots)]
    if samples:
        arguments += ["--temperature", str(how.temperature), "--top-p", str(how.top_p)]
    if how.size is not None:
        arguments += ["--size", str(how.size)]
    for name in task.data:
        arguments += ["--data", name]
    matched = [
        entry.votes
        for name, entry in study.arms.items()
        if (entry.of or name) == run.arm and entry.accounting == "matched_total" and entry.votes
    ]
    if matched:
        arguments += ["--self-consistency", str(matched[0])]
    return [*arguments, "--out", str(evaluation_folder(run, arguments))]


def evaluation_folder(run: PlannedRun, arguments: Sequence[str]) -> Path:
    """Where an evaluation lies: another command has another folder."""
    what = hashlib.sha256(json.dumps(arguments[2:]).encode()).hexdigest()[:8]
    return RunPaths(run.folder).later_evaluations / f"study-{what}"


def _commit() -> str:
    """The commit of this package, if it runs from a clone; empty otherwise."""
    git = shutil.which("git")
    if git is None:
        return ""
    command = [git, "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else ""


def _machine() -> str:
    """Processor and devices, for people."""
    import os

    import jax

    devices = jax.devices()
    kind = devices[0].device_kind
    return f"{platform.machine()}, {os.cpu_count()} cores, {len(devices)} x {kind}"


def _entry(numbers: Mapping[str, Any], answers: Graded) -> dict[str, Any]:
    """One budget of a cell."""
    kept = ("accuracy", "mean_thinking_tokens", "mean_total_tokens", "forced_share")
    levels = {
        level: {name: entry[name] for name in ("problems", "accuracy", "mean_thinking_tokens")}
        for level, entry in numbers["levels"].items()
    }
    return {
        **{name: numbers[name] for name in (*kept, "no_answer_share")},
        "levels": levels,
        "correct": "".join(map(str, answers.correct.sum(1).tolist())),
    }


def _voted(result: Mapping[str, Any], k: int, accounting: str) -> dict[str, Any]:
    """The budgets of a Self-Consistency row; without verdicts per problem."""
    rows = result["self_consistency"][str(k)][accounting]
    return {
        budget: {
            "accuracy": row["value"],
            "mean_thinking_tokens": row["mean_thinking_tokens"],
            "mean_total_tokens": row["mean_total_tokens"],
            "forced_share": None,
            "no_answer_share": None,
            "levels": {},
            "correct": None,
        }
        for budget, row in rows.items()
    }


def _digest(answers: Graded) -> str:
    return hashlib.sha256(json.dumps(answers.ids).encode()).hexdigest()[:12]


def _sets(out: Path) -> dict[str, Any]:
    """The evaluation in a folder as parts of a cell."""
    results = json.loads((out / RESULTS).read_bytes())["sets"]
    cells: dict[str, Any] = {"sets": {}, "problems_digest": {}, "levels_of": {}, "samples": {}}
    for name, drawn in read_samples(out).items():
        answers = {setting: graded(samples, setting) for setting, samples in drawn.items()}
        first = next(iter(answers.values()))
        cells["problems_digest"][name] = _digest(first)
        cells["levels_of"][name] = "".join(map(str, first.levels.tolist()))
        by_budget = results[name]["by_budget"]
        modes: dict[str, Any] = {}
        for setting, one in answers.items():
            entry = by_budget.get(setting.mode, {}).get(str(setting.budget))
            if entry is not None:
                modes.setdefault(setting.mode, {})[str(setting.budget)] = _entry(entry, one)
                cells["samples"][setting.mode] = setting.samples
        cells["sets"][name] = modes
    return cells


def curve(folder: RunPaths) -> list[dict[str, Any]]:
    """Training step by step: tokens and seconds so far, reward, and held-out accuracy."""
    evaluated = {}
    for record in read_lines(folder.evaluations):
        for name, modes in record["anytime"].items():
            if name == "train_holdout":
                evaluated[record["step"]] = modes["greedy"]["mean"]
    points, seconds = [], 0.0
    if 0 in evaluated:
        points.append(_point(0, 0, 0.0, None, None, evaluated[0]))
    for record in read_lines(folder.metrics):
        laps = (name for name in record if name.startswith("time/") and name != "time/tokens_per_s")
        seconds += sum(record[name] for name in laps)
        step, tokens = record["step"], record["rollout/tokens_total"]
        reward, thinking = record["reward/mean"], record["rollout/thinking_mean"]
        points.append(_point(step, tokens, seconds, reward, thinking, evaluated.get(step)))
    return points


def _point(
    step: int,
    tokens: int,
    seconds: float,
    reward: float | None,
    thinking: float | None,
    accuracy: float | None,
) -> dict[str, Any]:
    return {
        "step": step,
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "reward": reward,
        "thinking": thinking,
        "accuracy": accuracy,
    }


def schedule(folder: RunPaths) -> list[dict[str, Any]]:
    """The curriculum step by step; empty where budgets follow none."""
    found = []
    for record in read_lines(folder.metrics):
        groups = sorted(int(key.rpartition("_")[2]) for key in record if "curriculum/mu_" in key)
        found.append(
            {
                "step": record["step"],
                "tokens": record["rollout/tokens_total"],
                "groups": [
                    {
                        "pass_rate": record[f"curriculum/pass_rate_{group}"],
                        "mu": record[f"curriculum/mu_{group}"],
                        "mean_budget": record.get(f"budget/median_{group}"),
                        "weight": record[f"curriculum/weight_{group}"],
                    }
                    for group in groups
                ],
            }
        )
    return found


def write_cells(study: Study, run: PlannedRun, paths: StudyPaths) -> None:
    """The cell of a finished run, and those of the arms that are votes over its samples."""
    folder = RunPaths(run.folder)
    summary = json.loads(folder.summary.read_bytes())
    out = Path(evaluation_arguments(study, run)[-1])
    warmup: dict[str, Any] = {}
    if run.warmup is not None:
        warmup = json.loads(WarmupPaths(run.warmup).identity.read_bytes())
    by_curriculum = run.config.method == "bacr" and run.config.budget.prior == "curriculum"
    cell = {
        "id": run.id,
        "study_size": study.size,
        "task": run.task,
        "arm": run.arm,
        "seed": run.seed,
        "value": run.value,
        "provenance": {
            "commit": _commit(),
            "versions": {name: version(name) for name in VERSIONED},
            "machine": _machine(),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        },
        "config_sha": folder.path.name.rpartition("-")[2],
        "departures": summary["departures"],
        "steps": summary["steps"],
        "generated_tokens": summary["generated_tokens"],
        "wall_seconds": round(summary["wall_seconds"], 1),
        "warmup": {name: value for name, value in warmup.items() if name != "fingerprint"},
        **_sets(out),
        "curve": curve(folder),
        "schedule": schedule(folder) if by_curriculum else [],
    }
    paths.cells.mkdir(parents=True, exist_ok=True)
    if study.arms[run.arm].votes is None:
        write_json(paths.cell(run.id), cell)
    results = json.loads((out / RESULTS).read_bytes())["sets"]
    for name, arm in study.arms.items():
        if arm.votes is None or (arm.of or name) != run.arm:
            continue
        sets = {
            of: {SAMPLED: _voted(result, arm.votes, arm.accounting)}
            for of, result in results.items()
        }
        own = run.id.replace(f".{run.arm}", f".{name}", 1)
        voted = {"id": own, "arm": name, "sets": sets, "curve": [], "schedule": []}
        write_json(paths.cell(own), {**cell, **voted})
