"""Trains and evaluates one run of a study, and stores its results as a file (a cell).

Training and evaluation use the regular commands `train` and `evaluate`.
"""

import dataclasses
import datetime
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bacr_jax import evaluate, train
from bacr_jax.config import io as config_io
from bacr_jax.config.cli import NEWEST, STOPPED, print_message
from bacr_jax.config.derived import HOLDOUT
from bacr_jax.config.settings import resolve
from bacr_jax.evaluation.folder import RESULTS, read_samples
from bacr_jax.evaluation.samples import GREEDY, SAMPLED, EvalSetting, Graded, graded_sets, number
from bacr_jax.files import read_lines, read_object, write_atomically
from bacr_jax.methods import load_method
from bacr_jax.parallel.preemption import Preempted, PreemptionHandler
from bacr_jax.runs.folder import RunPaths, lock_when_free, open_run
from bacr_jax.runs.metrics import NOT_IN_DURATION
from bacr_jax.runs.provenance import VERSIONED, commit, processor
from bacr_jax.runs.saved_policy import read_config
from bacr_study.cells import OF_GROUP, Cell, correct_digits, ids_digest, write_cell
from bacr_study.configured import check_evaluation
from bacr_study.plan import PlannedRun
from bacr_study.spec import Arm, Study, Task, cell_id

# Metrics that reveal a degenerating policy, by their names in a cell's curve.
_HEALTH = {
    "closed_answers": "rollout/closed_answers",
    "forced_share": "rollout/forced_share",
    "entropy": "policy/entropy",
}

# Graded answers of an evaluation, by evaluation set and then by budget and decoding mode.
GradedSets = Mapping[str, Mapping[EvalSetting, Graded]]


def run_one(study: Study, run: PlannedRun) -> int:
    """Trains and evaluates one run and stores its results. Does nothing if they already exist.

    A run that was interrupted is resumed.

    Returns:
      0 on success, `STOPPED` if a signal arrived while waiting for the run's lock, or the exit code
      of the command that failed.
    """
    if run.has_cells(study):
        print(f"{run.id}: its cells are there")
        return 0
    # Runs with identical settings share a run folder. The lock makes the second process wait, and
    # it then finds the training finished.
    lock_path = run.folder.with_name(f"{run.folder.name}.lock")
    try:
        with PreemptionHandler() as handler:
            lock = lock_when_free(lock_path, handler.poll)
    except Preempted as signal:
        print_message(f"{signal}: stopped; run the same command to continue")
        return STOPPED
    with lock:
        # Another process may have written the cells while this one was waiting for the lock.
        if run.has_cells(study):
            return 0
        return _train_and_evaluate(study, run)


def _train_and_evaluate(study: Study, run: PlannedRun) -> int:
    """Trains a run unless it is already trained, evaluates it and stores its results.

    Returns:
      The exit code; see `run_one`.

    Raises:
      UserError: if the run can't be evaluated after training (`check_evaluation`).
    """
    check_evaluation(study, run)
    config = run.study_folder / "configs" / f"{run.id}.yaml"
    config.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(config, config_io.to_yaml(run.config))
    if run.trained:
        _follow_warmup(run)
    else:
        # The path of the warm-up differs if the studies were moved. The folder's name contains the
        # fingerprint of the warm-up, so it is the same warm-up.
        code = train.main(["--config", str(config), "--allow-change", "warmup.dir"])
        if code:
            return code
    arguments, out = evaluation_of(study, run)
    code = evaluate.main(arguments)
    if code:
        return code
    write_cells(study, run, out)
    return 0


def _follow_warmup(run: PlannedRun) -> None:
    """Records the present folder of the warm-up in a trained run, if the folder was moved.

    The evaluation of adapters reads the weights of the warm-up. Other runs don't need the warm-up
    any more, and stay unchanged.
    """
    if run.config.adapter.rank is None or run.warmup is None:
        return
    recorded = read_config(run.folder)
    if recorded.warmup.dir == run.config.warmup.dir:
        return
    warmup = dataclasses.replace(recorded.warmup, dir=run.config.warmup.dir)
    moved = dataclasses.replace(recorded, warmup=warmup)
    with open_run(run.folder, moved, resume="required", allowed=["warmup.dir"]) as folder:
        folder.keep_config()


