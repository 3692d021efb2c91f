"""`bacr report --run DIR`: report.html; with several, one page that compares them."""

import sys
from collections.abc import Sequence
from pathlib import Path

from bacr_jax.config.cli import Parser, entry_point, uninterrupted
from bacr_jax.errors import UserError


@entry_point
def main(argv: Sequence[str] | None) -> None:
    """Entry point: 0 when written, 2 with one line on stderr when the input can't be used."""
    parser = Parser(
        prog="bacr report",
        description="Writes the report of a run, finished or under way, or one page that compares "
        "several; prints where it is.",
        advice="write bacr report --run DIR",
    )
    parser.add_argument(
        "--run",
        type=Path,
        required=True,
        action="append",
        metavar="DIR",
        help="run folder; repeatable: several runs are compared",
    )
    parser.add_argument(
        "--label",
        action="append",
        default=[],
        metavar="NAME",
        help="what to call a run of a comparison, one for each --run; default: its folder's name",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="DIR/report.html by default, comparison.html in the first DIR for several",
    )
    arguments = parser.parse_args(argv)
    # Imports JAX, which --help does not need.
    with uninterrupted():
        from bacr_jax.report.page import write_comparison, write_report

    if len(arguments.run) > 1:
        print(write_comparison(arguments.run, arguments.label, arguments.out))
    elif arguments.label:
        raise UserError("--label: names runs of a comparison; write a second --run, or no --label")
    else:
        print(write_report(arguments.run[0], arguments.out))


if __name__ == "__main__":
    sys.exit(main())
