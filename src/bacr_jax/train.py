"""Implements `bacr train --config F [key.sub=value ...]`, which trains a policy.

`main` is the entry point of the command line, and `run` is the entry point from Python. Both
validate the config before they use a device, open the run folder, and then call
`training.session.train`, which runs the training steps.
"""

import contextlib
import inspect
import os
import shlex
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.config.atomics import allow_fast_additions
from bacr_jax.config.cli import (
    Parser,
    entry_point,
    failure,
    print_message,
    silence_orbax,
    uninterrupted,
)
from bacr_jax.config.reproducible import make_reproducible
from bacr_jax.config.shipped import check_overlays
from bacr_jax.config.synonyms import check_options
from bacr_jax.errors import UserError
from bacr_jax.out_of_memory import OutOfMemory
from bacr_jax.runs.folder import (
    Resume,
    RunFolder,
    RunPaths,
    check_run_folder,
    open_run,
    run_path,
)
from bacr_jax.runs.restarts import GIVEN_UP, give_up_reason
from bacr_jax.training.checks import check, check_inputs, completed
from bacr_jax.training.failures import TrainingFailed

if TYPE_CHECKING:
    from bacr_jax.training.events import Callback, Finished

EPILOG = (
    "Every key can be overridden: bacr train --config F seed=1 train.steps=9. `bacr keys` lists "
    "all keys, `bacr keys budget` those of a section. The same command resumes a run that was "
    "stopped. Exit codes: 0 trained, 2 invalid input, 75 stopped by a signal after saving what can "
    f"be resumed, {GIVEN_UP} given up after too many restarts by Slurm, 1 any other error."
)


def _parser() -> Parser:
    """Returns the command-line parser.

    The parser has no built-in --help, because `parse` also prints the help of all config keys.
    """
    parser = Parser(
        prog="bacr train",
        description="Train a policy to reason within a token budget.",
        epilog=EPILOG,
        add_help=False,
    )
    add = parser.add_argument
    add(
        "--config",
        action="append",
        default=[],
        metavar="FILE",
        help="a YAML file, or the name of a config of the package (bacr configs lists them); "
        "repeatable, later ones override earlier ones",
    )
    add("--check", action="store_true", help="only check the config, its data and its model")
    add(
        "--resume",
        choices=get_args(Resume),
        default="auto",
        help="if output.dir contains a run: resume it (auto) or stop with an error (never); "
        "required: stop with an error if it contains none",
    )
    add(
        "--allow-change",
        action="append",
        default=[],
        metavar="KEY",
        help="repeatable; a key whose value may differ from the resumed run, such as train.steps",
    )
    add(
        "--download",
        action="store_true",
        help="download a model.path such as Qwen/Qwen2.5-1.5B-Instruct from the hub if it is not "
        "in the hub's cache",
    )
    add("--help", "-h", action="store_true", help="show this")
    add("overrides", nargs="*", metavar="key.sub=value")
    return parser


def parse(argv: Sequence[str] | None) -> tuple[Config, Resume, tuple[str, ...]]:
    """Parses and validates the command line without using any device.

    Returns:
      A tuple of the config, the value of --resume, and the keys of --allow-change. --resume defines
      what happens to an existing run in `output.dir`, and --allow-change lists keys whose values
      may differ from the existing run.

    Raises:
      SystemExit: if --help or --check was passed, which end the program without training.
      UserError: if the command line or the config is invalid.
    """
    parser = _parser()
    words = list(sys.argv[1:] if argv is None else argv)
    check_options(words, config_io.settings())
    arguments = parser.parse_intermixed_args(words)
    if arguments.help:
        print(parser.format_help())
        raise SystemExit(0)
    if not arguments.config:
        raise UserError(
            "command line: no config is given; pass for example --config quickstart (bacr "
            "configs lists all configs)"
        )
    check_overlays(arguments.config)
    config = config_io.load(arguments.config, arguments.overrides)
    allowed = tuple(arguments.allow_change)
    check(config, allowed)
    if arguments.check:
        lines = check_inputs(config, arguments.resume, allowed, download=arguments.download)
        print(f"{', '.join(arguments.config)}: the config is valid, and its data and model exist")
        print(*lines, sep="\n")
        command = ["bacr", "train", *(word for word in words if word != "--check")]
        print(f"next     {shlex.join(command)}")
        raise SystemExit(0)
    config = completed(config, download=arguments.download)
    return config, arguments.resume, allowed


