"""Command line of the variance study: `python -m research.variance --config FILE`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bacr_jax.config.cli import Parser, entry_point
from bacr_study.study_file import merged
from research.variance import main as laboratory

EPILOG = (
    "Keys of the file, such as seeds=[0] or questions=16, can be overridden. The same command "
    "resumes a measurement that was stopped. Exit codes: 0 done, 2 bad input."
)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = Parser(
        prog="python -m research.variance",
        description="Measures gradient noise under every baseline; writes tables and figures.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "--config",
        required=True,
        type=Path,
        metavar="FILE",
        help="such as research/variance/variance.yaml",
    )
    parser.add_argument("--size", metavar="NAME", help="one of the file's sizes (its first)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("studies"),
        metavar="DIR",
        help="results go to DIR/NAME-SIZE (studies)",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    return parser.parse_intermixed_args(argv)


@entry_point
def main(argv: Sequence[str] | None) -> int:
    """Runs the study that the config file describes, and returns the exit code."""
    arguments = parse(argv)
    _, size = merged(arguments.config, arguments.size)
    output = arguments.out / f"{arguments.config.stem}-{size}"
    laboratory.main(arguments.config, size, [f"output={output}", *arguments.overrides])
    return 0


if __name__ == "__main__":
    sys.exit(main())
