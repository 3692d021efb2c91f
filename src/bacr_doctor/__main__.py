"""`python -m bacr_jax.doctor [--config F]`: is this machine fit for a run?"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import yaml

import bacr_jax
from bacr_doctor import machine, paths, rates
from bacr_doctor.children import MOST_SECONDS, Check, examine
from bacr_doctor.records import Record, Subject, as_object, line, overlay
from bacr_jax import documents
from bacr_jax.config import io as config_io
from bacr_jax.config.cli import Parser, entry_point, whole_number
from bacr_jax.errors import UserError
from bacr_jax.methods.registry import problems
from bacr_plan.devices import find

EPILOG = """\
Before a run, on the machine where it is to start:
  python -m bacr_jax.doctor --config F --write-overlay fit.yaml
  python -m bacr_jax.train --config F --config fit.yaml
Exit code: 0 if all is well or warned of, 1 if something is broken, 2 if the input can't be used."""
_LEARNER, _SAMPLER = {"model.attention": "xla"}, {"rollout.attention": "xla"}
_REMAT = {"model.remat": "full", "model.scan_layers": True}
_REPORT = "report it with this page's JSON file; no run can be trusted on this machine"
_EXACT = "write model.compute_dtype=float32"
_SHORTER = f"{_EXACT}, or smaller data.max_prompt_tokens and budget.max"
_FOLDER = "write output.dir=FOLDER on another file system"
# In the order of the page; a name, what does it, and what to do where it breaks.
CHECKS = (
    Check("versions", machine.versions),
    Check("devices", machine.devices),
    Check("files", machine.files, advice=_FOLDER),
    Check("grader", machine.grader, advice="pip install math-verify, grading.memory_mb=2048"),
    Check("model folder", machine.model, advice="copy or download the folder again"),
    Check("chat template", machine.template, advice="write the folder of an Instruct model"),
    Check("forward", paths.forward, ("float32",), advice=_REPORT),
    Check("decode", paths.decode, ("float32",), advice=_REPORT),
    Check("update", paths.update, ("float32",), _REMAT, _REPORT),
    Check("LoRA", paths.update, ("float32", 4), _REMAT, _REPORT),
    Check("checkpoint", paths.checkpoint, advice=_FOLDER),
    Check("forward bfloat16", paths.forward, ("bfloat16",), _LEARNER, _EXACT),
    Check("decode bfloat16", paths.decode, ("bfloat16",), _SAMPLER, _EXACT),
    Check("update bfloat16", paths.update, ("bfloat16",), _LEARNER, _EXACT),
    Check("sampler and learner", paths.mismatch),
    Check("long decode", paths.decode, (None,), _LEARNER | _SAMPLER, _SHORTER),
    Check("long update", paths.update, (None,), _LEARNER, _SHORTER),
    Check("collectives", rates.collectives, advice="NCCL_P2P_DISABLE=1, NCCL_DEBUG=INFO"),
    Check("two processes", paths.two_processes, advice="NCCL_DEBUG=INFO, one process a box"),
    Check("rates", rates.rates),
    Check("plan", rates.plan),
)


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
    for path in filter(None, (arguments.out, arguments.write_overlay)):
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise UserError(f"{path}: no file can be written there; write FILE in a folder")
    if not whole_number(arguments.seconds, most=86400):
        raise UserError(f"--seconds: found {arguments.seconds!r}; write 1 to 86400")
    config = config_io.load(arguments.config or ["quickstart"], arguments.overrides)
    config_io.check(config, also=problems)
    if arguments.device is not None:
        find(arguments.device)
    return Subject(config, bool(arguments.config), arguments.device), arguments


@entry_point
def main(argv: Sequence[str] | None) -> int:
    """Entry point: 0 all is well or warned of, 1 something is broken, 2 bad input."""
    subject, arguments = read_subject(argv)
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
