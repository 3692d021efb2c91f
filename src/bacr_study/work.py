"""One run of a study, from its config to its cell: ordinary training, ordinary evaluation."""

import dataclasses
import datetime
import hashlib
import json
import os
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bacr_jax import evaluate, train
from bacr_jax.config import io as config_io
from bacr_jax.config.cli import NEWEST, STOPPED
from bacr_jax.config.derived import HOLDOUT
from bacr_jax.documents import read_lines, read_object, write_atomically
from bacr_jax.evaluation.folder import RESULTS, read_samples
from bacr_jax.evaluation.job import graded_sets
from bacr_jax.evaluation.samples import GREEDY, SAMPLED, EvalSetting, Graded, number
from bacr_jax.methods import load_method
from bacr_jax.parallel.preemption import Preempted, PreemptionHandler
from bacr_jax.runs.folder import RunPaths, lock_when_free
from bacr_jax.runs.provenance import VERSIONED, commit
from bacr_study.cells import OF_GROUP, Cell, correct_digits, ids_digest, write_cell
from bacr_study.plan import PlannedRun
from bacr_study.spec import Arm, Study, Task, cell_id

# A pace, and seconds that passed beside others.
_NO_LAPS = {"time/tokens_per_s", "time/overlap"}


def run_one(study: Study, run: PlannedRun) -> int:
    """Trains and evaluates one run and writes its cells, if they aren't there.

    Goes on where it was stopped. 0, or the exit code of the command that did not get through.
    """
    if run.has_cells(study):
        print(f"{run.id}: its cells are there")
        return 0
    # Cells of equal settings share the run: the later one finds it finished.
    try:
        with PreemptionHandler() as handler:
            held = lock_when_free(run.folder.with_name(f"{run.folder.name}.lock"), handler.poll)
    except Preempted as signal:
        print(f"{signal}: stopped; the same command goes on", file=sys.stderr)
        return STOPPED
    with held:
        if run.has_cells(study):
            return 0
        config = run.place / "configs" / f"{run.id}.yaml"
        config.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(config, config_io.to_yaml(run.config))
        if not run.trained and (code := train.main(["--config", str(config)])):
            return code
        arguments, out = evaluation_of(study, run)
        if code := evaluate.main(arguments):
            return code
        write_cells(study, run, out)
    return 0


def evaluation_of(study: Study, run: PlannedRun) -> tuple[list[str], Path]:
    """The command line of `evaluate` for a run of the study, and the folder that it names."""
    how, task, arm = study.evaluation, study.task(run.task), study.arm(run.variant.arm)
    arguments = ["--run", str(run.folder), "--budgets", ",".join(map(str, task.budgets))]
    samples = study.samples_of(arm)
    arguments += ["--samples", str(samples), "--greedy", "--seed", str(how.seed)]
    arguments += ["--slots", str(how.slots)]
    if samples:
        arguments += ["--temperature", str(how.temperature), "--top-p", str(how.top_p)]
    if how.size is not None:
        arguments += ["--size", str(how.size)]
    for name in task.data:
        arguments += ["--data", name]
    votes = [study.arm(variant.arm) for variant in study.votes_over(run.variant)]
    matched = [vote.votes for vote in votes if vote.accounting == "matched_total"]
    if matched:
        arguments += ["--self-consistency", str(matched[0])]
    # Another command has another folder.
    what = hashlib.sha256(json.dumps(arguments[2:]).encode()).hexdigest()[:8]
    out = RunPaths(run.folder).later_evaluations / f"study-{what}"
    # A cell is the policy at the end of training: a choice would favour arms that vary.
    return [*arguments, "--step", NEWEST, "--out", str(out)], out


def entry_of(answers: Graded) -> dict[str, Any]:
    """One budget of a cell: means over problems and samples, and the verdicts."""
    wordless = [answer is None for row in answers.answers for answer in row]
    return {
        "accuracy": number(answers.correct.mean()),
        "mean_thinking_tokens": number(answers.thinking.mean()),
        "mean_total_tokens": number(answers.total.mean()),
        "forced_share": number(answers.forced.mean()),
        "no_answer_share": number(np.mean(wordless)),
        "correct": correct_digits(answers.correct.sum(1)),
    }


Drawn = Mapping[str, Mapping[EvalSetting, Graded]]


def read_graded(out: Path, task: Task) -> Drawn:
    """The answers of a finished evaluation, by set; hard levels of a task are a set, too."""
    read = read_samples(out)
    if task.hard_levels:
        hard = lambda samples: [one for one in samples if one.level in task.hard_levels]
        read |= {
            task.hard_set(name): {setting: hard(samples) for setting, samples in by_setting.items()}
            for name, by_setting in read.items()
        }
    return graded_sets(read)


