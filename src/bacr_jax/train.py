"""`python -m bacr_jax.train --config F [key.sub=value ...]`: Algorithm 1, from config to report."""

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bacr_jax import config_io
from bacr_jax.config import Config
from bacr_jax.errors import UserError
from bacr_jax.run_folder import RunFolder, follow_run, open_run

EPILOG = "Every key can be overridden: python -m bacr_jax.train --config F seed=1 budget.max=64"


def parse(argv: Sequence[str] | None) -> Config:
    """The config that the command line asks for, checked, before any device work.

    Raises:
      UserError: the config can't be used.
      SystemExit: nothing is to be trained (`--help`, `--check`), or the options are unknown.
    """
    parser = argparse.ArgumentParser(
        prog="python -m bacr_jax.train",
        description="Train a policy to reason within a token budget.",
        epilog=EPILOG,
        add_help=False,
    )
    parser.add_argument(
        "--config", action="append", default=[], metavar="FILE", help="repeatable; later files win"
    )
    parser.add_argument("--check", action="store_true", help="only check the config")
    parser.add_argument("--help", "-h", action="store_true", help="show this and every key")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    arguments = parser.parse_args(argv)
    if arguments.help:
        print(parser.format_help())
        print(config_io.help_text(shutil.get_terminal_size().columns))
        raise SystemExit(0)
    if not arguments.config:
        raise UserError("command line: no config; write --config configs/quickstart.yaml")
    config = config_io.load(arguments.config, arguments.overrides)
    config_io.check(config)
    if arguments.check:
        print(f"{', '.join(arguments.config)}: a good config")
        raise SystemExit(0)
    return config


def joint_run(config: Config) -> RunFolder:
    """The run folder: opened by the first process, after which the others follow.

    Raises:
      UserError: it can't be used.
      SystemExit: the first process has said why it can't.
    """
    from bacr_jax.parallel import processes

    path = Path(config.output.dir)
    if not processes.join():
        return open_run(path, config)
    if not processes.is_first():
        if not processes.from_first(np.bool_(False)):
            raise SystemExit(2)
        return follow_run(path)
    opened = None
    try:
        opened = open_run(path, config)
    finally:
        processes.from_first(np.bool_(opened is not None))
    return opened


def train(config: Config, folder: RunFolder) -> dict[str, Any]:
    """Runs a config to its end in an opened run folder and returns its summary."""
    # JAX is imported once the config is known to be good.
    from bacr_jax.trainer import Trainer

    started = time.time()
    try:
        trainer = Trainer(config, folder)
    except UserError:
        folder.discard()
        raise
    state, step = trainer.start()
    trainer.evaluate(state, step, "before")
    with trainer.training(state, step):
        while not trainer.finished(state, step):
            state = trainer.iterate(state, step)
            step += 1
            trainer.maintain(state, step)
    trainer.evaluate(state, step, "after")
    return trainer.finish(state, step, time.time() - started)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point: 0 when trained, 2 with one line on stderr when the input can't be used."""
    try:
        config = parse(argv)
        with joint_run(config) as folder:
            train(config, folder)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
