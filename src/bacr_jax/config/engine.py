"""Defines and checks the options `--engine` and `--url` of `bacr evaluate`.

The options select what decodes the answers: the decoder of this package or a vLLM server.
"""

import argparse
from collections.abc import Iterator

from bacr_client.server import is_address

# Values of --engine: the decoder of this package, or a vLLM server.
OURS = "jax"
VLLM = "vllm"


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Adds the options --engine and --url to a parser."""
    parser.add_argument(
        "--engine",
        choices=(OURS, VLLM),
        default=OURS,
        help=f"decoder; {VLLM}: a server that serves an exported folder with the plugin bacr-vllm",
    )
    parser.add_argument("--url", metavar="URL", help=f"address of the server, with --engine {VLLM}")


def engine_faults(a: argparse.Namespace) -> Iterator[str]:
    """Yields an error message for each invalid combination of --engine, --url and --model."""
    if a.engine == OURS:
        if a.url is not None:
            yield f"--url has no effect without --engine {VLLM}; pass --engine {VLLM} too"
        return
    if a.model is None:
        yield (
            f"--engine {VLLM} serves a Hugging Face folder; pass --model FOLDER with the run's "
            "export (bacr export)"
        )
    if a.url is None:
        yield f"--engine {VLLM} needs the address of a server; pass --url http://HOST:PORT"
    elif not is_address(a.url):
        yield f"--url {a.url!r} is not an address; use the form http://HOST:PORT"