def votes_of(out: Path, drawn: Drawn, arm: Arm) -> dict[str, Any]:
    """Sets of a Self-Consistency row, without verdicts problem by problem.

    The samples that vote are `drawn`, of the evaluation in the folder `out`.
    """
    sets: dict[str, Any] = {}
    for name, result in read_object(out / RESULTS)["sets"].items():
        each = {s.budget: entry_of(one) for s, one in drawn[name].items() if s.mode == SAMPLED}
        rows = result["self_consistency"][str(arm.votes)][arm.accounting]
        sets[name] = {SAMPLED: {}}
        for budget, row in rows.items():
            sets[name][SAMPLED][budget] = {
                **each[row["budget_each"]],
                "accuracy": row["value"],
                "mean_thinking_tokens": row["mean_thinking_tokens"],
                "mean_total_tokens": row["mean_total_tokens"],
                "correct": None,
            }
    return sets


def sets_of(drawn: Drawn, task: Task) -> dict[str, Any]:
    """An evaluation as parts of a cell: the task's budgets; others only serve votes."""
    found: dict[str, Any] = {"sets": {}, "problems_digest": {}, "levels_of": {}, "samples": {}}
    for name, by_setting in drawn.items():
        first = next(iter(by_setting.values()))
        found["problems_digest"][name] = ids_digest(first.ids)
        found["levels_of"][name] = "".join(map(str, first.levels.tolist()))
        modes: dict[str, Any] = {}
        for setting, answers in by_setting.items():
            if setting.budget in task.budgets:
                modes.setdefault(setting.mode, {})[str(setting.budget)] = entry_of(answers)
                found["samples"][setting.mode] = setting.samples
        found["sets"][name] = modes
    return found


# Metrics that show whether a policy is being ruined, by their names in a cell's curve.
_HEALTH = {
    "closed_answers": "rollout/closed_answers",
    "forced_share": "rollout/forced_share",
    "entropy": "policy/entropy",
}


def curve(folder: RunPaths) -> list[dict[str, Any]]:
    """Returns a record per training step.

    A record holds tokens and seconds so far, the step's reward, held-out accuracy (None if the step
    was not evaluated), and the shares of closed answers and of cut traces and the policy's entropy
    if the run recorded them.
    """
    evaluated = {
        record["step"]: record["anytime"][HOLDOUT][GREEDY]["mean"]
        for record in read_lines(folder.evaluations)
        if HOLDOUT in record["anytime"]
    }
    start = {"step": 0, "tokens": 0, "seconds": 0.0, "reward": None}
    points = [{**start, "accuracy": evaluated[0]}] if 0 in evaluated else []
    seconds = 0.0
    for record in read_lines(folder.metrics):
        laps = (name for name in record if name.startswith("time/") and name not in _NO_LAPS)
        seconds += sum(record[name] for name in laps)
        points.append(
            {
                "step": record["step"],
                "tokens": record["rollout/tokens_total"],
                "seconds": round(seconds, 3),
                "reward": record["reward/mean"],
                "accuracy": evaluated.get(record["step"]),
                **{name: record[key] for name, key in _HEALTH.items() if key in record},
            }
        )
    return points


def schedule(folder: RunPaths) -> list[dict[str, Any]]:
    """The curriculum step by step; empty where budgets follow none."""
    found = []
    for record in read_lines(folder.metrics):
        groups = sorted(int(key.rpartition("_")[2]) for key in record if "curriculum/mu_" in key)
        of_groups = [{k: record.get(f"{v}_{n}") for k, v in OF_GROUP.items()} for n in groups]
        found.append({"step": record["step"], "groups": of_groups})
    return found


def write_cells(study: Study, run: PlannedRun, out: Path) -> None:
    """The cells of a run and of the votes over its samples, evaluated into the folder `out`."""
    folder = RunPaths(run.folder)
    summary = read_object(folder.summary)
    task = study.task(run.task)
    drawn = read_graded(out, task)
    follows = load_method(run.config).follows_prior
    by_curriculum = follows and run.config.budget.prior == "curriculum"
    devices, machine = jax.devices(), f"{platform.machine()}, {os.cpu_count()} cores"
    cell = Cell(
        id=run.id,
        study_size=study.size,
        task=run.task,
        arm=run.variant.arm,
        seed=run.seed,
        value=run.variant.value,
        provenance={
            "commit": commit(),
            "versions": {name: version(name) for name in VERSIONED},
            "machine": f"{machine}, {len(devices)} x {devices[0].device_kind}",
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        },
        config_sha=run.digest,
        departures=summary["departures"],
        steps=summary["steps"],
        generated_tokens=summary["generated_tokens"],
        wall_seconds=round(summary["wall_seconds"], 1),
        **sets_of(drawn, task),
        curve=curve(folder),
        schedule=schedule(folder) if by_curriculum else [],
        evaluation=study.asked(run.task, run.variant.arm),
    )
    for vote in study.votes_over(run.variant):
        voted = dataclasses.replace(
            cell,
            id=cell_id(run.task, vote, run.seed),
            arm=vote.arm,
            sets=votes_of(out, drawn, study.arm(vote.arm)),
            curve=[],
            schedule=[],
            samples={SAMPLED: 1},
        )
        write_cell(run.place, voted)
    # The last one: with it, all are there.
    write_cell(run.place, cell)
