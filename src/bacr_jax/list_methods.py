"""Implements the command `bacr methods`, which lists the presets of the training methods.

For each preset, the command also lists the settings whose values have not been verified against the
method's publication.
"""

import argparse
import sys
from collections.abc import Sequence

from bacr_jax.config.cli import Parser, entry_point, uninterrupted
from bacr_jax.config.shipped import locate, names


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line. The only option is --help."""
    parser = Parser(
        prog="bacr methods",
        description="Lists the presets in configs/methods, the method of each, and the settings "
        "whose published values were not compared with the publication or its code.",
        epilog="Use a preset as an overlay: bacr train --config quickstart --config methods/grpo",
    )
    return parser.parse_args(argv)


def preset_line(name: str) -> str:
    """Returns the output line of a preset: its name, its method, and the unverified settings.

    Args:
      name: name of the preset, such as `methods/gfpo`.
    """
    from bacr_jax.config import io as config_io
    from bacr_jax.methods.published import unverified
    from bacr_jax.methods.registry import make_method

    method = make_method(config_io.load([str(locate(name))], []))
    keys = unverified(method)
    remark = f"  not verified: {', '.join(keys)}" if keys else ""
    return f"{name.rpartition('/')[2]:20}{method.name}{remark}"


@entry_point
def main(argv: Sequence[str] | None) -> int:
    """Prints one line per preset and returns the exit code."""
    parse(argv)
    # `preset_line` imports JAX, so it is called after --help has been handled.
    with uninterrupted():
        lines = [preset_line(name) for name in names(("methods",))]
    print(*lines, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
