"""Implements the command `bacr configs`, which prints one line for each config of the package."""

import argparse
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence

from bacr_jax.config.cli import Parser, entry_point
from bacr_jax.config.shipped import OVERLAYS, STUDIES, description, names

# Width of the column with the names, in characters.
_NAME_WIDTH = 24
# Heading and folders of each group of configs, in the order of printing.
_GROUPS = (
    ("bacr train --config NAME", ("", "examples")),
    ("methods, over one of these; bacr train --config quickstart --config NAME", (OVERLAYS,)),
    ("bacr study --config NAME", STUDIES),
)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line. The only option is --help."""
    parser = Parser(
        prog="bacr configs",
        description="Lists the configs of the package. Each name can be written as --config NAME; "
        "a YAML file of your own can be written there too.",
    )
    return parser.parse_args(argv)


def lines(width: int) -> Iterator[str]:
    """Yields the lines of the list: a heading for each group, and one line for each config.

    Args:
      width: maximum line width in characters. Values below 60 are raised to 60.
    """
    for index, (heading, folders) in enumerate(_GROUPS):
        if index:
            yield ""
        yield f"{heading}:"
        group = names(folders)
        for name in group:
            text = textwrap.shorten(
                description(name), max(width, 60) - _NAME_WIDTH - 2, placeholder=" ..."
            )
            yield f"  {name.rpartition('/')[2]:{_NAME_WIDTH}}{text}"


@entry_point
def main(argv: Sequence[str] | None) -> int:
    """Prints the list and returns the exit code."""
    parse(argv)
    print(*lines(shutil.get_terminal_size().columns), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
