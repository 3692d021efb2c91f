"""Command line of studies: `bacr study --config FILE [key=value ...]`.

A study trains and evaluates every combination of method, task and seed. The command then writes
tables, figures and an HTML page.
"""

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

from bacr_jax.config import Config
from bacr_jax.config.cli import STOPPED, Parser, entry_point, print_message
from bacr_jax.config.settings import resolve
from bacr_jax.config.shipped import STUDIES, locate
from bacr_jax.errors import UserError, faults_of
from bacr_jax.runs.progress import Progress, duration
from bacr_study import schedule
from bacr_study.archive import unpack
from bacr_study.plan import PlannedRun, find_run, folder_of, plan_runs
from bacr_study.spec import Study, cell_path
from bacr_study.study_file import read_study

EPILOG = (
    "Keys of the study, such as seeds=[0] or arms=[grpo,anytime], and config keys of every run, "
    "such as train.max_generated_tokens=100000, can be overridden. The same command resumes a "
    "study that was stopped. Exit codes: 0 done, 2 bad input, 75 stopped by a signal, 1 a run "
    "failed."
)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses and checks the command-line arguments.

    Args:
      argv: the arguments without the program name; None uses `sys.argv`.

    Returns:
      The parsed arguments. `config` is a path, even if the name of a shipped study was passed.

    Raises:
      UserError: if `--config` does not exist or `--jobs` is below 1.
    """
    parser = Parser(
        prog="bacr study",
        description="Runs a study, and writes its tables, figures and study.html.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "--config",
        required=True,
        metavar="FILE",
        help="a file, or the name of a study that ships with the package, such as main",
    )
    parser.add_argument(
        "--size",
        metavar="NAME",
        help="one of the study's sizes (its first)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("studies"),
        metavar="DIR",
        help="folder of all studies (studies)",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="runs at a time (as many as there are cores, or as the GPUs are enough for)",
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--dry-run",
        action="store_true",
        help="print runs, tokens and predicted time; run nothing",
    )
    mode.add_argument(
        "--list",
        action="store_true",
        help="print number and id of every run, for arrays of jobs; run nothing",
    )
    mode.add_argument(
        "--only",
        metavar="I",
        help="run one run, by number or id, in this process",
    )
    mode.add_argument(
        "--report",
        action="store_true",
        help="run nothing; write tables, figures and study.html from the finished runs",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args(argv)
    arguments.config = locate(arguments.config, STUDIES)
    if arguments.jobs is not None and arguments.jobs < 1:
        raise UserError(
            f"--jobs {arguments.jobs}: at least one run must be trained at a time; set it to 1 or "
            "more"
        )
    return arguments


def forecast(study: Study, runs: Sequence[PlannedRun], jobs: int) -> str:
    """Formats the plan that `--dry-run` prints.

    Args:
      study: the study, whose `tokens_per_second` is used to predict times.
      runs: all planned runs.
      jobs: number of runs that train at the same time.

    Returns:
      One line per run, with its number of tokens, its predicted training time and its state. A last
      line has the totals over the runs that still need training.
    """
    lines = []
    runs_to_train = 0
    tokens = 0
    seconds = 0.0
    # Runs with identical settings share a folder. Only the first of them is trained.
    first_of_folder = {run.folder: run for run in reversed(runs)}
    for number, run in enumerate(runs):
        run_seconds = None
        if run.tokens == 0:
            run_seconds = 0.0
        elif run.tokens is not None and study.tokens_per_second:
            run_seconds = run.tokens / study.tokens_per_second
        # Called for every run because it raises an error if a cell was made with different
        # settings.
        has_cells = run.has_cells(study)
        first = first_of_folder[run.folder]
        if first.id != run.id:
            state = f"shares the run of {first.id}"
        elif has_cells:
            state = "done"
        elif run.trained:
            state = "trained"
        else:
            state = ""
            runs_to_train += 1
            tokens += run.tokens or 0
            seconds += run_seconds or 0.0
        count = "?" if run.tokens is None else f"{run.tokens:,}"
        time = "?" if run_seconds is None else duration(run_seconds)
        lines.append(f"{number:4d}  {run.id:48s} {count:>14s} tokens  {time:>7s}  {state}")
    lines.append(
        f"{len(runs)} cells, {len(first_of_folder)} runs, {runs_to_train} of them to be trained: "
        f"{tokens:,} generated tokens; training takes about {duration(seconds / jobs)} with "
        f"{jobs} at a time, warm-ups and evaluations not counted"
    )
    return "\n".join(lines)


def warnings_of(study: Study, runs: Sequence[PlannedRun]) -> list[str]:
    """Returns the warnings of `--dry-run` about settings that should be changed before the runs."""
    from bacr_study.configured import held_out_budgets, held_out_warnings

    by_task: dict[str, list[list[int]]] = {task.id: [] for task in study.tasks}
    for (task_id, _), budgets in held_out_budgets(runs).items():
        if budgets not in by_task[task_id]:
            by_task[task_id].append(budgets)
    lines = []
    unused_gpus = schedule.unused_gpus_warning(study.devices_per_run)
    if unused_gpus:
        lines.append(unused_gpus)
    for task in study.tasks:
        for warning in held_out_warnings(task, by_task[task.id]):
            lines.append(
                f"WARNING, {warning}; to compare the two, set eval.budgets of the task before its "
                "first run"
            )
    return lines


def check_inputs(study: Study, runs: Sequence[PlannedRun]) -> None:
    """Checks that the models and data sets of all untrained runs can be loaded.

    Also checks that the runs can be evaluated after training (`check_evaluation`). Called before
    the first run starts, so that a missing input is reported immediately.

    Args:
      study: the study.
      runs: the runs whose results are missing.

    Raises:
      UserError: with one line for every model or data set that is missing or unreadable, and for
        every task that can't be evaluated.
    """
    import jax

    from bacr_jax.training import initialize
    from bacr_jax.training.checks import completed
    from bacr_study.configured import check_evaluation

    def check_run(config: Config) -> None:
        """Raises a `UserError` if the model or a data set of the config cannot be loaded."""
        initialize.check_inputs(resolve(completed(config, download=False)))

    # Use the CPU because this process would otherwise occupy GPU memory that the runs need.
    jax.config.update("jax_platforms", "cpu")
    # The inputs depend only on the model and the data, so one run per combination is enough.
    configs = {}
    for run in reversed(runs):
        if not run.trained:
            configs[repr((run.config.model, run.config.data))] = run.config
    checks = [functools.partial(check_run, config) for config in configs.values()]
    faults = faults_of(*checks)
    if faults:
        raise UserError(*faults)
    # The checks depend only on the task, the model, the data and the grace window.
    run_of_inputs = {}
    for run in runs:
        config = run.config
        run_of_inputs[run.task, repr((config.model, config.data, config.budget.grace))] = run
    checks = [functools.partial(check_evaluation, study, run) for run in run_of_inputs.values()]
    faults = faults_of(*checks)
    if faults:
        raise UserError(*dict.fromkeys(faults))


def run_missing(study: Study, runs: Sequence[PlannedRun], arguments: argparse.Namespace) -> int:
    """Trains and evaluates every run whose results are missing in the study's folder.

    Runs nothing if `--report` was passed.

    Returns:
      The exit code: 0 on success, 75 (`STOPPED`) if a signal stopped the study, 1 if a run failed.
    """
    # Imported here because the module imports JAX, which `--help` and `--list` do not need.
    from bacr_jax.parallel.preemption import Preempted, PreemptionHandler

    waiting = [run for run in runs if not run.has_cells(study)]
    if arguments.report:
        return 0
    check_inputs(study, waiting)
    unused_gpus = schedule.unused_gpus_warning(study.devices_per_run)
    if unused_gpus and waiting:
        print_message(unused_gpus)
    command = [
        sys.executable,
        *("-m", "bacr_study"),
        *("--config", str(arguments.config)),
        *("--size", study.size),
        *("--out", str(arguments.out)),
        *arguments.overrides,
        "--only",
    ]
    scheduler = schedule.RunScheduler(
        command=command,
        shares=schedule.shares(study.devices_per_run, arguments.jobs),
        waiting=waiting,
    )
    with Progress() as progress, PreemptionHandler() as handler:
        try:
            schedule.run_all(scheduler, runs, progress, handler.poll)
        except Preempted as signal:
            scheduler.stop()
            print_message(f"{signal}: stopped; run the same command to continue")
            return STOPPED
    return 1 if scheduler.failed else 0


def report(study: Study, runs: Sequence[PlannedRun], folder: Path) -> None:
    """Writes results.json, the tables, the figures and study.html from the stored results.

    Prints the path of each file.
    """
    from bacr_study.configured import configured, with_sets
    from bacr_study.results import write_results

    facts = configured(study, runs)
    files = write_results(folder, with_sets(study, runs), facts)
    print(*files, sep="\n")


def run_and_report(
    study: Study, runs: Sequence[PlannedRun], folder: Path, arguments: argparse.Namespace
) -> int:
    """Trains and evaluates the missing runs, then writes the report.

    The report is also written if some runs failed, as long as the results of at least one run
    exist.

    Returns:
      The exit code of `run_missing`.
    """
    code = run_missing(study, runs, arguments)
    paths = [cell_path(folder, id_) for id_ in study.cell_ids()]
    if code == STOPPED:
        return code
    # If every run failed, there are no results to report.
    if code == 0 or any(path.exists() for path in paths):
        report(study, runs, folder)
    return code


@entry_point
def main(argv: Sequence[str] | None) -> int:
    """Runs the command and returns its exit code (see `EPILOG`)."""
    arguments = parse(argv)
    study = read_study(arguments.config, size=arguments.size, overrides=arguments.overrides)
    folder = folder_of(study, arguments.out)
    unpack(folder)
    runs = plan_runs(study, folder)
    if arguments.list:
        # Each job of a job array passes one of these numbers to `--only`.
        lines = [f"{number} {run.id}" for number, run in enumerate(runs)]
        print(*lines, sep="\n")
        return 0
    if arguments.dry_run:
        jobs = schedule.planned_jobs(study.devices_per_run, arguments.jobs)
        print(*warnings_of(study, runs), forecast(study, runs, jobs), sep="\n")
        return 0
    if arguments.only is not None:
        from bacr_study.work import run_one

        schedule.end_with_parent()
        return run_one(study, find_run(runs, arguments.only))
    return run_and_report(study, runs, folder, arguments)


if __name__ == "__main__":
    sys.exit(main())
