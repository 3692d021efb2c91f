"""`bacr train --config F [key.sub=value ...]`: Algorithm 1, from config to report."""

import contextlib
import dataclasses
import difflib
import shutil
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from bacr_jax.config import Config, shipped
from bacr_jax.config import io as config_io
from bacr_jax.config.atomics import allow_fast_additions
from bacr_jax.config.cli import Parser, entry_point, failure, quieten_orbax, uninterrupted
from bacr_jax.config.reproducible import make_reproducible
from bacr_jax.errors import UserError, faults_of
from bacr_jax.oom import OutOfMemory
from bacr_jax.runs import folder as run_folder
from bacr_jax.runs.folder import Resume, RunFolder, check_run_folder, open_run

if TYPE_CHECKING:
    from bacr_jax.training.events import Callback, Finished

EPILOG = (
    "Every key can be overridden: bacr train --config F seed=1 budget.max=64. The "
    "same command goes on with a run that was stopped. Exit codes: 0 trained, 2 the input can't be "
    "used, 75 stopped by a signal after saving a checkpoint, 1 anything else."
)


def _parser() -> Parser:
    about = "Train a policy to reason within a token budget."
    parser = Parser(prog="bacr train", description=about, epilog=EPILOG, add_help=False)
    add = parser.add_argument
    add(
        "--config",
        action="append",
        default=[],
        metavar="FILE",
        help="a YAML file, or the name of a config that ships with the package: "
        f"{', '.join(shipped.names())}; repeatable, later ones win",
    )
    add("--check", action="store_true", help="only check the config, its data and its model")
    add(
        "--resume",
        choices=get_args(Resume),
        default="auto",
        help="a run that output.dir holds: go on with it (auto), refuse it (never), or refuse to "
        "start without it (required)",
    )
    add(
        "--allow-change",
        action="append",
        default=[],
        metavar="KEY",
        help="repeatable; a key in which the run to go on with may differ, such as train.steps",
    )
    add(
        "--download",
        action="store_true",
        help="get a model.path such as Qwen/Qwen2.5-1.5B-Instruct from the hub if it is not in its "
        "cache",
    )
    add("--help", "-h", action="store_true", help="show this and every key")
    add("overrides", nargs="*", metavar="key.sub=value")
    return parser


def parse(argv: Sequence[str] | None) -> tuple[Config, Resume, tuple[str, ...]]:
    """What the command line asks for, checked, before any device work.

    Returns:
      The config, what to do with a run that is there, and the keys in which that may differ.

    Raises:
      SystemExit: nothing is to be trained (`--help`, `--check`).
    """
    parser = _parser()
    arguments = parser.parse_intermixed_args(argv)
    if arguments.help:
        print(parser.format_help())
        print(config_io.help_text(shutil.get_terminal_size().columns))
        raise SystemExit(0)
    if not arguments.config:
        raise UserError("command line: no config; write --config quickstart")
    config, allowed = config_io.load(arguments.config, arguments.overrides), arguments.allow_change
    check(config, allowed)
    if arguments.check:
        from bacr_jax.methods.registry import built_in_departures

        lines = check_inputs(config, arguments.resume, allowed, download=arguments.download)
        print(f"{', '.join(arguments.config)}: a good config; its data and its model are there")
        for line in (*lines, *built_in_departures(config)):
            print(f"  {line}")
        raise SystemExit(0)
    config = with_sets_that_are_there(with_local_model(config, download=arguments.download))
    config = with_prompt_date(config)
    return config, arguments.resume, tuple(allowed)


def check(config: Config, allowed: Sequence[str] = ()) -> None:
    """Refuses settings that can't work, alone or together, before any device work."""
    # Imports JAX, which no other check needs.
    with uninterrupted():
        from bacr_jax.methods.registry import problems

    config_io.check(config, also=problems)
    for key in allowed:
        if key not in config_io.flatten(config):
            near = difflib.get_close_matches(key, config_io.flatten(config), n=1, cutoff=0.0)
            raise UserError(f"--allow-change {key}: is no key of a config; write {near[0]}?")


