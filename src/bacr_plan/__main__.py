"""`bacr plan --config F --devices 8`: does a run fit, and what will a step cost.

Needs no weights, no data and no GPU.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from bacr_jax import train
from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.config.cli import Parser, entry_point
from bacr_jax.errors import UserError
from bacr_plan.devices import DEVICES, find, smallest_with

if TYPE_CHECKING:
    from bacr_plan.report import Plan

EPILOG = """\
Every key of the config can be overridden, as in training:
  bacr plan --config configs/qwen2.5-7b-math.yaml --devices 4 mesh.tensor=2
Exit code: 0 with an answer, whether it fits or not; 2 if the question can't be answered."""

# More than any cluster has; all layouts of so many are looked at in a second.
MOST_DEVICES = 100_000
# A thousand times the memory of any GPU.
MOST_GIB = 1e6


def _parser() -> Parser:
    parser = Parser(
        prog="bacr plan",
        description="Does a run fit on these GPUs, what will a step cost? No GPU is needed.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--config", action="append", default=[], metavar="FILE", help="repeatable; later files win")
    add("--devices", type=int, default=8, metavar="N", help="number of GPUs (8)")
    add(
        "--device",
        metavar="NAME",
        help=f"one of {', '.join(DEVICES)}; the smallest with enough memory if not given",
    )
    memory_help = "memory of a GPU in GiB; the device's if not given"
    add("--device-memory", type=float, metavar="GIB", help=memory_help)
    add(
        "--compile",
        default="gpu",
        choices=["gpu", "cpu", "none"],
        help="compile the real programs with XLA's GPU compiler (extra `plan`; without it with the "
        "CPU compiler), with the CPU compiler, or not at all: arithmetic only, a second",
    )
    add(
        "--download",
        action="store_true",
        help="get the config.json of a model.path such as Qwen/Qwen2.5-1.5B-Instruct from the hub "
        "if it is not in its cache; the weights are not needed",
    )
    add("--json", action="store_true", help="print one JSON object")
    add("overrides", nargs="*", metavar="key.sub=value")
    return parser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked: a config that is resolved, and numbers of devices and of GiB."""
    arguments = _parser().parse_intermixed_args(argv)
    if not arguments.config:
        raise UserError("command line: no config; write --config qwen2.5-7b-math")
    count, memory_gib = arguments.devices, arguments.device_memory
    if not 1 <= count <= MOST_DEVICES:
        raise UserError(f"--devices: found {count}; write a number of GPUs, 1 to {MOST_DEVICES}")
    if memory_gib is not None and not 0 < memory_gib <= MOST_GIB:
        raise UserError(f"--device-memory: found {memory_gib}; write GiB of a GPU, such as 80")
    if arguments.device is None:
        arguments.device = "a100-80" if memory_gib is None else smallest_with(memory_gib)
    device = find(arguments.device)
    arguments.device_memory = device.memory_gib if memory_gib is None else memory_gib
    config = config_io.load(arguments.config, arguments.overrides)
    train.check(config)
    arguments.config = with_local_shape(config, download=arguments.download)
    return arguments


def with_local_shape(config: Config, *, download: bool) -> Config:
    """The config with the folder of the hub's cache in place of a model's name, where it has one.

    Released models are known by their names, so that nothing need be there. `download` gets a shape
    that is not in the cache. UserError: one was asked for and can't be had.
    """
    from bacr_jax.model.hf.hub import is_hub_name, local_folder

    path = config.model.path
    if path is None or not is_hub_name(path):
        return config
    try:
        found = local_folder(path, download=download, where="model.path", weights=False)
    except UserError:
        if download:
            raise
        return config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, path=found))


@contextlib.contextmanager
def _muted() -> Iterator[None]:
    """Nothing is written to stderr meanwhile: JAX's GPU plugins report that they find no GPU."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def answer(request: argparse.Namespace) -> "Plan":
    """The plan of what `parse` gives; UserError: there is none, or the compiler refused it."""
    with _muted():
        import jax

        # The plan is made on the host, also where there are GPUs and somebody is using them.
        jax.config.update("jax_platforms", "cpu")
        jax.devices()

    from bacr_plan.compiling import compile_run
    from bacr_plan.report import Plan
    from bacr_plan.workload import sizes_of

    work, layout = sizes_of(request.config, request.devices)
    device, count = find(request.device), request.devices
    compilation = compile_run(work, num_devices=count, device=device, compiler=request.compile)
    return Plan(work, layout, device, request.device_memory, compilation)


@entry_point
def main(argv: Sequence[str] | None) -> None:
    """Entry point: 0 with a plan, fitting or not; 2 with one line on stderr for bad input."""
    request = parse(argv)
    plan = answer(request)
    from bacr_plan.report import as_object, as_text

    print(json.dumps(as_object(plan)) if request.json else as_text(plan))


if __name__ == "__main__":
    sys.exit(main())
