"""Sends one HTTP/1.1 request and reads JSON, asynchronously, with the standard library.

Used by `server`. A request that is cancelled closes its connection.
"""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

# Bytes of a response; a server that sends more is broken.
_MOST_BYTES = 1 << 28
# Seconds before each retry after the response of a busy server or a closed connection.
BACK_OFF = (0.5, 1.0, 2.0, 4.0)
_BUSY = (429, 503)


@dataclass(frozen=True)
class Timeouts:
    """Timeouts of a request in seconds.

    Attributes:
      first: until the response begins.
      between: between two pieces of the response.
      whole: for the whole request.
    """

    first: float = 30.0
    between: float = 30.0
    whole: float = 60.0


# Timeouts of a request that takes little time.
SHORT = Timeouts()


class EngineError(Exception):
    """An engine cannot be reached, closes the connection or sends an invalid response."""


class Refused(EngineError):
    """An engine refuses a request.

    Attributes:
      status: the HTTP status.
    """

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class ConnectionCut(EngineError):
    """The connection was closed before the response was complete."""


async def request_json(url: str, body: Any = None, timeouts: Timeouts = SHORT) -> Any:
    """Sends a request and returns the JSON of its response.

    Retries if the server is busy or the connection is cut. The environment variable VLLM_API_KEY
    contains the server's key.

    Args:
      url: the address with its path.
      body: sent as JSON in a POST request; None for a GET request.
      timeouts: the timeouts of each try.

    Raises:
      Refused: the status is not 200.
      EngineError: the server is missing, a timeout has passed, the connection of every try is cut,
        or the response is not JSON.
    """
    for seconds in BACK_OFF:
        try:
            return await _request_once(url, body, timeouts)
        except ConnectionCut:
            pass
        except Refused as refused:
            if refused.status not in _BUSY:
                raise
        await asyncio.sleep(seconds)
    return await _request_once(url, body, timeouts)


async def _request_once(url: str, body: Any, timeouts: Timeouts) -> Any:
    """Sends a request once; takes and raises the same as `request_json`."""
    try:
        status, content = await asyncio.wait_for(_exchange(url, body, timeouts), timeouts.whole)
    except TimeoutError:
        raise EngineError(f"{url}: took more than {timeouts.whole:g} s") from None
    try:
        reply = json.loads(content)
    except (ValueError, RecursionError):
        reply = None
    if status != 200:
        reason = _error_message(reply) or f"answered with status {status}"
        raise Refused(status, f"{url}: {reason}")
    if reply is None:
        raise EngineError(f"{url}: answered with something else than JSON")
    return reply


def one_line(text: str, most: int = 300) -> str:
    """Returns a server's text on one line of at most `most` characters, without control codes."""
    line = " ".join(text[: 4 * most].split())
    if not line.isprintable():
        line = ascii(line)[1:-1]
    if len(line) > most:
        return f"{line[: most - 3]}..."
    return line


def _error_message(reply: Any) -> str:
    """Returns the message of an error in the form of OpenAI's servers; "" without a message."""
    error = reply
    if isinstance(reply, dict):
        error = reply.get("error", reply)
    if not isinstance(error, dict):
        return ""
    message = error.get("message")
    if not isinstance(message, str):
        return ""
    return one_line(message.strip().rstrip("."))


async def _exchange(url: str, body: Any, timeouts: Timeouts) -> tuple[int, bytes]:
    """Sends a request and returns the status and the content of the response.

    Raises:
      EngineError: the exchange fails; the message has one line.
    """
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    late = f"did not answer in {timeouts.first:g} s"
    writer = None

    def with_timeout(read: Awaitable[Any]) -> Awaitable[Any]:
        return asyncio.wait_for(read, timeouts.between)

    try:
        async with asyncio.timeout(timeouts.first):
            reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=secure or None)
            writer.write(_request_bytes(parts, body))
            await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
        late = f"was silent for {timeouts.between:g} s in the middle of an answer"
        status, headers = _parse_head(head)
        return status, await _read_body(reader, headers, with_timeout)
    except TimeoutError:
        raise EngineError(f"{url}: {late}") from None
    except (asyncio.IncompleteReadError, ConnectionResetError, BrokenPipeError):
        raise ConnectionCut(f"{url}: left in the middle of an answer") from None
    except OSError as error:
        reason = str(error) or type(error).__name__
        if error.errno:
            reason = os.strerror(error.errno)
        raise EngineError(f"{url}: no server answers there ({reason})") from None
    except (asyncio.LimitOverrunError, ValueError, IndexError):
        raise EngineError(f"{url}: answers with something else than HTTP") from None
    finally:
        if writer is not None:
            writer.close()


def _request_bytes(parts: SplitResult, body: Any) -> bytes:
    """Returns the head and the body of a request."""
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
    """Returns the status and the headers, with lower-case names, of a response."""
    status_line, *lines = head.decode("latin-1").split("\r\n")
    headers = {}
    for line in filter(None, lines):
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(status_line.split()[1]), headers


async def _read_body(
    reader: asyncio.StreamReader,
    headers: dict[str, str],
    with_timeout: Callable[[Awaitable[Any]], Awaitable[Any]],
) -> bytes:
    """Reads the body of a response, in pieces of any size.

    Args:
      with_timeout: waits for one piece.
    """

    async def read_up_to(size: int) -> bytes:
        content = bytearray()
        while len(content) < size:
            piece = await with_timeout(reader.read(size - len(content)))
            if not piece:
                break
            content += piece
        return bytes(content)

    async def read_exactly(size: int) -> bytes:
        content = await read_up_to(size)
        if len(content) < size:
            raise asyncio.IncompleteReadError(content, size)
        return content

    if headers.get("transfer-encoding", "").lower() == "chunked":
        content = bytearray()
        while line := await with_timeout(reader.readline()):
            size = int(line.split(b";")[0], 16)
            if not size:
                return bytes(content)
            _check_size(size + len(content))
            content += await read_exactly(size)
            # Every chunk ends with a line break.
            await read_exactly(2)
        raise asyncio.IncompleteReadError(bytes(content), None)
    length = headers.get("content-length")
    if length is None:
        # The body ends with the connection.
        return await read_up_to(_MOST_BYTES)
    _check_size(int(length))
    return await read_exactly(int(length))


def _check_size(size: int) -> None:
    if not 0 <= size <= _MOST_BYTES:
        raise ValueError(f"{size} bytes")
