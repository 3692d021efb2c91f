"""Command-line entry point of `bacr doctor`.

Parses the options, runs every check in `checks.CHECKS`, prints one result per check and writes all
results to a JSON file.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import yaml

import bacr_jax
from bacr_doctor.children import MOST_SECONDS, run_checks
from bacr_doctor.records import Record, Subject, format_record, overlay_keys, to_json_object
from bacr_jax import files
from bacr_jax.config import io as config_io
from bacr_jax.config.cli import Parser, entry_point, whole_number
from bacr_jax.config.shipped import check_overlays, locate
from bacr_jax.errors import UserError
from bacr_jax.training import checks
from bacr_plan.devices import find

EPILOG = """\
Before a run, on the machine that will run it:
  bacr doctor --config F --write-overlay fit.yaml
  bacr train --config F --config fit.yaml
Exit code: 0 if no check is broken, 1 if a check is broken, 2 if the input is invalid."""
# Maximum value of --seconds: one day.
_LONGEST = 86400


def _parser() -> Parser:
    """Builds the command-line parser."""
    parser = Parser(
        prog="bacr doctor",
        description="Checks that this machine can run the library, on a small model, in at most "
        "ten minutes.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="FILE",
        help="config of the run to check for; repeatable",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("doctor.json"),
        metavar="FILE",
        help="file for the results as JSON (doctor.json)",
    )
    parser.add_argument(
        "--write-overlay",
        type=Path,
        metavar="FILE",
        help="file for a config with the keys that work around the problems",
    )
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="data sheet to compare with, a name of `bacr plan` (the device's own)",
    )
    parser.add_argument(
        "--seconds",
        default=f"{MOST_SECONDS:g}",
        metavar="N",
        help=f"time limit of all checks together ({MOST_SECONDS:g})",
    )
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    return parser


def read_subject(argv: Sequence[str] | None) -> tuple[Subject, argparse.Namespace]:
    """Parses and validates the command line.

    Returns:
      The config and devices to check (`Subject`), and the parsed options.

    Raises:
      UserError: if an option or the config is invalid.
    """
    options = _parser().parse_intermixed_args(argv)
    if options.overrides and not options.config:
        raise UserError(
            "command line: config keys (key=value) were passed without a config that they "
            "change; pass --config FILE before them"
        )
    if options.config:
        check_overlays(options.config)
    configs = [locate(config).resolve() for config in options.config]
    _check_output(options.out, configs)
    if options.write_overlay is not None:
        _check_output(options.write_overlay, configs)
        if options.write_overlay.resolve() == options.out.resolve():
            raise UserError(
                f"--write-overlay {options.out}: --out is the same file; use another file for one "
                "of them"
            )
    if not whole_number(options.seconds, most=_LONGEST):
        raise UserError(
            f"--seconds {options.seconds!r}: the time limit must be a whole number of seconds; "
            f"set it to 1 to {_LONGEST}"
        )
    config = config_io.load(options.config or ["quickstart"], options.overrides)
    checks.check(config)
    if options.device is not None:
        find(options.device)
    return Subject(config, bool(options.config), options.device), options


def _check_output(path: Path, configs: Sequence[Path]) -> None:
    """Checks that an output file can be written and does not overwrite one of the input configs.

    Raises:
      UserError: if the file cannot be written, or if it is one of `configs`.
    """
    if path.resolve() in configs:
        raise UserError(
            f"{path}: this file is a config that the command reads, and it would be overwritten; "
            "use another file"
        )
    try:
        with tempfile.TemporaryFile(dir=path.absolute().parent):
            writable = not path.is_dir()
    except OSError:
        writable = False
    if not writable:
        raise UserError(f"{path}: the file can't be written; use a file in an existing folder")


@entry_point
def main(argv: Sequence[str] | None) -> int:
    """Runs all checks and reports the results.

    Returns:
      The exit code: 1 if any check is broken, otherwise 0. Invalid input exits with code 2.
    """
    subject, options = read_subject(argv)
    # Imported only after the command line is parsed, because it imports JAX.
    from bacr_doctor.checks import CHECKS

    records: list[Record] = []
    started = time.monotonic()
    for record in run_checks(CHECKS, subject, float(options.seconds)):
        records.append(record)
        print(format_record(record), flush=True)
    seconds = round(time.monotonic() - started, 1)
    content = to_json_object(records, version=bacr_jax.__version__, seconds=seconds)
    files.write_json(options.out, content)
    if options.write_overlay is not None:
        overlay = yaml.safe_dump(overlay_keys(records))
        files.write_atomically(options.write_overlay, overlay)
    counts = Counter(record.status for record in records)
    totals = f"{counts['ok']} ok, {counts['warn']} warn, {counts['broken']} broken"
    print(f"{len(records)} checks: {totals}; {seconds:.0f} s; {options.out}")
    return 1 if counts["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
