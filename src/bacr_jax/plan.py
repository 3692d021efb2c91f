"""`python -m bacr_jax.plan --config F --devices 8`: does a run fit, and what will a step cost.

Needs no weights, no data and no GPU.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.config.cli import Parser, entry_point, whole_number
from bacr_jax.config.values import shown
from bacr_jax.errors import UserError

if TYPE_CHECKING:
    from bacr_jax.parallel import MeshShape
    from bacr_jax.planning.compiling import Measured
    from bacr_jax.planning.report import Plan
    from bacr_jax.planning.workload import Workload

EPILOG = """\
Every key of the config can be overridden, as in training:
  python -m bacr_jax.plan --config configs/qwen2.5-7b-math.yaml --devices 4 mesh.tensor=2
Exit code: 0 with an answer, whether it fits or not; 2 if the question can't be answered."""

# More than any cluster has; all layouts of so many are looked at in a second.
MOST_DEVICES = 100_000


@dataclasses.dataclass(frozen=True)
class Question:
    """A command line that makes sense.

    Attributes:
      config: checked settings.
      devices: number of devices.
      device: name in `planning.devices.DEVICES`.
      memory_gib: memory of one.
      compiler: gpu, cpu or none.
      as_json: print one JSON object.
    """

    config: Config
    devices: int
    device: str
    memory_gib: float
    compiler: str
    as_json: bool


def parse(argv: Sequence[str] | None) -> Question:
    """The command line, checked.

    Raises:
      UserError: something in it can't be used.
      SystemExit: help was asked for.
    """
    from bacr_jax.planning.devices import DEVICES, find, smallest_with

    parser = Parser(
        prog="python -m bacr_jax.plan",
        description="Does a run fit on these GPUs, what will a step cost? No GPU is needed.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config", action="append", default=[], metavar="FILE", help="repeatable; later files win"
    )
    parser.add_argument("--devices", default="8", metavar="N", help="number of GPUs (8)")
    parser.add_argument(
        "--device",
        metavar="NAME",
        help=f"one of {', '.join(DEVICES)}; the smallest with enough memory if not given",
    )
    parser.add_argument(
        "--device-memory", metavar="GIB", help="memory of a GPU in GiB; the device's if not given"
    )
    parser.add_argument(
        "--compile",
        default="gpu",
        choices=["gpu", "cpu", "none"],
        help="compile the real programs with XLA's GPU compiler (extra `plan`; without it with the "
        "CPU compiler), with the CPU compiler, or not at all: arithmetic only, a second",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    arguments = parser.parse_intermixed_args(argv)
    if not arguments.config:
        raise UserError("command line: no config; write --config configs/qwen2.5-7b-math.yaml")
    devices = whole_number(arguments.devices, most=MOST_DEVICES)
    if not devices:
        raise UserError(
            f"--devices: found {shown(arguments.devices)}; write a number of GPUs, 1 to "
            f"{MOST_DEVICES}"
        )
    name = arguments.device
    if name is not None:
        find(name)
    memory_gib = _memory(arguments.device_memory)
    if name is None:
        name = "a100-80" if memory_gib is None else smallest_with(memory_gib)
    config = config_io.load(arguments.config, arguments.overrides)
    from bacr_jax.methods.registry import problems

    config_io.check(config, also=problems)
    return Question(
        config=config,
        devices=devices,
        device=name,
        memory_gib=find(name).memory_gib if memory_gib is None else memory_gib,
        compiler=arguments.compile,
        as_json=arguments.json,
    )


def _memory(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not (0 < found < math.inf):
        raise UserError(f"--device-memory: found {text!r}; write GiB of a GPU, such as 80")
    return found


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


def _sizes(question: Question) -> "tuple[Workload, MeshShape]":
    """Sizes and mesh of the run.

    Raises:
      UserError: the model's shape can't be known, or the mesh or the portions don't fit it.
    """
    with _muted():
        import jax

        # The plan is made on the host, also where there are GPUs and somebody is using them.
        jax.config.update("jax_platforms", "cpu")
        jax.devices()

    from bacr_jax.planning.oom_hints import sizes_of

    return sizes_of(question.config, question.devices)


def _compiled(
    question: Question, work: "Workload", layout: "MeshShape"
) -> "tuple[dict[str, Measured], str, bool]":
    """Compiled programs, where they come from, and whether by the GPU compiler."""
    from bacr_jax.planning import compiling

    backend = question.compiler
    if backend == "none":
        return {}, "arithmetic only (--compile none)", False
    source = "compiled for this GPU by XLA; scoring and branches by arithmetic"
    if backend == "gpu" and not compiling.can_compile_for_gpus():
        backend = "cpu"
        source = (
            "arguments compiled by XLA for CPUs, temporaries by arithmetic; the GPU compiler is "
            'not here (pip install "bacr_jax[plan]")'
        )
    elif backend == "cpu":
        source = "arguments compiled by XLA for CPUs, temporaries by arithmetic (--compile cpu)"
    box = compiling.PER_HOST
    if backend == "gpu" and question.devices > box and question.devices % box:
        raise UserError(
            f"--devices: found {question.devices}; write up to {box}, or whole boxes of {box}"
        )
    found = compiling.measure(
        question.config,
        work.model,
        devices=question.devices,
        device=question.device,
        backend=backend,
        fused_attention=work.fused_attention and backend == "gpu",
    )
    return found, source, backend == "gpu"


def answer(question: Question) -> "Plan":
    """The plan of a run."""
    work, layout = _sizes(question)
    from bacr_jax.planning.devices import find
    from bacr_jax.planning.report import make_plan

    compiled, source, exact = _compiled(question, work, layout)
    return make_plan(
        work,
        layout,
        device=find(question.device),
        memory_gib=question.memory_gib,
        compiled=compiled,
        source=source,
        exact=exact,
    )


@entry_point
def main(argv: Sequence[str] | None) -> None:
    """Entry point: 0 with a plan, fitting or not; 2 with one line on stderr for bad input."""
    question = parse(argv)
    plan = answer(question)
    from bacr_jax.planning.report import as_object, as_text

    print(json.dumps(as_object(plan)) if question.as_json else as_text(plan))


if __name__ == "__main__":
    sys.exit(main())