def with_local_model(config: Config, *, download: bool) -> Config:
    """The config with the folder of the hub's cache in place of a model's name."""
    if config.model.path is None:
        return config
    from bacr_jax.model.hf.hub import local_folder

    path = local_folder(config.model.path, download=download, where="model.path")
    return dataclasses.replace(config, model=dataclasses.replace(config.model, path=path))


def begun_config(config: Config) -> Config | None:
    """The config of the run that is in the config's folder; None if there is none to be read."""
    # Whatever keeps it from being read is said where the folder is opened.
    with contextlib.suppress(UserError, OSError, ValueError):
        return run_folder.read_config_file(run_folder.RunPaths(run_path(config)).config)
    return None


def with_prompt_date(config: Config) -> Config:
    """The config with the date that its chat template writes: the run's, or today's for a new one.

    A template that writes no date has none.
    """
    from bacr_jax.prompts import prompt_date

    return prompt_date.with_prompt_date(config, begun_config(config))


def with_sets_that_are_there(config: Config) -> Config:
    """The config without the evaluation sets that data.eval_missing leaves out; says which."""
    from bacr_jax.questions.missing import without_missing

    config, lines = without_missing(config, begun_config(config), run_path(config))
    for line in lines:
        print(line, flush=True)
    return config


def check_inputs(
    config: Config, resume: Resume, allowed: Sequence[str], *, download: bool
) -> list[str]:
    """Refuses what training would before it uses a device, all of it in one error.

    Returns:
      Lines with the scores that verifiers give to reference answers.
    """
    from bacr_jax.parallel import processes
    from bacr_jax.runs.metrics import check_wandb
    from bacr_jax.training import start
    from bacr_jax.training.warmup_folder import check_warmup

    def look() -> None:
        processes.check_platform()
        lines.extend(start.check_inputs(found[-1]))

    found = [config]
    lines: list[str] = []
    faults = faults_of(
        lambda: found.append(with_local_model(found[-1], download=download)),
        lambda: found.append(with_sets_that_are_there(found[-1])),
        lambda: found.append(with_prompt_date(found[-1])),
        lambda: check_run_folder(run_path(config), found[-1], resume=resume, allowed=allowed),
        lambda: check_wandb(config),
        lambda: check_warmup(found[-1], run_folder.RunPaths(run_path(config))),
        look,
    )
    if faults:
        raise UserError(*faults)
    return lines


def run_path(config: Config) -> Path:
    """The run folder that a config names; ~ is the home folder."""
    try:
        return Path(config.output.dir).expanduser()
    except RuntimeError:
        raise UserError(
            f"output.dir={config.output.dir}: found no such home folder; write the path in full"
        ) from None


def joint_run(config: Config, resume: Resume, allowed: Sequence[str]) -> RunFolder:
    """The run folder: opened by the first process, after which the others follow."""
    import numpy as np

    from bacr_jax.parallel import processes
    from bacr_jax.runs.agreement import refuse_others, told_at_start

    path = run_path(config)
    if not processes.join():
        # A folder that can't be used is refused before devices are.
        check_run_folder(path, config, resume=resume, allowed=allowed)
        processes.check_platform()
        return open_run(path, config, resume=resume, allowed=allowed)
    processes.check_platform()
    refuse_others(told_at_start(config, {"--resume": resume, "--allow-change": sorted(allowed)}))
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