def joint_run(config: Config, resume: Resume, allowed: Sequence[str]) -> RunFolder:
    """Initializes the distributed processes of the run and opens the run folder.

    The other processes continue after process 0 has opened the folder. Several processes count a
    restart of their Slurm job before they connect, because some of them may be missing. A single
    process counts it after it has locked the folder, so that a refused run changes no file.

    Args:
      config: config of the run.
      resume: what to do with an existing run in the folder (see `run`).
      allowed: keys whose values may differ from the existing run.

    Raises:
      UserError: if the folder can't be opened, or if the processes have different configs.
      TrainingFailed: if Slurm restarted the job too often without a new checkpoint.
      SystemExit: in all other processes, if process 0 can't open the folder.
    """
    import numpy as np

    from bacr_jax.parallel import processes
    from bacr_jax.runs.agreement import refuse_if_processes_differ, start_facts

    path = run_path(config.output)
    values = config_io.flatten(config)
    has_several = processes.settings(os.environ) is not None
    try:
        # Check the folder before the devices are initialized, so that an error is reported
        # quickly.
        check_run_folder(path, values, resume=resume, allowed=allowed)
    except UserError:
        # With several processes, process 0 reports the error after they have connected, because
        # the other processes would wait for it.
        if not has_several:
            raise
    else:
        if has_several:
            _check_restarts(RunPaths(path), config.warmup.dir)
    processes.join()
    processes.check_platform()
    if not has_several:
        with contextlib.ExitStack() as close_on_error:
            folder = close_on_error.enter_context(
                open_run(path, config, resume=resume, allowed=allowed)
            )
            _check_restarts(folder, config.warmup.dir)
            close_on_error.pop_all()
        return folder
    options = {"--resume": resume, "--allow-change": sorted(allowed)}
    refuse_if_processes_differ(start_facts(values, options))
    if not processes.is_first():
        if not processes.from_first(np.bool_(False)):
            raise SystemExit(2)
        return RunFolder(path, None)
    opened = None
    try:
        opened = open_run(path, config, resume=resume, allowed=allowed)
    finally:
        processes.from_first(np.bool_(opened is not None))
    return opened