def evaluation_of(study: Study, run: PlannedRun) -> tuple[list[str], Path]:
    """Returns the command-line arguments of `evaluate` for a run, and its output folder.

    The folder's name contains a digest of the arguments, so other evaluation settings use another
    folder.
    """
    evaluation = study.evaluation
    task = study.task(run.task)
    asked = run.asked(study, run.variant)
    samples = asked["samples"]
    settings = [
        *("--budgets", ",".join(map(str, task.budgets))),
        *("--samples", str(samples)),
        "--greedy",
        *("--seed", str(evaluation.seed)),
        *("--slots", str(evaluation.slots)),
    ]
    if samples:
        settings += ["--temperature", str(evaluation.temperature)]
        settings += ["--top-p", str(evaluation.top_p)]
    if evaluation.size is not None:
        settings += ["--size", str(evaluation.size)]
    for name in task.data:
        settings += ["--data", name]
    if "cut_every" in asked:
        settings += ["--every", str(asked["cut_every"])]
    if "swap" in asked:
        settings.append("--swap")
    votes = [study.arm(variant.arm) for variant in study.vote_numbers(run.variant)]
    matched_votes = [vote.votes for vote in votes if vote.accounting == "matched_total"]
    if matched_votes:
        settings += ["--self-consistency", str(matched_votes[0])]

    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:8]
    out = RunPaths(run.folder).later_evaluations / f"study-{digest}"
    # Evaluate the policy at the end of training, because selecting the best checkpoint would favour
    # arms whose training is unstable.
    arguments = ["--run", str(run.folder), *settings, "--step", NEWEST, "--out", str(out)]
    return arguments, out


def entry_of(answers: Graded) -> dict[str, Any]:
    """Computes the numbers that are stored for one evaluation set, decoding mode and budget.

    All numbers are means over problems and samples, except for `correct`, which has one digit per
    problem: its number of correct samples.
    """
    no_answer = [
        answer is None for answers_of_problem in answers.answers for answer in answers_of_problem
    ]
    return {
        "accuracy": number(answers.correct.mean()),
        "mean_thinking_tokens": number(answers.thinking.mean()),
        "mean_total_tokens": number(answers.total.mean()),
        "forced_share": number(answers.forced.mean()),
        "no_answer_share": number(np.mean(no_answer)),
        "closed_rate": number(answers.finished.mean()),
        "correct": correct_digits(answers.correct.sum(1)),
    }


def read_graded(out: Path, task: Task) -> GradedSets:
    """Reads the graded answers of a finished evaluation.

    If the task has hard levels, the problems at these levels form additional evaluation sets, named
    by `Task.hard_set`. Sets without problems at these levels are skipped.
    """
    samples_by_set = read_samples(out)
    hard_sets = {}
    if task.hard_levels:
        for name, by_setting in samples_by_set.items():
            hard_samples = {
                setting: [sample for sample in samples if sample.level in task.hard_levels]
                for setting, samples in by_setting.items()
            }
            # All settings have the same problems, so their samples are empty together.
            if any(hard_samples.values()):
                hard_sets[task.hard_set(name)] = hard_samples
    return graded_sets({**samples_by_set, **hard_sets})


def votes_of(out: Path, graded: GradedSets, arm: Arm) -> dict[str, Any]:
    """Returns the results of majority votes (Self-Consistency), as the field `sets` of a `Cell`.

    Votes do not have per-problem results, so `correct` is None.

    Args:
      out: the output folder of the evaluation.
      graded: the graded samples that the votes are computed from.
      arm: the Self-Consistency arm.
    """
    sets: dict[str, Any] = {}
    for name, result in read_object(out / RESULTS)["sets"].items():
        sampled = {
            setting.budget: entry_of(answers)
            for setting, answers in graded[name].items()
            if setting.mode == SAMPLED and setting.cut is None
        }
        rows = result["self_consistency"][str(arm.votes)][arm.accounting]
        by_budget = {}
        for budget, row in rows.items():
            by_budget[budget] = {
                **sampled[row["budget_each"]],
                "accuracy": row["value"],
                "mean_thinking_tokens": row["mean_thinking_tokens"],
                "mean_total_tokens": row["mean_total_tokens"],
                "correct": None,
            }
        sets[name] = {SAMPLED: by_budget}
    return sets


def sets_of(graded: GradedSets, task: Task) -> dict[str, Any]:
    """Returns the fields of a `Cell` that contain results.

    The fields are `sets`, `truncated`, `problems_digest`, `levels_of` and `samples`. Budgets that
    are not in `task.budgets` are left out, because they were only evaluated for majority votes.
    """
    sets: dict[str, Any] = {}
    truncated: dict[str, Any] = {}
    problems_digest = {}
    levels_of = {}
    samples = {}
    for name, by_setting in graded.items():
        first = next(iter(by_setting.values()))
        problems_digest[name] = ids_digest(first.ids)
        levels_of[name] = "".join(map(str, first.levels.tolist()))
        by_mode: dict[str, Any] = {}
        for setting, answers in by_setting.items():
            if setting.budget not in task.budgets:
                continue
            if setting.cut is not None:
                inputs = truncated.setdefault(name, {}).setdefault(setting.mode, {})
                by_cut = inputs.setdefault(str(setting.budget), {})
                by_cut[str(setting.cut)] = entry_of(answers)
                continue
            by_budget = by_mode.setdefault(setting.mode, {})
            by_budget[str(setting.budget)] = entry_of(answers)
            samples[setting.mode] = setting.samples
        sets[name] = by_mode
    return {
        "sets": sets,
        "truncated": truncated,
        "problems_digest": problems_digest,
        "levels_of": levels_of,
        "samples": samples,
    }


