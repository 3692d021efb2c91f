"""One request of HTTP/1.1, asynchronous, with Python's own library; leaving it closes its line."""

import asyncio
import json
import os
from typing import Any
from urllib.parse import urlsplit

# Whatever a server sends, no answer of ours is this long.
_MOST_BYTES = 1 << 28


class EngineError(Exception):
    """An engine that can't be reached, went away, or says what no engine says; one line."""


class Refused(EngineError):
    """A request that an engine refused; `status` is the number it gave."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


async def request_json(
    method: str, url: str, body: Any = None, *, key: str | None = None, timeout: float | None = None
) -> Any:
    """Sends a request and reads the JSON that answers it.

    A body of None sends nothing; the key is a bearer token; `timeout` is in seconds for all of it,
    and None: as long as it takes.

    Raises:
      EngineError: no such server, or it left in the middle.
      Refused: another status than 200.
    """
    try:
        status, raw = await asyncio.wait_for(_exchange(method, url, body, key), timeout)
    except TimeoutError:
        raise EngineError(f"{url}: did not answer in {timeout:g} s") from None
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error) or type(error).__name__
        raise EngineError(f"{url}: no server answers there ({reason})") from None
    except (asyncio.IncompleteReadError, ValueError, IndexError):
        raise EngineError(f"{url}: left in the middle of an answer") from None
    try:
        found = json.loads(raw)
    except ValueError:
        found = None
    if status != 200:
        raise Refused(status, _message(found) or f"{url}: answered with status {status}")
    if found is None:
        raise EngineError(f"{url}: answered with something else than JSON")
    return found


def _message(found: Any) -> str:
    """What a refusal says, in one line; the form is that of OpenAI's servers."""
    inside = found.get("error", found) if isinstance(found, dict) else None
    text = inside.get("message") if isinstance(inside, dict) else None
    return " ".join(text.split()).rstrip(".") if isinstance(text, str) else ""


async def _exchange(method: str, url: str, body: Any, key: str | None) -> tuple[int, bytes]:
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=secure or None)
    try:
        payload = b"" if body is None else json.dumps(body).encode()
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        lines = [
            f"{method} {path} HTTP/1.1",
            f"Host: {parts.netloc.rpartition('@')[2]}",
            "Connection: close",
            "Content-Type: application/json",
            f"Content-Length: {len(payload)}",
            *([f"Authorization: Bearer {key}"] if key else []),
        ]
        writer.write("\r\n".join([*lines, "", ""]).encode() + payload)
        await writer.drain()
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in head[1:] if line)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        return int(head[0].split()[1]), await _body(reader, headers)
    finally:
        writer.close()


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return await _chunks(reader)
    length = headers.get("content-length")
    if length is None:
        return await reader.read(_MOST_BYTES)
    return await reader.readexactly(_allowed(int(length)))


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    found = bytearray()
    while size := int((await reader.readline()).split(b";")[0], 16):
        found += await reader.readexactly(_allowed(size + len(found)) - len(found))
        await reader.readexactly(2)
    return bytes(found)


def _allowed(size: int) -> int:
    if not 0 <= size <= _MOST_BYTES:
        raise ValueError(f"{size} bytes")
    return size
