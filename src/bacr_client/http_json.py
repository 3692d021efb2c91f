"""Minimal asynchronous HTTP/1.1 client for JSON, based on the standard library.

Used by `server`. Each request opens a new connection. Cancelling a request closes its connection.
"""

import asyncio
import contextlib
import json
import math
import os
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

# Maximum size of a response body in bytes. A server that sends more is considered broken.
_MOST_BYTES = 1 << 28
# Maximum number of bytes that are read from a connection at once.
_PIECE_BYTES = 1 << 16
# Seconds to wait before each retry. A request is retried if the server is busy or the connection is
# closed early.
BACK_OFF = (0.5, 1.0, 2.0, 4.0)
# HTTP status codes of a busy server.
BUSY = (429, 503)


@dataclass(frozen=True)
class Timeouts:
    """Timeouts of a request in seconds. `math.inf` allows any time.

    Attributes:
      first: maximum time until the headers of the response are received, including connecting.
      between: maximum time between two reads of the response body.
      whole: maximum time for the whole request.
      connect: maximum time for connecting, which `first` limits too.
    """

    first: float = 30.0
    between: float = 30.0
    whole: float = 60.0
    connect: float = math.inf


# Default timeouts, for requests that the server answers quickly.
SHORT = Timeouts()


class EngineError(Exception):
    """Raised if an engine cannot be reached, times out or sends an invalid response."""


class Refused(EngineError):
    """Raised if an engine answers a request with an error status.

    Attributes:
      status: the HTTP status code.
    """

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class ConnectionCut(EngineError):
    """Raised if the connection is closed before the response is complete."""


async def request_json(url: str, body: Any = None, timeouts: Timeouts = SHORT) -> Any:
    """Sends a request and returns the parsed JSON of the response.

    The request is retried if the server is busy or the connection is closed early. If the
    environment variable VLLM_API_KEY is set, it is sent as the bearer token.

    Args:
      url: full URL of the endpoint.
      body: value that is sent as JSON in a POST request. None for a GET request.
      timeouts: timeouts of each attempt.

    Raises:
      Refused: if the status code is not 200.
      EngineError: if the server cannot be reached, an attempt times out, the connection is closed
        early in all attempts, or the response is not JSON.
    """
    for seconds in BACK_OFF:
        try:
            return await _request_once(url, body, timeouts)
        except ConnectionCut:
            pass
        except Refused as refused:
            if refused.status not in BUSY:
                raise
        await asyncio.sleep(seconds)
    return await _request_once(url, body, timeouts)


async def _request_once(url: str, body: Any, timeouts: Timeouts) -> Any:
    """Sends a request without retries. See `request_json` for arguments and exceptions."""
    try:
        status, content = await asyncio.wait_for(_exchange(url, body, timeouts), timeouts.whole)
    except TimeoutError:
        raise EngineError(
            f"{url}: the server did not complete its reply within {timeouts.whole:g} s"
        ) from None
    reply = _json_or_none(content)
    if status != 200:
        reason = _error_message(reply) or f"answered with status {status}"
        raise Refused(status, f"{url}: {reason}")
    if reply is None:
        raise EngineError(
            f"{url}: the server's reply is not JSON; check that a vLLM server listens at this "
            "address"
        )
    return reply


def one_line(text: str, most: int = 300) -> str:
    """Formats a text from a server as a single line for an error message.

    Control characters are escaped.

    Args:
      text: the text.
      most: maximum length of the line in characters.
    """
    line = " ".join(text[: 4 * most].split())
    if not line.isprintable():
        line = ascii(line)[1:-1]
    if len(line) > most:
        return f"{line[: most - 3]}..."
    return line


def _error_message(reply: Any) -> str:
    """Returns the message of an error reply in OpenAI's format, or "" if missing."""
    error = reply
    if isinstance(reply, dict):
        error = reply.get("error", reply)
    if not isinstance(error, dict):
        return ""
    message = error.get("message")
    if not isinstance(message, str):
        return ""
    return one_line(message.strip().rstrip("."))


async def stream_json(url: str, body: Any, timeouts: Timeouts = SHORT) -> AsyncGenerator[Any, None]:
    """Sends a request and yields the parsed JSON of each server-sent event of the response.

    The request is not retried. Closing the generator closes the connection.

    Args:
      url: full URL of the endpoint.
      body: value that is sent as JSON in a POST request.
      timeouts: timeouts of the request. The field `whole` is ignored.

    Raises:
      Refused: if the status code is not 200.
      ConnectionCut: if the connection is closed before the event `[DONE]`.
      EngineError: if the server cannot be reached, is silent for too long, or sends an error or
        a response that is not a stream of events.
    """
    async with _opened(url, body, timeouts) as (status, pieces):
        if status != 200:
            reply = _json_or_none(b"".join([piece async for piece in pieces]))
            reason = _error_message(reply) or f"answered with status {status}"
            raise Refused(status, f"{url}: {reason}")
        async for line in _lines(pieces):
            field, _, value = line.partition(b":")
            if field != b"data":
                continue
            if value.strip() == b"[DONE]":
                return
            event = _json_or_none(value)
            if not isinstance(event, dict):
                raise EngineError(f"{url}: the server sent an event that is not a JSON object")
            if "error" in event:
                reason = _error_message(event) or "streams an error"
                raise EngineError(f"{url}: {reason}")
            yield event
        raise ConnectionCut(f"{url}: the connection was closed before the reply was complete")


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yields the lines of a response body and drops an incomplete last line."""
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line.rstrip(b"\r")


def _json_or_none(content: bytes) -> Any:
    """Parses JSON, or returns None if it is malformed."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


