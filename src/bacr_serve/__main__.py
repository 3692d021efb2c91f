"""Implements the command `bacr serve --model FOLDER | --run DIR [--url http://...]`.

The command opens a policy and answers HTTP requests until it receives SIGTERM or SIGINT. It then
finishes the requests in progress and exits with code 0.
"""

import argparse
import asyncio
import contextlib
import importlib.util
import ipaddress
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bacr_client.server import is_address
from bacr_jax.config.cli import (
    Parser,
    add_saved_policy,
    check_saved_policy,
    entry_point,
    failure,
    silence_orbax,
    whole_number,
)
from bacr_jax.config.derived import NONE, read_budgets
from bacr_jax.errors import UserError
from bacr_jax.evaluation.overrides import SERVED_KEYS, server_faults
from bacr_jax.out_of_memory import OutOfMemory

if TYPE_CHECKING:
    from bacr_serve.app import Service

DESCRIPTION = (
    "Serves a policy over HTTP in OpenAI's form. Each request contains a thinking budget. This "
    "package decodes the answers, or a vLLM server with --url. The page at / asks a question at "
    "two budgets."
)
EPILOG = (
    "Config keys can be overridden, such as rollout.answer_tokens=256 or "
    "'budget.levels={low: 256, high: 2048}'. docs/serve.md describes the fields of requests."
)
LOCAL = "127.0.0.1"
# When the server stops, open connections are closed after the timeout of a request plus this time,
# in seconds.
_GRACE_SECONDS = 5.0
# Maximum number of connections that wait to be accepted.
_BACKLOG = 2048
_NUMBERS = {
    "port": (0, 65535),
    "slots": (1, 4096),
    "chunk": (1, 4096),
    "concurrency": (1, 100_000),
    "max_body": (1024, 1 << 30),
    "max_budget": (1, 2**31 - 1),
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses and validates the command line. The result's `key` is the API key or None."""
    parser = Parser(prog="bacr serve", description=DESCRIPTION, epilog=EPILOG)
    add = parser.add_argument
    add_saved_policy(parser)
    add("--url", help="address of a vLLM server of the same folder, which then decodes")
    add("--host", default=LOCAL, help=f"address to listen on; {LOCAL} (this machine) by default")
    add("--port", default="8000", help="port; 8000 by default, 0 for any free port")
    add("--name", help="name of the model in requests; by default the folder's name")
    add(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="file with the key that requests must contain",
    )
    add(
        "--budget",
        default=NONE,
        metavar="N",
        help="budget of a request without one: tokens, the name of a level, or none (default)",
    )
    add("--max-budget", metavar="N", help="largest budget of a request, in tokens")
    add("--slots", default="8", metavar="N", help="requests decoded together; 8 by default")
    add("--chunk", default="8", metavar="N", help="tokens per streamed piece; 8 by default")
    add(
        "--concurrency",
        default="64",
        metavar="N",
        help="running and waiting requests; further ones get status 429; 64 by default",
    )
    add(
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds a request may take, waiting included; 600 by default",
    )
    add("--max-body", default=str(1 << 18), metavar="BYTES", help="largest request; 256 KiB")
    add("overrides", nargs="*", metavar="key.sub=value", help="overrides of config keys")
    arguments = parser.parse_intermixed_args(argv)
    check_saved_policy(arguments)
    for name, (least, most) in _NUMBERS.items():
        text = getattr(arguments, name)
        if text is not None:
            setattr(arguments, name, _number(name, text, least, most))
    if not 0 < arguments.timeout < float("inf"):
        raise UserError(
            f"--timeout {arguments.timeout}: the timeout must be above 0 seconds; set a larger "
            "number"
        )
    _check_url(arguments)
    arguments.key = None
    if arguments.api_key_file is not None:
        arguments.key = read_key(arguments.api_key_file)
    return arguments


def _number(name: str, text: str, least: int, most: int) -> int:
    """Parses an option whose value is an integer from `least` to `most`."""
    number = whole_number(text, most=most)
    if number is None or number < least:
        option = "--" + name.replace("_", "-")
        raise UserError(
            f"{option}: expected a whole number from {least} to {most}, but found {text}"
        )
    return number


def _check_url(arguments: argparse.Namespace) -> None:
    """Raises UserError if --url is not a valid address or is combined with an invalid option.

    The invalid options are --run and overrides of the decoder that --url replaces.
    """
    if arguments.url is None:
        return
    if not is_address(arguments.url):
        raise UserError(f"--url {arguments.url!r} is not an address; use the form http://HOST:PORT")
    if arguments.model is None:
        raise UserError(
            "--url: a vLLM server serves a Hugging Face folder, and no such folder was passed; "
            "export the run with bacr export, and pass the exported folder as --model"
        )
    for fault in server_faults(arguments.overrides, "--url"):
        raise UserError(fault)


def read_key(path: Path) -> str:
    """Reads the API key from a file that contains only this key.

    Raises:
      UserError: if the file can't be read, or does not contain exactly one word of printable ASCII
        characters.
    """
    try:
        content = path.read_bytes()[:4097]
    except OSError as error:
        raise UserError(
            f"--api-key-file {path}: the file can't be read ({error.strerror}); use another path"
        ) from None
    words = content.decode("latin-1").split()
    is_key = len(words) == 1 and words[0].isascii() and words[0].isprintable()
    if not is_key or len(content) > 4096:
        raise UserError(
            f"--api-key-file {path}: the file does not contain exactly one key; it must have one "
            "line of letters and digits, such as the output of openssl rand -hex 32"
        )
    return words[0]


def bind(host: str, port: int) -> socket.socket:
    """Binds a socket to the address. Clients cannot connect until the server listens on it.

    Raises:
      UserError: if the address does not belong to this machine, or if the port is in use.
    """
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = info[0]
        listener = socket.socket(family, kind, protocol)
    except UnicodeError:
        # The host has an empty label, or a label of more than 63 characters.
        raise _no_address(host, port, "not a host name") from None
    except OSError as error:
        raise _no_address(host, port, error.strerror) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _no_address(host, port, error.strerror) from None
    return listener


def _no_address(host: str, port: int, reason: str | None) -> UserError:
    return UserError(
        f"--host {host} --port {port}: the server can't listen on this address ({reason}); "
        "use another port or an address of this machine"
    )


def is_local(host: str) -> bool:
    """True if the address is reachable only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def make_service(arguments: argparse.Namespace) -> "Service":
    """Opens the policy and builds the service. The weights are not loaded yet."""
    if arguments.url is not None:
        # vLLM uses the GPU. This process only encodes and decodes text, so JAX uses the CPU.
        os.environ["JAX_PLATFORMS"] = "cpu"
    from bacr_jax.generate import open_session
    from bacr_serve.app import Limits, Service
    from bacr_serve.setup import embedded_backend, proxy_backend, serve_policy

    session = open_session(
        arguments.run,
        arguments.model,
        arguments.step,
        arguments.overrides,
        download=arguments.download,
        keys=SERVED_KEYS,
    )
    session.saved.check()
    policy = serve_policy(session, name=arguments.name, largest=arguments.max_budget)
    default_budget = _default_budget(arguments.budget, policy.levels, policy.largest_budget)
    if arguments.url is None:
        backend = embedded_backend(session, policy, slots=arguments.slots, chunk=arguments.chunk)
    else:
        backend = proxy_backend(session, policy, arguments.url)
    limits = Limits(
        concurrency=arguments.concurrency,
        seconds=arguments.timeout,
        body_bytes=arguments.max_body,
    )
    return Service(
        backend, policy, limits=limits, default_budget=default_budget, api_key=arguments.key
    )


def _default_budget(text: str, levels: Any, largest: int) -> int | None:
    """Parses --budget, the budget in tokens of requests that contain none. None for no budget."""
    budgets = read_budgets(text, option="--budget", levels=levels)
    if len(budgets) != 1:
        raise UserError(
            f"--budget {text}: found {len(budgets)} budgets; pass only one, which is used for "
            "requests without a budget"
        )
    (budget,) = budgets
    if budget is not None and budget > largest:
        raise UserError(
            f"--budget {text}: the default budget must not be above the largest budget of the "
            f"server, {largest}; use {largest} or less"
        )
    return budget


async def serve(service: "Service", listener: socket.socket, host: str) -> None:
    """Starts the backend and answers requests until SIGTERM or SIGINT arrives."""
    import uvicorn

    from bacr_serve.app import make_app

    class Server(uvicorn.Server):
        """Prints the address once clients can connect, and returns after SIGTERM.

        Returning lets the command exit with code 0.
        """

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            _announce(service, listener, host)

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Handles SIGTERM and SIGINT, but does not raise them again as uvicorn does."""
            handlers = {
                number: signal.signal(number, self.handle_exit)
                for number in (signal.SIGTERM, signal.SIGINT)
            }
            try:
                yield
            finally:
                for number, handler in handlers.items():
                    signal.signal(number, handler)

    config = uvicorn.Config(
        make_app(service),
        http="h11",
        loop="asyncio",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=int(service.limits.seconds + _GRACE_SECONDS) + 1,
    )
    await service.backend.start()
    try:
        await Server(config).serve(sockets=[listener])
    finally:
        await service.backend.stop()


def _announce(service: "Service", listener: socket.socket, host: str) -> None:
    """Prints the server's address and the maximum lengths of a request."""
    port = listener.getsockname()[1]
    shown_host = f"[{host}]" if ":" in host else host
    policy = service.policy
    print(
        f"serving {policy.name} at http://{shown_host}:{port}/ (OpenAI clients: "
        f"http://{shown_host}:{port}/v1); budgets up to {policy.largest_budget} tokens, prompts up "
        f"to {policy.prompt_tokens}, answers up to {policy.answer_tokens}",
        flush=True,
    )


@entry_point
def main(argv: Sequence[str] | None) -> int:
    """Runs `bacr serve`.

    Returns:
      The exit code: 0 after SIGTERM or SIGINT, or 1 if a device ran out of memory. If the input is
      invalid, the command prints one line and exits with code 2.
    """
    silence_orbax()
    arguments = parse(argv)
    if any(importlib.util.find_spec(name) is None for name in ("starlette", "uvicorn")):
        raise UserError(
            "serve: the packages starlette and uvicorn are not installed; run pip install -e "
            '".[serve]" in a clone of the repository'
        )
    from bacr_serve.generation import BackendError

    listener = bind(arguments.host, arguments.port)
    if not is_local(arguments.host) and arguments.key is None:
        print(
            f"warning: --host {arguments.host}: without --api-key-file, everyone who can connect "
            "to this machine can use the server",
            file=sys.stderr,
        )
    with listener:
        service = make_service(arguments)
        try:
            asyncio.run(serve(service, listener, arguments.host))
        except BackendError as error:
            raise UserError(f"--url {error}" if arguments.url else str(error)) from None
        except OutOfMemory as error:
            return failure(f"{error}; use fewer --slots or a smaller --max-budget")
    return 0


if __name__ == "__main__":
    sys.exit(main())
