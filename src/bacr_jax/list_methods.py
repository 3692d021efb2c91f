"""Implements the command `bacr methods`, which lists the presets of the training methods.

A preset is a config in configs/methods that contains the settings of one method.

For each preset, the command also prints which settings have not been verified against the method's
publication. With --run, it prints the settings of a run that differ from the run's preset and from
the publication.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bacr_jax.config.cli import Parser, entry_point, uninterrupted
from bacr_jax.config.settings import resolve
from bacr_jax.config.shipped import locate, names


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = Parser(
        prog="bacr methods",
        description="Lists the presets in configs/methods, the method of each, and the settings "
        "whose published values were not compared with the publication or its code. With --run, "
        "lists the settings of a run that differ from its preset and from the publication.",
        epilog="Use a preset as an overlay: bacr train --config quickstart --config methods/grpo",
    )
    parser.add_argument("--run", type=Path, metavar="DIR", help="run folder")
    return parser.parse_args(argv)


def run_lines(run: Path) -> Iterator[str]:
    """Yields the output lines for a run.

    The lines contain the run's preset, the settings that differ from the preset, and the settings
    that differ from the method's publication.

    Raises:
      UserError: if the folder contains no run.
    """
    from bacr_jax.config import io as config_io
    from bacr_jax.config.presets import method_text, preset_of
    from bacr_jax.methods.published import departures
    from bacr_jax.methods.registry import load_method
    from bacr_jax.runs.saved_policy import read_config

    config = read_config(run)
    method = load_method(resolve(config).method)
    preset = preset_of(config_io.flatten(config))
    yield f"{run}: {method_text(preset, method.name)}"
    changes = preset.changes if preset is not None else ()
    differing = departures(resolve(config).method, method)
    for heading, lines in (
        ("differs from the preset in", changes),
        ("differs from the method's publication in", differing),
    ):
        yield f"{heading} {len(lines)} setting{'' if len(lines) == 1 else 's'}"
        yield from (f"  {line}" for line in lines)


def preset_line(name: str) -> str:
    """Returns the output line of a preset: its name, its method, and its unverified settings.

    Args:
      name: name of the preset, such as `methods/gfpo`.
    """
    from bacr_jax.config import io as config_io
    from bacr_jax.methods.published import unverified
    from bacr_jax.methods.registry import make_method

    method = make_method(resolve(config_io.load([str(locate(name))], [])).method)
    keys = unverified(method)
    remark = f"  not verified: {', '.join(keys)}" if keys else ""
    return f"{name.rpartition('/')[2]:20}{method.name}{remark}"


@entry_point
def main(argv: Sequence[str] | None) -> int:
    """Prints one line per preset, or the settings of a run, and returns the exit code."""
    arguments = parse(argv)
    # These functions import JAX, so they are called after --help has been handled.
    with uninterrupted():
        if arguments.run is not None:
            lines = list(run_lines(arguments.run))
        else:
            lines = [preset_line(name) for name in names(("methods",))]
    print(*lines, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