def _check_restarts(paths: RunPaths, warmup_dir: str | None) -> None:
    """Stops a job that Slurm keeps restarting although it saves no progress between restarts.

    Args:
      paths: files of the run.
      warmup_dir: `warmup.dir`. None if the warm-up is in the run folder.

    Raises:
      TrainingFailed: the job was restarted too often without a new checkpoint. Raised in all
        processes.
    """
    reason = give_up_reason(paths, Path(warmup_dir or paths.warmup), os.environ)
    if reason:
        raise TrainingFailed(reason)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `bacr train`. The exit codes are documented in `EPILOG`.

    If this process is one of several and failed, it is ended here with its exit code.
    """
    code = _command(argv)
    # JAX is imported only if the command line is valid, because the import takes seconds.
    if "jax" in sys.modules:
        from bacr_jax.parallel.peers import exit_if_failed

        exit_if_failed(code)
    return code


@entry_point
def _command(argv: Sequence[str] | None) -> int:
    """Runs `bacr train` and returns its exit code."""
    config, resume, allowed = parse(argv)
    # These calls set XLA flags, which XLA reads once, when the first device is used.
    allow_fast_additions()
    make_reproducible(config.reproducible, config.output.dir)
    try:
        opened = joint_run(config, resume, allowed)
    except TrainingFailed as error:
        failure(str(error))
        return GIVEN_UP
    with opened as folder:
        return _train(config, folder)


def _train(config: Config, folder: RunFolder) -> int:
    """Trains in an opened run folder and returns the exit code of the command."""
    silence_orbax()
    with uninterrupted():
        from bacr_jax.parallel.preemption import EXIT_CODE, Preempted, PreemptionHandler

    try:
        with PreemptionHandler() as interruption:
            # Imported here because the import takes seconds, and a signal stops the run from here.
            from bacr_jax.training.session import train

            train(config, folder, interruption.poll)
    except Preempted as signal:
        print_message(f"{signal}: stopped; run the same command to continue")
        return EXIT_CODE
    except TrainingFailed as error:
        return failure(str(error))
    except OutOfMemory as error:
        from bacr_plan.oom_hints import explain

        return failure(explain(error, folder.config))
    return 0


def run(
    config: Config | str | Path | Sequence[str | Path],
    overrides: config_io.Overrides = (),
    *,
    callbacks: Sequence["Callback"] = (),
    resume: Resume = "auto",
    allow_change: Sequence[str] = (),
) -> "Finished":
    """Trains a policy from a notebook or a script.

    Users call this function as `bacr_jax.train(config)`. Like the command `bacr train`, it resumes
    a stopped run and does not train a finished run again.

    Args:
      config: a `Config`, a YAML file, the name of a config that ships with the package, or a
        sequence of files and names, in which later entries override earlier entries.
      overrides: overrides of config keys: a dict such as `{"train.steps": 20}`, or texts such as
        `train.steps=20`, as on the command line.
      callbacks: functions of one argument that are called with every event of the run.
        docs/notebook.md describes what a callback may do and how its exceptions are handled.
      resume: what to do with an existing run in `output.dir`. "auto" resumes it, and "never" raises
        an error. "required" resumes it, and raises an error if the folder contains no run.
      allow_change: keys whose values may differ from the resumed run.

    Returns:
      The last event. It contains the run folder, the number of steps and the content of
      summary.json.

    Raises:
      UserError: if the input is invalid and nothing was trained, or if a verifier scored no answer
        (`VerifierFailed`). In the second case a checkpoint was saved.
      KeyboardInterrupt: if Ctrl-C was pressed or the notebook's kernel was interrupted. The same
        call resumes the run from a checkpoint, which was saved if training had begun.
      SystemExit: if the process received SIGTERM or SIGUSR1, or no vLLM server is reachable. The
        same call resumes the run too. The exit code is 75.
      TrainingFailed: if training can't continue.
      OutOfMemory: if a device ran out of memory.
    """
    if not isinstance(config, Config):
        files = [config] if isinstance(config, str | Path) else list(config)
        if not files:
            raise UserError(
                'bacr_jax.train: no config is given; pass for example "quickstart" (bacr configs '
                "lists all configs)"
            )
        check_overlays(files, in_python=True)
        config = config_io.load(files)
    config = config_io.override(config, overrides)
    check(config, allow_change)
    config = completed(config, download=False)
    allow_fast_additions()
    make_reproducible(config.reproducible, config.output.dir)
    silence_orbax()
    with joint_run(config, resume, allow_change) as folder, _interruptible() as poll:
        # Imported here for the same reasons as in `_train`.
        from bacr_jax.training.session import train

        return train(config, folder, poll, callbacks)


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], None] | None]:
    """Yields a `poll` function that raises `Preempted` after a signal.

    On exit, `Preempted` is converted to KeyboardInterrupt if the signal was SIGINT, and otherwise
    to SystemExit with the exit code of the command.

    Python can handle signals only in the main thread. In any other thread, the context manager
    yields None and converts no exceptions, because a SystemExit would end the thread silently.
    """
    from bacr_jax.parallel.preemption import EXIT_CODE, Preempted, PreemptionHandler

    if threading.current_thread() is not threading.main_thread():
        print_message(
            "WARNING, bacr_jax.train: it was called outside the main thread, where signals can't "
            "be handled, so SIGTERM and Ctrl-C save no checkpoint; call it in the main thread"
        )
        yield None
        return
    with PreemptionHandler() as interruption:
        try:
            yield interruption.poll
        except Preempted as reason:
            if str(reason) == "SIGINT":
                message = "stopped; call it again with the same arguments to continue"
                raise KeyboardInterrupt(message) from None
            print_message(f"{reason}: stopped; call it again with the same arguments to continue")
            raise SystemExit(EXIT_CODE) from None


class _CallableModule(types.ModuleType):
    """Class of this module, which makes the module callable.

    A call of the module calls `run`. Therefore both `bacr_jax.train(config)` and
    `bacr_jax.train.main` work, regardless of the order of imports.
    """

    # `inspect.signature` would drop the first parameter of a static method.
    __signature__ = inspect.signature(run)
    __call__ = staticmethod(run)


sys.modules[__name__].__class__ = _CallableModule

if __name__ == "__main__":
    sys.exit(main())