async def _exchange(url: str, body: Any, timeouts: Timeouts) -> tuple[int, bytes]:
    """Sends a request and returns the status code and the body of the response.

    Raises:
      EngineError: for the same reasons as `_opened`.
    """
    async with _opened(url, body, timeouts) as (status, pieces):
        content = bytearray()
        async for piece in pieces:
            content += piece
            _check_size(len(content))
        return status, bytes(content)


@contextlib.asynccontextmanager
async def _opened(
    url: str, body: Any, timeouts: Timeouts
) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
    """Sends a request and yields the status code and the pieces of the response body.

    Raises:
      ConnectionCut: if the connection is closed before the response is complete.
      EngineError: if the request fails for any other reason. The message is one line.
    """
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    connect_seconds = min(timeouts.connect, timeouts.first)
    late = f"the server did not accept a connection within {connect_seconds:g} s"
    writer = None

    def with_timeout(read: Awaitable[Any]) -> Awaitable[Any]:
        return asyncio.wait_for(read, timeouts.between)

    try:
        async with asyncio.timeout(timeouts.first):
            async with asyncio.timeout(connect_seconds):
                reader, writer = await asyncio.open_connection(
                    parts.hostname, port, ssl=secure or None
                )
            late = f"the server did not begin its reply within {timeouts.first:g} s"
            writer.write(_request_bytes(parts, body))
            await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
        late = f"the server sent nothing for {timeouts.between:g} s in the middle of a reply"
        status, headers = _parse_head(head)
        yield status, _body_pieces(reader, headers, with_timeout)
    except TimeoutError:
        raise EngineError(f"{url}: {late}") from None
    except (asyncio.IncompleteReadError, ConnectionResetError, BrokenPipeError):
        raise ConnectionCut(
            f"{url}: the connection was closed before the reply was complete"
        ) from None
    except OSError as error:
        raise EngineError(
            f"{url}: no server responds at this address ({_reason(error)}); start the server, or "
            "correct the address"
        ) from None
    except UnicodeError:
        # The host has an empty label, or a label of more than 63 characters.
        raise EngineError(f"{url}: its host is not a host name; correct the address") from None
    except (asyncio.LimitOverrunError, ValueError, IndexError):
        raise EngineError(
            f"{url}: the server's reply is not HTTP; check that a vLLM server listens at this "
            "address"
        ) from None
    finally:
        if writer is not None:
            writer.close()


def _reason(error: OSError) -> str:
    """Returns the reason of a failed connection in a few words."""
    if isinstance(error, (socket.gaierror, ssl.SSLError)):
        # Their `errno` is not a number of the operating system.
        return error.strerror or str(error)
    if error.errno:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__


def _request_bytes(parts: SplitResult, body: Any) -> bytes:
    """Serializes the request line, headers and body of a request."""
    payload = b"" if body is None else json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    path = parts.path or "/"
    if parts.query:
        path += f"?{parts.query}"
    lines = [
        f"{method} {path} HTTP/1.1",
        f"Host: {parts.netloc.rpartition('@')[2]}",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {len(payload)}",
    ]
    key = os.environ.get("VLLM_API_KEY")
    if key:
        lines.append(f"Authorization: Bearer {key}")
    return "\r\n".join([*lines, "", ""]).encode() + payload


def _parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    """Parses the status code and the headers of a response. Header names are lower case."""
    status_line, *lines = head.decode("latin-1").split("\r\n")
    headers = {}
    for line in filter(None, lines):
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(status_line.split()[1]), headers


async def _body_pieces(
    reader: asyncio.StreamReader,
    headers: dict[str, str],
    with_timeout: Callable[[Awaitable[Any]], Awaitable[Any]],
) -> AsyncIterator[bytes]:
    """Yields the body of a response as it arrives.

    Args:
      reader: stream positioned after the headers.
      headers: headers of the response, with lower-case names.
      with_timeout: awaits a single read with a timeout.

    Raises:
      asyncio.IncompleteReadError: if the connection is closed early.
      ValueError: if the body is malformed or too large.
    """

    async def read_up_to(size: int) -> AsyncIterator[bytes]:
        """Yields `size` bytes in pieces."""
        remaining = size
        while remaining:
            piece = await with_timeout(reader.read(min(remaining, _PIECE_BYTES)))
            if not piece:
                raise asyncio.IncompleteReadError(b"", remaining)
            remaining -= len(piece)
            yield piece

    if headers.get("transfer-encoding", "").lower() == "chunked":
        while line := await with_timeout(reader.readline()):
            size = int(line.split(b";")[0], 16)
            if not size:
                return
            _check_size(size)
            async for piece in read_up_to(size):
                yield piece
            # Skip the line break after the chunk.
            async for _ in read_up_to(2):
                pass
        raise asyncio.IncompleteReadError(b"", None)
    length = headers.get("content-length")
    if length is None:
        # Without a length, the body ends when the server closes the connection.
        while piece := await with_timeout(reader.read(_PIECE_BYTES)):
            yield piece
        return
    _check_size(int(length))
    async for piece in read_up_to(int(length)):
        yield piece


def _check_size(size: int) -> None:
    if not 0 <= size <= _MOST_BYTES:
        raise ValueError(f"the body has {size} bytes instead of 0 to {_MOST_BYTES}")
