"""`python -m bacr_jax.report --run DIR`: report.html, one self-contained file."""

import sys
from collections.abc import Sequence
from pathlib import Path

from bacr_jax.config.cli import Parser, entry_point


@entry_point
def main(argv: Sequence[str] | None) -> None:
    """Entry point: 0 when written, 2 with one line on stderr when the input can't be used."""
    parser = Parser(
        prog="python -m bacr_jax.report",
        description="Writes the report of a run, finished or under way; prints where it is.",
        advice="write python -m bacr_jax.report --run DIR",
    )
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="run folder")
    parser.add_argument("--out", type=Path, metavar="FILE", help="DIR/report.html by default")
    arguments = parser.parse_args(argv)
    # Imports JAX, which --help does not need.
    from bacr_jax.report.page import write_report

    print(write_report(arguments.run, arguments.out))


if __name__ == "__main__":
    sys.exit(main())
