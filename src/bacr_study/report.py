"""What a study says: tables, figures and the page, from the cells that are there."""

from collections.abc import Sequence
from pathlib import Path

from bacr_study import info
from bacr_study.configured import configured
from bacr_study.plan import PlannedRun, StudyPaths
from bacr_study.results import write_results
from bacr_study.spec import Arm, Study, Sweep
from bacr_study.work import hard_name

# The four parts of BACR in an ablation, as the paper calls them.
PARTS = ("BUP", "CAS", "TDR", "BCAE")
ACCOUNTING = {"per_sample": "b tokens a sample", "matched_total": "b tokens in all"}


def write_report(study: Study, runs: Sequence[PlannedRun], paths: StudyPaths) -> list[Path]:
    """Writes results.json, tables, figures and study.html from the cells that are there."""
    return write_results(paths.folder, study_info(study, runs), configured(study, runs))


def study_info(study: Study, runs: Sequence[PlannedRun]) -> info.StudyInfo:
    """The study as `results` reads it."""
    sets = {run.task: run.config.data.eval[0] for run in runs}
    tasks = []
    for name, task in study.tasks.items():
        main = task.data[0] if task.data else sets[name]
        hard = hard_name(main, task.hard_levels) if task.hard_levels else ""
        if "hard" in study.views and not hard:
            hard = main
        tasks.append(info.Task(name, task.label, main, hard, task.budgets))
    return info.StudyInfo(
        name=study.name,
        title=f"{study.title} ({study.paper})" if study.paper else study.title,
        tasks=tuple(tasks),
        arms=tuple(_arm(study, name, arm) for name, arm in study.arms.items()),
        seeds=study.seeds,
        views=study.views,
        references=study.reference,
        sweep=_sweep(study.sweep),
        parts=PARTS if "ablation" in study.views else (),
        focus=study.focus,
        size=study.size,
        clustered=study.clustered,
        contrasts=tuple((name, of, less) for name, (of, less) in study.contrasts.items()),
    )


def _arm(study: Study, name: str, arm: Arm) -> info.Arm:
    return info.Arm(
        id=name,
        label=arm.label,
        marks=("paper's row",) if arm.marked else (),
        parts=arm.parts or (),
        accounting=ACCOUNTING[arm.accounting] if arm.votes else "",
        sweep=_sweep(arm.sweep),
    )


def _sweep(sweep: Sweep | None) -> info.Sweep | None:
    if sweep is None:
        return None
    return info.Sweep(sweep.key, sweep.label or sweep.key, sweep.names, sweep.default)
