"""One request of HTTP/1.1, asynchronous, with Python's own library; leaving it closes its line."""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

# Whatever a server sends, no answer of ours is this long.
_MOST_BYTES = 1 << 28
# Seconds before a request is sent again after a busy server's answer, or a line that was cut.
BACK_OFF = (0.5, 1.0, 2.0, 4.0)
_BUSY = (429, 503)


@dataclass(frozen=True)
class Patience:
    """Seconds until an answer begins, from one piece of it to the next, and for all of it."""

    first: float = 30.0
    between: float = 30.0
    whole: float = 60.0


SOON = Patience()


class EngineError(Exception):
    """An engine that can't be reached, went away, or says what no engine says; one line."""


class Refused(EngineError):
    """A request that an engine refused; `status` is the number it gave."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Cut(EngineError):
    """A line that was cut before the answer was whole."""


async def request_json(url: str, body: Any = None, patience: Patience = SOON) -> Any:
    """Sends a request and reads the JSON that answers it; again, if it is no harm and may help.

    Without a body it is a GET; VLLM_API_KEY is sent as the key; a time limit is of one try.

    EngineError: no such server, it left in the middle, or takes too long. Refused: another status
    than 200.
    """
    for seconds in BACK_OFF:
        try:
            return await _request(url, body, patience)
        except Cut:
            pass
        except Refused as refused:
            if refused.status not in _BUSY:
                raise
        await asyncio.sleep(seconds)
    return await _request(url, body, patience)


async def _request(url: str, body: Any, patience: Patience) -> Any:
    """`request_json`, once."""
    try:
        status, raw = await asyncio.wait_for(_exchange(url, body, patience), patience.whole)
    except TimeoutError:
        raise EngineError(f"{url}: took more than {patience.whole:g} s") from None
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        found = None
    if status != 200:
        raise Refused(status, f"{url}: {_message(found) or f'answered with status {status}'}")
    if found is None:
        raise EngineError(f"{url}: answered with something else than JSON")
    return found


def said(text: str, most: int = 300) -> str:
    """What a server says, short, on one line, and without what a terminal would obey."""
    line = " ".join(text[: 4 * most].split())
    line = line if line.isprintable() else ascii(line)[1:-1]
    return line if len(line) <= most else f"{line[: most - 3]}..."


def _message(found: Any) -> str:
    """Returns the message of an error reply in one line; OpenAI's servers define the form."""
    inside = found.get("error", found) if isinstance(found, dict) else None
    text = inside.get("message") if isinstance(inside, dict) else None
    return said(text.strip().rstrip(".")) if isinstance(text, str) else ""


async def _exchange(url: str, body: Any, patience: Patience) -> tuple[int, bytes]:
    """Returns status and body of the answer; raises an error of one line if the exchange fails."""
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    key = os.environ.get("VLLM_API_KEY")
    payload = b"" if body is None else json.dumps(body).encode()
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    lines = [
        f"{'GET' if body is None else 'POST'} {path} HTTP/1.1",
        f"Host: {parts.netloc.rpartition('@')[2]}",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {len(payload)}",
        *([f"Authorization: Bearer {key}"] if key else []),
    ]
    late, writer = f"did not answer in {patience.first:g} s", None
    try:
        async with asyncio.timeout(patience.first):
            reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=secure or None)
            writer.write("\r\n".join([*lines, "", ""]).encode() + payload)
            await writer.drain()
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        late = f"was silent for {patience.between:g} s in the middle of an answer"
        soon = lambda piece: asyncio.wait_for(piece, patience.between)
        pairs = (line.partition(":") for line in head[1:] if line)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        return int(head[0].split()[1]), await _body(reader, headers, soon)
    except TimeoutError:
        raise EngineError(f"{url}: {late}") from None
    except (asyncio.IncompleteReadError, ConnectionResetError, BrokenPipeError):
        raise Cut(f"{url}: left in the middle of an answer") from None
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error) or type(error).__name__
        raise EngineError(f"{url}: no server answers there ({reason})") from None
    except (asyncio.LimitOverrunError, ValueError, IndexError):
        raise EngineError(f"{url}: answers with something else than HTTP") from None
    finally:
        if writer is not None:
            writer.close()


async def _body(
    reader: asyncio.StreamReader, headers: dict[str, str], soon: Callable[[Any], Awaitable[Any]]
) -> bytes:
    """The body of an answer, in as many pieces as it comes; `soon` waits for each."""

    async def upto(size: int) -> bytes:
        found = bytearray()
        while len(found) < size and (piece := await soon(reader.read(size - len(found)))):
            found += piece
        return bytes(found)

    async def exactly(size: int) -> bytes:
        found = await upto(size)
        if len(found) < size:
            raise asyncio.IncompleteReadError(found, size)
        return found

    if headers.get("transfer-encoding", "").lower() == "chunked":
        found = bytearray()
        while line := await soon(reader.readline()):
            size = int(line.split(b";")[0], 16)
            if not size:
                return bytes(found)
            found += await exactly(_allowed(size + len(found)) - len(found))
            await exactly(2)
        raise asyncio.IncompleteReadError(bytes(found), None)
    length = headers.get("content-length")
    # Without a length it ends with the line.
    return await (upto(_MOST_BYTES) if length is None else exactly(_allowed(int(length))))


def _allowed(size: int) -> int:
    if not 0 <= size <= _MOST_BYTES:
        raise ValueError(f"{size} bytes")
    return size
