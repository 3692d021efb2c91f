"""`python -m bacr_jax.study --config F [key=value ...]`: methods x tasks x seeds, side by side."""

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

from bacr_jax.config import Config
from bacr_jax.config.cli import STOPPED, Parser, entry_point
from bacr_jax.config.shipped import STUDIES, locate
from bacr_jax.errors import UserError, faults_of
from bacr_jax.runs.progress import Progress, duration
from bacr_study import schedule
from bacr_study.archive import unpack
from bacr_study.plan import PlannedRun, find_run, folder_of, plan_runs
from bacr_study.spec import Study, cell_path
from bacr_study.study_file import read_study

EPILOG = (
    "Keys of the study, such as seeds=[0] or arms=[grpo,anytime], and keys of every run, such as "
    "train.max_generated_tokens=100000, can be overridden. The same command goes on with a study "
    "that was stopped. Exit codes: 0 done, 2 the input can't be used, 75 stopped by a signal, 1 a "
    "run failed."
)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        prog="bacr study",
        description="Runs a study, and writes its tables, figures and study.html.",
        epilog=EPILOG,
    )
    add = parser.add_argument
    add(
        "--config",
        required=True,
        metavar="FILE",
        help="such as configs/studies/main.yaml, or main, which ships with the package",
    )
    add("--size", metavar="NAME", help="one of the study's sizes; its first by default")
    add("--out", type=Path, default=Path("studies"), metavar="DIR", help="studies/ by default")
    add("--jobs", type=int, metavar="N", help="runs at a time; as many as cores, or GPUs allow")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--dry-run", action="store_true", help="list runs, tokens and time; run none")
    what.add_argument("--list", action="store_true", help="number and id of every run, for arrays")
    what.add_argument("--only", metavar="I", help="one run, by number or id, in this process")
    what.add_argument("--report", action="store_true", help="run nothing; write what cells hold")
    add("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args(argv)
    arguments.config = locate(arguments.config, STUDIES)
    if arguments.jobs is not None and arguments.jobs < 1:
        raise UserError(f"--jobs {arguments.jobs}: write 1 or more")
    return arguments


def forecast(study: Study, runs: Sequence[PlannedRun], jobs: int) -> str:
    """Runs with tokens, predicted training time and whether they are there, and the sums."""
    lines, todo, tokens, seconds = [], 0, 0, 0.0
    different = {run.folder: run for run in reversed(runs)}
    for number, run in enumerate(runs):
        time = run.tokens and study.tokens_per_second and run.tokens / study.tokens_per_second
        state = "done" if run.has_cells(study) else "trained" if run.trained else ""
        if different[run.folder].id != run.id:
            state = f"shares the run of {different[run.folder].id}"
        elif not state:
            todo += 1
            tokens += run.tokens or 0
            seconds += time or 0.0
        count = "?" if run.tokens is None else f"{run.tokens:,}"
        shown = "?" if time is None else duration(time)
        lines.append(f"{number:4d}  {run.id:48s} {count:>14s} tokens  {shown:>7s}  {state}")
    lines.append(
        f"{len(runs)} cells, {len(different)} runs, {todo} of them to be trained: {tokens:,} "
        f"generated tokens; training takes about {duration(seconds / jobs)} with {jobs} at a time, "
        "warm-ups and evaluations not counted"
    )
    return "\n".join(lines)


def check_inputs(runs: Sequence[PlannedRun]) -> None:
    """Refuses what models and sets of runs lack, before the first of them starts."""
    import jax

    from bacr_jax import train
    from bacr_jax.training import start

    def look(config: Config) -> None:
        here = train.with_local_model(config, download=False)
        start.check_inputs(train.with_sets_that_are_there(here))

    # Devices are for the runs: this process would hold their memory.
    jax.config.update("jax_platforms", "cpu")
    # What is read is named by a model and its data; the first run of each stands for the others.
    configs = [run.config for run in reversed(runs) if not run.trained]
    different = {repr((config.model, config.data)): config for config in configs}
    if faults := faults_of(*(functools.partial(look, config) for config in different.values())):
        raise UserError(*faults)


def run_missing(study: Study, runs: Sequence[PlannedRun], arguments: argparse.Namespace) -> int:
    """Makes every cell that is not there, with --report none; the exit code."""
    # Imports JAX, which neither --help nor a listing needs.
    from bacr_jax.parallel.preemption import Preempted, PreemptionHandler

    waiting = [run for run in runs if not run.has_cells(study)]
    if arguments.report:
        return 0
    check_inputs(waiting)
    command = [sys.executable, "-m", "bacr_jax.study", "--config", str(arguments.config)]
    command += ["--size", study.size, "--out", str(arguments.out), *arguments.overrides, "--only"]
    scheduler = schedule.Scheduler(
        command=command,
        shares=schedule.shares(study.devices_per_run, arguments.jobs),
        waiting=waiting,
    )
    with Progress() as progress, PreemptionHandler() as handler:
        try:
            schedule.run_all(scheduler, runs, progress, handler.poll)
        except Preempted as signal:
            scheduler.stop()
            print(f"{signal}: stopped; the same command goes on", file=sys.stderr)
            return STOPPED
    return 1 if scheduler.failed else 0


def report(study: Study, runs: Sequence[PlannedRun], folder: Path) -> None:
    """Writes results.json, tables, figures and study.html from the study's cells."""
    from bacr_study.configured import configured, with_sets
    from bacr_study.results import write_results

    known, study = configured(study, runs), with_sets(study, runs)
    print(*write_results(folder, study, known), sep="\n")


@entry_point
def main(argv: Sequence[str] | None) -> int:
    """Entry point; see EPILOG for the exit codes."""
    arguments = parse(argv)
    study = read_study(arguments.config, size=arguments.size, overrides=arguments.overrides)
    folder = folder_of(study, arguments.out)
    unpack(folder)
    runs = plan_runs(study, folder)
    if arguments.list:
        # A number is one of an array job.
        print(*(f"{number} {run.id}" for number, run in enumerate(runs)), sep="\n")
    elif arguments.dry_run:
        jobs = len(schedule.shares(study.devices_per_run, arguments.jobs))
        print(forecast(study, runs, jobs))
    elif arguments.only is not None:
        from bacr_study.work import run_one

        schedule.end_with_parent()
        return run_one(study, find_run(runs, arguments.only))
    else:
        code = run_missing(study, runs, arguments)
        cells = (cell_path(folder, id_) for id_ in study.cell_ids())
        # Where every run failed there is nothing to say.
        if code != STOPPED and (code == 0 or any(path.exists() for path in cells)):
            report(study, runs, folder)
        return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
