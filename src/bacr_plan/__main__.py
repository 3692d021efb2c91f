"""Implements the command `bacr plan --config FILE --devices 8`.

The command predicts whether a run fits into GPU memory and how long a training step takes. It needs
no weights, training data or GPU.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from bacr_jax.config import ModelConfig
from bacr_jax.config import io as config_io
from bacr_jax.config.cli import Parser, entry_point
from bacr_jax.config.shipped import check_overlays, file_description, locate
from bacr_jax.errors import UserError
from bacr_jax.training import checks
from bacr_plan.devices import DEVICES, NETWORK_BANDWIDTH, find, smallest_with

if TYPE_CHECKING:
    from bacr_jax.parallel.mesh import MeshShape
    from bacr_plan.report import Plan
    from bacr_plan.workload import Workload

EPILOG = """\
Every key of the config can be overridden, as in training:
  bacr plan --config configs/qwen2.5-7b-math.yaml --devices 4 mesh.tensor=2
Exit code: 0 with a plan, whether the run fits or not; 2 for bad input."""

# Maximum value of `--devices`. No cluster has as many devices, and all meshes of this many devices
# can still be tried within a second.
MOST_DEVICES = 100_000
# Maximum value of `--device-memory` in GiB, more than a thousand times the memory of any GPU.
MOST_GIB = 1e6
# Maximum value of `--network` in GB/s, more than a thousand times the bandwidth of any network.
MOST_GB_PER_S = 1e6
DEFAULT_DEVICE = "a100-80"
# Number of GPUs in the description of a config, such as "MATH, all weights, 8 GPUs of 80 GB".
_DESCRIBED_GPUS = re.compile(r"\b(one|[1-9]\d{0,3}) GPUs? of\b")


def _parser() -> Parser:
    """Builds the command-line parser."""
    parser = Parser(
        prog="bacr plan",
        description="Predicts whether a run fits on GPUs and what a step takes, without a GPU.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="FILE",
        help="config file; repeatable, later files win",
    )
    parser.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="number of GPUs (the number in the first line of the config, or 1)",
    )
    parser.add_argument(
        "--device",
        metavar="NAME",
        help=f"one of {', '.join(DEVICES)} ({DEFAULT_DEVICE}, or the smallest one with "
        "--device-memory)",
    )
    parser.add_argument(
        "--device-memory",
        type=float,
        metavar="GIB",
        help="memory of a GPU in GiB (the device's)",
    )
    parser.add_argument(
        "--network",
        type=float,
        default=NETWORK_BANDWIDTH / 1e9,
        metavar="GB",
        help="bandwidth between machines of 8 GPUs in GB/s per GPU and direction (%(default)g)",
    )
    parser.add_argument(
        "--compile",
        default="gpu",
        choices=["gpu", "cpu", "none"],
        help="gpu: compile the programs with XLA's GPU compiler (needs the extra `plan`; without "
        "it as cpu). cpu: compile them with the CPU compiler. none: arithmetic only (gpu)",
    )
    parser.add_argument(
        "--download",
        action="store_true",
        help="download the config.json of a model.path such as Qwen/Qwen2.5-1.5B-Instruct if it is "
        "not in the hub's cache; weights are not needed",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object",
    )
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    return parser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses and checks the command-line arguments.

    Args:
      argv: the arguments without the program name, or None to use `sys.argv`.

    Returns:
      The arguments. `config` is the resolved `Config`. If `devices` (number of GPUs), `device`
      (name of the GPU) and `device_memory` (GiB) were not passed, they are filled in.

    Raises:
      UserError: if the config or a number is invalid.
    """
    arguments = _parser().parse_intermixed_args(argv)
    if not arguments.config:
        raise UserError(
            "command line: no config is given; pass for example --config qwen2.5-7b-math"
        )
    check_overlays(arguments.config)
    count = arguments.devices
    if count is not None and not 1 <= count <= MOST_DEVICES:
        raise UserError(
            f"--devices {count}: the number of GPUs is out of range; set a number from 1 to "
            f"{MOST_DEVICES}"
        )
    memory_gib = arguments.device_memory
    if memory_gib is not None and not 0 < memory_gib <= MOST_GIB:
        raise UserError(
            f"--device-memory {memory_gib}: the memory of a GPU in GiB must be above 0 and at "
            f"most {MOST_GIB:,.0f}; set for example 80"
        )
    if not 0 < arguments.network <= MOST_GB_PER_S:
        raise UserError(
            f"--network {arguments.network}: the bandwidth between machines in GB/s per GPU must "
            f"be above 0 and at most {MOST_GB_PER_S:,.0f}; set for example 25"
        )
    if arguments.device is None:
        arguments.device = DEFAULT_DEVICE if memory_gib is None else smallest_with(memory_gib)
    device = find(arguments.device)
    if memory_gib is None:
        arguments.device_memory = device.memory_gib
    config = config_io.load(arguments.config, arguments.overrides)
    checks.check(config)
    if count is None:
        arguments.devices = described_devices(arguments.config)
    model = with_local_shape(config.model, download=arguments.download)
    arguments.config = dataclasses.replace(config, model=model)
    return arguments