def train(
    config: Config,
    folder: RunFolder,
    poll: Callable[[], None] | None = None,
    callbacks: Sequence["Callback"] = (),
) -> "Finished":
    """Runs a config to its end in an opened run folder and returns its last event.

    `poll` is called wherever work can be left; it raises `Preempted` to stop with a checkpoint.
    """
    # JAX is imported once the config is known to be good.
    from bacr_jax.parallel.peers import watched
    from bacr_jax.parallel.preemption import Preempted
    from bacr_jax.training.events import CallbackRaised, Finished, Reporter, Started, frozen
    from bacr_jax.training.failures import TrainingFailed, VerifierFailed
    from bacr_jax.training.loop import Trainer

    with watched((Preempted, TrainingFailed, VerifierFailed, OutOfMemory)) as on_phase:
        try:
            trainer = Trainer(config, folder, poll, on_phase)
        except BaseException:
            folder.discard()
            raise
        state, step = _started(trainer, folder)
        reporter = Reporter(folder, callbacks, trainer.evaluated)
        try:
            reporter.send(Started(folder.path, trainer.method.name, step, trainer.steps))
            trainer.evaluate(state, step, "before")
            reporter.catch_up()
            with trainer.training(state, step):
                # What a stopped run still owed to this step.
                trainer.maintain(state, step)
                keep_export(trainer, state, step)
                while not trainer.finished(state, step):
                    state = trainer.iterate(state, step)
                    step += 1
                    reporter.step(step, trainer.steps, trainer.step_metrics)
                    trainer.maintain(state, step)
                    keep_export(trainer, state, step)
                    reporter.catch_up()
            trainer.save(state, step)
            keep_export(trainer, state, step, last=True)
            trainer.evaluate(state, step, "after")
            reporter.catch_up()
        except (Preempted, CallbackRaised) as error:
            trainer.leave(state, step)
            raise (error.error if isinstance(error, CallbackRaised) else error) from None
        done = Finished(folder.path, step, frozen(trainer.finish(state, step)))
        try:
            # The last checkpoint is whole by now.
            reporter.catch_up()
            reporter.send(done)
        except CallbackRaised as raised:
            raise raised.error from None
        return done


def keep_export(trainer: Any, state: Any, step: int, *, last: bool = False) -> None:
    """A Hugging Face folder of this step in exports/, if export.every is due or the run ends."""
    every, out = trainer.config.export.every, trainer.folder.exports / str(step)
    if every is None or step == 0 or (step % every and not last):
        return
    from bacr_jax.export.from_run import export
    from bacr_jax.parallel import processes

    if processes.text_from_first("there" if out.exists() else ""):
        return
    trainer.save(state, step)
    trainer.checkpoints.wait()
    trainer.poll()
    trainer.on_phase("export", step)
    refused = ""
    if trainer.writes:
        for left in trainer.folder.exports.glob(".*"):
            shutil.rmtree(left, ignore_errors=True)  # by a kill
        try:
            export(trainer.folder.path, out, step=step)
        except UserError as error:
            refused = str(error)
    # The others wait here, where no phase of theirs seems stuck.
    if refused := processes.text_from_first(refused):
        raise UserError(refused)
    trainer.progress.say(f"step {step} as a Hugging Face folder: {out}")


def _started(trainer: Any, folder: RunFolder) -> Any:
    """State and step to go on from; only then the folder takes over what --allow-change allowed."""
    try:
        state, step = trainer.start()
    except UserError as error:
        changed = folder.changed()
        if not changed:
            raise
        raise UserError(
            f"--allow-change: the run can't go on with another {', '.join(changed)} ({error}); "
            "nothing was changed: leave the new value out, or write another output.dir"
        ) from None
    folder.keep_config()
    return state, step


@entry_point
def main(argv: Sequence[str] | None) -> int:
    """Entry point; see EPILOG for the exit codes."""
    config, resume, allowed = parse(argv)
    # XLA reads its flags once, when the first device is used.
    allow_fast_additions()
    make_reproducible(config)
    with joint_run(config, resume, allowed) as folder:
        return _train(config, folder)


