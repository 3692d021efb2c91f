"""Implements the command `bacr keys [SECTION]`, which lists the keys of a config.

For each key, it prints the default, the meaning and the possible values.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence

from bacr_jax.config import io as config_io
from bacr_jax.config.cli import Parser, entry_point


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = Parser(
        prog="bacr keys",
        description="Lists the keys of a config with default, meaning and possible values. "
        "docs/configuration.md has the same list.",
    )
    parser.add_argument(
        "section",
        nargs="?",
        metavar="SECTION",
        help="only the keys of this section, such as budget, or one key, such as budget.max",
    )
    return parser.parse_args(argv)


@entry_point
def main(argv: Sequence[str] | None) -> int:
    """Prints the keys and returns the exit code."""
    arguments = parse(argv)
    print(config_io.help_text(shutil.get_terminal_size().columns, arguments.section))
    return 0


if __name__ == "__main__":
    sys.exit(main())
