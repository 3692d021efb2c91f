"""Implements `bacr report`, which writes the report of a run or a comparison of several runs."""

import sys
from collections.abc import Sequence
from pathlib import Path

from bacr_jax.config.cli import Parser, entry_point, uninterrupted
from bacr_jax.errors import UserError


@entry_point
def main(argv: Sequence[str] | None) -> None:
    """Runs `bacr report`. Invalid input prints one line to stderr and exits with code 2."""
    parser = Parser(
        prog="bacr report",
        description="Writes the report of a run, finished or in progress, or one page that "
        "compares several runs, and prints its path.",
        advice="run bacr report --run DIR",
    )
    parser.add_argument(
        "--run",
        type=Path,
        required=True,
        action="append",
        metavar="DIR",
        help="run folder; repeatable, several runs are compared",
    )
    parser.add_argument(
        "--label",
        action="append",
        default=[],
        metavar="NAME",
        help="label of a run in a comparison, one for each --run; default: name of its folder",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="file to write; default: DIR/report.html, or comparison.html in the first DIR for "
        "several runs",
    )
    arguments = parser.parse_args(argv)
    # Imports JAX, which --help does not need.
    with uninterrupted():
        from bacr_jax.report.page import write_comparison, write_report

    if len(arguments.run) > 1:
        print(write_comparison(arguments.run, arguments.label, arguments.out))
    elif arguments.label:
        raise UserError(
            "--label: labels distinguish several runs, but only one run was passed; pass a "
            "second --run, or leave out --label"
        )
    else:
        print(write_report(arguments.run[0], arguments.out))


if __name__ == "__main__":
    sys.exit(main())