def curve(folder: RunPaths) -> list[dict[str, Any]]:
    """Reads the training curve from a run's metrics and evaluations.

    Returns:
      One record per training step, preceded by a record for step 0 if the initial policy was
      evaluated:
        step: the training step.
        tokens, seconds: cumulative generated tokens and wall-clock seconds.
        reward: mean reward of the step; None at step 0.
        accuracy: held-out accuracy; None if the step was not evaluated.
        closed_answers, forced_share, entropy: see `_HEALTH`; missing if the run did not record
          them.
    """
    accuracy_at = {
        record["step"]: record["anytime"][HOLDOUT][GREEDY]["mean"]
        for record in read_lines(folder.evaluations)
        if HOLDOUT in record["anytime"]
    }
    points: list[dict[str, Any]] = []
    if 0 in accuracy_at:
        points.append(
            {
                "step": 0,
                "tokens": 0,
                "seconds": 0.0,
                "reward": None,
                "accuracy": accuracy_at[0],
            }
        )
    seconds = 0.0
    for record in read_lines(folder.metrics):
        seconds += _seconds_of_step(record)
        health = {name: record[key] for name, key in _HEALTH.items() if key in record}
        points.append(
            {
                "step": record["step"],
                "tokens": record["rollout/tokens_total"],
                "seconds": round(seconds, 3),
                "reward": record["reward/mean"],
                "accuracy": accuracy_at.get(record["step"]),
                **health,
            }
        )
    return points


def _seconds_of_step(record: Mapping[str, Any]) -> float:
    """Returns the duration of a step in seconds, as the sum over its parts."""
    parts = [
        value
        for name, value in record.items()
        if name.startswith("time/") and name not in NOT_IN_DURATION
    ]
    return sum(parts)


def schedule(folder: RunPaths) -> list[dict[str, Any]]:
    """Reads the curriculum from a run's metrics.

    Returns:
      One record per training step: the step, and for every difficulty group the values of the
      metrics in `OF_GROUP`, such as its pass rate and its sampling weight.
    """
    records = []
    for record in read_lines(folder.metrics):
        keys = [key for key in record if "curriculum/mu_" in key]
        numbers = sorted(int(key.rpartition("_")[2]) for key in keys)
        groups = []
        for group in numbers:
            values = {}
            for name, metric in OF_GROUP.items():
                values[name] = record.get(f"{metric}_{group}")
            groups.append(values)
        records.append({"step": record["step"], "groups": groups})
    return records


def write_cells(study: Study, run: PlannedRun, out: Path) -> None:
    """Writes the results of a run, and of majority votes over its samples, to one file each.

    Args:
      study: the study.
      run: the run.
      out: the output folder of the run's evaluation.
    """
    graded = read_graded(out, study.task(run.task))
    cell = _cell_of(study, run, graded)
    for vote in study.vote_numbers(run.variant):
        vote_cell = dataclasses.replace(
            cell,
            id=cell_id(run.task, vote, run.seed),
            arm=vote.arm,
            sets=votes_of(out, graded, study.arm(vote.arm)),
            curve=[],
            schedule=[],
            truncated={},
            samples={SAMPLED: 1},
            evaluation=run.asked(study, vote),
        )
        write_cell(run.study_folder, vote_cell)
    # Written last, so that the existence of this cell implies that all of them exist.
    write_cell(run.study_folder, cell)


def _cell_of(study: Study, run: PlannedRun, graded: GradedSets) -> Cell:
    """Builds the stored results of a run from its run folder and its graded answers."""
    folder = RunPaths(run.folder)
    summary = read_object(folder.summary)
    has_schedule = (
        load_method(resolve(run.config).method).follows_prior
        and run.config.budget.prior == "curriculum"
    )
    return Cell(
        id=run.id,
        study_size=study.size,
        task=run.task,
        arm=run.variant.arm,
        seed=run.seed,
        value=run.variant.value,
        provenance=_provenance(jax.devices()),
        config_sha=run.digest,
        departures=summary["departures"],
        steps=summary["steps"],
        generated_tokens=summary["generated_tokens"],
        wall_seconds=round(summary["wall_seconds"], 1),
        **sets_of(graded, study.task(run.task)),
        curve=curve(folder),
        schedule=schedule(folder) if has_schedule else [],
        evaluation=run.asked(study, run.variant),
    )


def _provenance(devices: Sequence[jax.Device]) -> dict[str, Any]:
    """Returns the commit, package versions, machine and date that are stored with the results."""
    cpu = f"{processor()}, {os.cpu_count()} cores"
    return {
        "commit": commit(),
        "versions": {name: version(name) for name in VERSIONED},
        "machine": f"{cpu}, {len(devices)} x {devices[0].device_kind}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
