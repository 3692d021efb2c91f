"""`python -m bacr_jax.train --config F [key.sub=value ...]`: Algorithm 1, from config to report."""

import difflib
import logging
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.config.cli import Parser, entry_point, failure
from bacr_jax.config.reproducible import make_reproducible
from bacr_jax.errors import UserError
from bacr_jax.oom import OutOfMemory
from bacr_jax.runs.folder import Resume, RunFolder, check_run_folder, follow_run, open_run

EPILOG = (
    "Every key can be overridden: python -m bacr_jax.train --config F seed=1 budget.max=64. The "
    "same command goes on with a run that was stopped. Exit codes: 0 trained, 2 the input can't be "
    "used, 75 stopped by a signal after saving a checkpoint, 1 anything else."
)


def parse(argv: Sequence[str] | None) -> tuple[Config, Resume, tuple[str, ...]]:
    """What the command line asks for, checked, before any device work.

    Returns:
      The config, what to do with a run that is there, and the keys in which that may differ.

    Raises:
      UserError: the config can't be used.
      SystemExit: nothing is to be trained (`--help`, `--check`).
    """
    parser = Parser(
        prog="python -m bacr_jax.train",
        description="Train a policy to reason within a token budget.",
        epilog=EPILOG,
        add_help=False,
    )
    parser.add_argument(
        "--config", action="append", default=[], metavar="FILE", help="repeatable; later files win"
    )
    parser.add_argument(
        "--check", action="store_true", help="only check the config, its data and its model"
    )
    parser.add_argument(
        "--resume",
        choices=get_args(Resume),
        default="auto",
        help="a run that output.dir holds: go on with it (auto), refuse it (never), or refuse to "
        "start without it (required)",
    )
    parser.add_argument(
        "--allow-change",
        action="append",
        default=[],
        metavar="KEY",
        help="repeatable; a key in which the run to go on with may differ, such as train.steps",
    )
    parser.add_argument("--help", "-h", action="store_true", help="show this and every key")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.help:
        print(parser.format_help())
        print(config_io.help_text(shutil.get_terminal_size().columns))
        raise SystemExit(0)
    if not arguments.config:
        raise UserError("command line: no config; write --config configs/quickstart.yaml")
    config = config_io.load(arguments.config, arguments.overrides)
    # Imports JAX, which no other check needs.
    from bacr_jax.methods.registry import built_in_departures, problems

    config_io.check(config, also=problems)
    for key in arguments.allow_change:
        if key not in config_io.flatten(config):
            near = difflib.get_close_matches(key, config_io.flatten(config), n=1, cutoff=0.0)
            raise UserError(f"--allow-change {key}: is no key of a config; write {near[0]}?")
    allowed = tuple(arguments.allow_change)
    if arguments.check:
        check_inputs(config, arguments.resume, allowed)
        print(f"{', '.join(arguments.config)}: a good config; its data and its model are there")
        for departure in built_in_departures(config):
            print(f"  {departure}")
        raise SystemExit(0)
    return config, arguments.resume, allowed


def check_inputs(config: Config, resume: Resume, allowed: tuple[str, ...]) -> None:
    """What training would refuse before it uses a device: folders, data, tokenizer, model.

    Raises:
      UserError: the line that training would say.
    """
    from bacr_jax.training.start import open_inputs

    check_run_folder(run_path(config), config, resume=resume, allowed=allowed)
    open_inputs(config).environment.close()


def run_path(config: Config) -> Path:
    """The run folder that a config names; ~ is the home folder.

    Raises:
      UserError: nobody has the home folder.
    """
    try:
        return Path(config.output.dir).expanduser()
    except RuntimeError:
        raise UserError(
            f"output.dir={config.output.dir}: found no such home folder; write the path in full"
        ) from None


def joint_run(config: Config, resume: Resume, allowed: tuple[str, ...]) -> RunFolder:
    """The run folder: opened by the first process, after which the others follow.

    Raises:
      UserError: it can't be used.
      SystemExit: the first process has said why it can't.
    """
    from bacr_jax.parallel import processes

    path = run_path(config)
    if not processes.join():
        return open_run(path, config, resume=resume, allowed=allowed)
    if not processes.is_first():
        if not processes.from_first(np.bool_(False)):
            raise SystemExit(2)
        return follow_run(path)
    opened = None
    try:
        opened = open_run(path, config, resume=resume, allowed=allowed)
    finally:
        processes.from_first(np.bool_(opened is not None))
    return opened


def train(
    config: Config, folder: RunFolder, poll: Callable[[], None] | None = None
) -> dict[str, Any]:
    """Runs a config to its end in an opened run folder and returns its summary.

    Args:
      config: the settings.
      folder: where the run is kept; one that was stopped goes on.
      poll: called wherever work can be left; raises `Preempted` to stop with a checkpoint.

    Raises:
      Preempted: as asked, after saving.
      TrainingFailed: going on would be no use.
    """
    # JAX is imported once the config is known to be good.
    from bacr_jax.parallel.preemption import Preempted
    from bacr_jax.training.loop import Trainer

    try:
        trainer = Trainer(config, folder, poll)
    except UserError:
        folder.discard()
        raise
    state, step = _started(trainer, folder)
    try:
        trainer.evaluate(state, step, "before")
        with trainer.training(state, step):
            # What a stopped run still owed to this step.
            trainer.maintain(state, step)
            while not trainer.finished(state, step):
                state = trainer.iterate(state, step)
                step += 1
                trainer.maintain(state, step)
        trainer.save(state, step)
        trainer.evaluate(state, step, "after")
    except Preempted:
        trainer.leave(state, step)
        raise
    return trainer.finish(state, step)


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
    make_reproducible(config)
    with joint_run(config, resume, allowed) as folder:
        return _train(config, folder)


def _train(config: Config, folder: RunFolder) -> int:
    """`train`, with its ends as exit codes."""
    # Orbax logs what it also raises, with its whole traceback.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    from bacr_jax.parallel.preemption import EXIT_CODE, Preempted, PreemptionHandler
    from bacr_jax.training.loop import TrainingFailed

    try:
        with PreemptionHandler() as interruption:
            train(config, folder, interruption.poll)
    except Preempted as signal:
        print(f"{signal}: stopped; the same command goes on", file=sys.stderr)
        return EXIT_CODE
    except TrainingFailed as error:
        return failure(str(error))
    except OutOfMemory as error:
        from bacr_jax.planning.oom_hints import explain

        return failure(explain(error, config))
    return 0


if __name__ == "__main__":
    sys.exit(main())