def described_devices(paths: Sequence[str]) -> int:
    """Returns the number of GPUs in the description of a config, or 1 if there is none.

    Shipped configs and copies of them start with a comment that describes the run and its GPUs.

    Args:
      paths: paths or names of readable configs. The first description with a number is used.
    """
    for path in paths:
        match = _DESCRIBED_GPUS.search(file_description(locate(path)))
        if match:
            return 1 if match[1] == "one" else int(match[1])
    return 1


def with_local_shape(model: ModelConfig, *, download: bool) -> ModelConfig:
    """Replaces the name of a model on the Hugging Face Hub by its folder in the local cache.

    If the cache does not contain the model, the name is kept, because the shapes of released models
    are known by name.

    Args:
      model: section `model` of the config.
      download: True to download the model's config.json if it is not in the cache.

    Raises:
      UserError: if the download fails.
    """
    from bacr_jax.model.hf.hub import is_hub_name, local_folder

    name = model.path
    if name is None or not is_hub_name(name):
        return model
    try:
        folder = local_folder(name, download=download, where="model.path", weights=False)
    except UserError:
        if download:
            raise
        return model
    return dataclasses.replace(model, path=folder)


@contextlib.contextmanager
def _muted() -> Iterator[None]:
    """Discards stderr output, such as warnings of JAX plugins that do not find a GPU."""
    sys.stderr.flush()
    original_stderr = os.dup(2)
    try:
        with open(os.devnull, "w") as null_device:
            os.dup2(null_device.fileno(), 2)
        yield
    finally:
        os.dup2(original_stderr, 2)
        os.close(original_stderr)


def answer(request: argparse.Namespace) -> "Plan":
    """Computes the plan for the parsed command line.

    Args:
      request: the arguments returned by `parse`.

    Raises:
      UserError: if the config cannot be planned, or if compilation fails.
    """
    with _muted():
        import jax

        # Use the CPU because other programs may be using the GPUs.
        jax.config.update("jax_platforms", "cpu")
        jax.devices()

    from bacr_plan.compiling import compile_run
    from bacr_plan.report import Plan

    work, layout = _sizes(request)
    device = dataclasses.replace(find(request.device), network_bandwidth=request.network * 1e9)
    compilation = compile_run(
        work,
        num_devices=request.devices,
        device=device,
        compiler=request.compile,
    )
    return Plan(work, layout, device, request.device_memory, compilation)


def _sizes(request: argparse.Namespace) -> "tuple[Workload, MeshShape]":
    """Computes the sizes and the mesh of a run.

    Raises:
      UserError: if there are none. If the run can use another number of GPUs without a change of
        its config, the error also names this number.
    """
    from bacr_plan.workload import sizes_of

    try:
        return sizes_of(request.config, request.devices)
    except UserError as error:
        mesh = request.config.mesh
        has_free_axis = mesh.fsdp == -1
        counts = (1, 8) if has_free_axis else (mesh.data * mesh.fsdp * mesh.tensor,)
        for count in counts:
            try:
                sizes_of(request.config, count)
            except UserError:
                continue
            raise UserError(f"{error}, or pass --devices {count}") from None
        raise


@entry_point
def main(argv: Sequence[str] | None) -> None:
    """Prints the plan as text or as JSON."""
    request = parse(argv)
    plan = answer(request)
    from bacr_plan.report import as_object
    from bacr_plan.report_text import as_text

    if request.json:
        print(json.dumps(as_object(plan)))
    else:
        print(as_text(plan))


if __name__ == "__main__":
    sys.exit(main())