def _train(config: Config, folder: RunFolder) -> int:
    """`train`, with its ends as exit codes."""
    quieten_orbax()
    with uninterrupted():
        from bacr_jax.parallel.preemption import EXIT_CODE, Preempted, PreemptionHandler
        from bacr_jax.training.failures import TrainingFailed

    try:
        with PreemptionHandler() as interruption:
            train(config, folder, interruption.poll)
    except Preempted as signal:
        print(f"{signal}: stopped; the same command goes on", file=sys.stderr)
        return EXIT_CODE
    except TrainingFailed as error:
        return failure(str(error))
    except OutOfMemory as error:
        from bacr_plan.oom_hints import explain

        return failure(explain(error, config))
    return 0


def run(
    config: Config | str | Path | Sequence[str | Path],
    overrides: Sequence[str] = (),
    *,
    callbacks: Sequence["Callback"] = (),
    resume: Resume = "auto",
    allow_change: Sequence[str] = (),
) -> "Finished":
    """Trains as the command does, from a notebook or a script: `bacr_jax.train(config)`.

    A run that was stopped goes on where it was, and one that is finished is not trained again.

    Args:
      config: settings, or what stands after --config: the file or the name of a config, or several
        of which later ones win.
      overrides: `key.sub=value`, as on the command line.
      callbacks: functions of one event, told of everything that happens (docs/notebook.md says
        what they may do, and what becomes of a run in which one raises).
      resume: what to do with a run that output.dir holds: go on (auto), refuse it (never), or
        refuse to start without it (required).
      allow_change: keys in which the run to go on with may differ.

    Returns:
      The last event: the run's folder, its steps and the content of summary.json.

    Raises:
      UserError: the input can't be used; nothing was trained. Or a verifier gave no answer a score
        (`VerifierFailed`); a checkpoint was saved.
      KeyboardInterrupt: Ctrl-C, or a kernel's interrupt; a checkpoint was saved and the same call
        goes on.
      SystemExit: SIGTERM or SIGUSR1, or no server is left; the same, with code 75, with which a
        script that does not catch it ends.
      TrainingFailed: going on would be no use.
      OutOfMemory: a device has too little memory.
    """
    if not isinstance(config, Config):
        files = [config] if isinstance(config, str | Path) else config
        config = config_io.load(files)
    config = config_io.override(config, overrides)
    check(config, allow_change)
    config = with_sets_that_are_there(with_local_model(config, download=False))
    config = with_prompt_date(config)
    allow_fast_additions()
    make_reproducible(config)
    quieten_orbax()
    with joint_run(config, resume, allow_change) as folder, _interruptible() as poll:
        return train(config, folder, poll, callbacks)


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], None] | None]:
    """Yields a `poll` that raises on signals; at the end Ctrl-C and SIGTERM end the call.

    Ctrl-C becomes a KeyboardInterrupt, everything else that leaves a checkpoint a SystemExit with
    the command's own code. In a thread Python can't handle signals: there is no `poll` then, and
    what leaves a checkpoint is raised as it is, since a SystemExit would end the thread silently.
    """
    from bacr_jax.parallel.preemption import EXIT_CODE, Preempted, PreemptionHandler

    if threading.current_thread() is not threading.main_thread():
        print(
            "WARNING, bacr_jax.train: called in a thread, where signals can't be handled: SIGTERM "
            "and Ctrl-C save no checkpoint; call it in the main thread",
            file=sys.stderr,
        )
        yield None
        return
    with PreemptionHandler() as interruption:
        try:
            yield interruption.poll
        except Preempted as reason:
            if str(reason) == "SIGINT":
                message = "stopped with a checkpoint; the same call goes on"
                raise KeyboardInterrupt(message) from None
            print(f"{reason}: stopped; the same call goes on", file=sys.stderr)
            raise SystemExit(EXIT_CODE) from None


class _CallableModule(types.ModuleType):
    """`bacr_jax.train` is this module and can be called: the call is `run`.

    So `bacr_jax.train(config)` works beside `bacr train` and `bacr_jax.train.main`,
    in whatever order things were imported.
    """

    __call__ = staticmethod(run)


sys.modules[__name__].__class__ = _CallableModule

if __name__ == "__main__":
    sys.exit(main())
