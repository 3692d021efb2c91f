"""`bacr doctor [--config F]`: is this machine fit for a run?"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import yaml

import bacr_jax
from bacr_doctor.children import MOST_SECONDS, examine
from bacr_doctor.records import Record, Subject, as_object, line, overlay
from bacr_jax import documents, train
from bacr_jax.config import io as config_io
from bacr_jax.config.cli import Parser, entry_point, whole_number
from bacr_jax.config.shipped import locate
from bacr_jax.errors import UserError
from bacr_plan.devices import find

EPILOG = """\
Before a run, on the machine where it is to start:
  bacr doctor --config F --write-overlay fit.yaml
  bacr train --config F --config fit.yaml
Exit code: 0 if all is well or warned of, 1 if something is broken, 2 if the input can't be used."""


def _parser() -> Parser:
    parser = Parser(
        prog="bacr doctor",
        description="Tries every path of the library small: ten minutes at most, a page, a file.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, most = parser.add_argument, f"{MOST_SECONDS:g}"
    add("--config", action="append", default=[], metavar="FILE", help="of the run; repeatable")
    add("--out", type=Path, default=Path("doctor.json"), metavar="FILE", help="doctor.json")
    add("--write-overlay", type=Path, metavar="FILE", help="writes the keys that go round it")
    add("--device", metavar="NAME", help="data sheet to hold it against, as in plan; its own")
    add("--seconds", default=most, metavar="N", help=f"most of all checks ({most})")
    add("overrides", nargs="*", metavar="key.sub=value")
    return parser


def read_subject(argv: Sequence[str] | None) -> tuple[Subject, argparse.Namespace]:
    """What a command line asks about, checked; UserError: it can't be used."""
    arguments = _parser().parse_intermixed_args(argv)
    if arguments.overrides and not arguments.config:
        raise UserError("command line: keys without a config; write --config F before them")
    configs = [locate(given).resolve() for given in arguments.config or ()]
    for path in filter(None, (arguments.out, arguments.write_overlay)):
        if path.resolve() in configs:
            raise UserError(f"{path}: is a config that this command reads; write another file")
        try:
            with tempfile.TemporaryFile(dir=path.absolute().parent):
                fits = not path.is_dir()
        except OSError:
            fits = False
        if not fits:
            raise UserError(f"{path}: no file can be written there; write FILE in a folder")
    if arguments.out.resolve() == (arguments.write_overlay or Path()).resolve():
        raise UserError(f"--write-overlay {arguments.out}: is that of --out too; write another")
    if not whole_number(arguments.seconds, most=86400):
        raise UserError(f"--seconds: found {arguments.seconds!r}; write 1 to 86400")
    config = config_io.load(arguments.config or ["quickstart"], arguments.overrides)
    train.check(config)
    if arguments.device is not None:
        find(arguments.device)
    return Subject(config, bool(arguments.config), arguments.device), arguments


@entry_point
def main(argv: Sequence[str] | None) -> int:
    """Entry point: 0 all is well or warned of, 1 something is broken, 2 bad input."""
    subject, arguments = read_subject(argv)
    # After the command line is read: they import JAX.
    from bacr_doctor.checks import CHECKS

    records: list[Record] = []
    started = time.monotonic()
    for record in examine(CHECKS, subject, float(arguments.seconds)):
        records.append(record)
        print(line(record), flush=True)
    seconds = round(time.monotonic() - started, 1)
    said = as_object(records, version=bacr_jax.__version__, seconds=seconds)
    documents.write_json(arguments.out, said)
    if arguments.write_overlay is not None:
        documents.write_atomically(arguments.write_overlay, yaml.safe_dump(overlay(records)))
    count = {s: sum(one.status == s for one in records) for s in ("ok", "warn", "broken")}
    totals = ", ".join(f"{number} {status}" for status, number in count.items())
    print(f"{len(records)} checks: {totals}; {seconds:.0f} s; {arguments.out}")
    return 1 if count["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
