"""`python -m bacr_jax.report --run DIR`: report.html, one self-contained file."""

import sys
from collections.abc import Sequence
from pathlib import Path

from bacr_jax.config.cli import Parser, refusal
from bacr_jax.errors import UserError
from bacr_jax.report.page import write_report


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point: 0 when written, 2 with one line on stderr when the input can't be used."""
    parser = Parser(
        prog="python -m bacr_jax.report",
        description="Writes the report of a run, finished or under way; prints where it is.",
        advice="write python -m bacr_jax.report --run DIR",
    )
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="run folder")
    parser.add_argument("--out", type=Path, metavar="FILE", help="DIR/report.html by default")
    try:
        arguments = parser.parse_args(argv)
        print(write_report(arguments.run, arguments.out))
    except (UserError, OSError) as error:
        return refusal(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
