"""Options of the command line that name an engine of somebody else."""

import argparse
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bacr_client.server import is_address

# This package, and another that can decode, as settings of an evaluation call them.
OURS, VLLM = "jax", "vllm"


@dataclass(frozen=True)
class Engine:
    """Where answers are drawn instead of here.

    Attributes:
      url: address of a server that is there.
      python: interpreter of the environment in which one is started; "": none is.
      arguments: what it is started with beside folder, address and type.
    """

    url: str
    python: str
    arguments: tuple[str, ...]


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Options --engine, --url, --engine-python and --engine-arguments."""
    add = parser.add_argument
    add(
        "--engine",
        choices=(OURS, VLLM),
        default=OURS,
        help=f"what decodes; {VLLM}: a server of an exported folder, with the plugin bacr-vllm",
    )
    add("--url", metavar="URL", help=f"address of the server, with --engine {VLLM}")
    add(
        "--engine-python",
        metavar="PYTHON",
        help="instead of --url: interpreter of an environment with vLLM and the plugin, in which "
        "a server is started and stopped",
    )
    add(
        "--engine-arguments",
        metavar="'...'",
        help="what that server is started with: --engine-arguments='--tensor-parallel-size 4'",
    )


def engine_faults(a: argparse.Namespace) -> Iterator[str]:
    """What can be said against these options."""
    asked = {"--url": a.url, "--engine-python": a.engine_python}
    if a.engine == OURS:
        asked["--engine-arguments"] = a.engine_arguments
        for option, value in asked.items():
            if value is not None:
                yield f"{option}: is read with --engine {VLLM} only; write it too"
        return
    if a.model is None:
        yield (
            f"--engine {VLLM}: serves a Hugging Face folder; write --model FOLDER of the run's "
            "export (python -m bacr_jax.export)"
        )
    if (a.url is None) == (a.engine_python is None):
        yield f"--engine {VLLM}: write --url http://HOST:PORT or --engine-python PYTHON"
    if a.url is not None and not is_address(a.url):
        yield f"--url {a.url!r}: is no address; write http://HOST:PORT"
    if a.url is not None and a.engine_arguments is not None:
        yield "--engine-arguments: the server of --url is started already; leave it out"
    if a.engine_python is not None and not Path(a.engine_python).is_file():
        yield (
            f"--engine-python {a.engine_python}: no such file; write the python of an environment "
            "with vLLM"
        )
    try:
        shlex.split(a.engine_arguments or "")
    except ValueError as error:
        yield f"--engine-arguments {a.engine_arguments!r}: {error}; close the quotation"


def read_engine(a: argparse.Namespace) -> Engine | None:
    """The engine that the options name; None: this package decodes."""
    if a.engine == OURS:
        return None
    return Engine(a.url or "", a.engine_python or "", tuple(shlex.split(a.engine_arguments or "")))
