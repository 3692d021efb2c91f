"""Implements the HTTP application: routes, request limits, API key and streaming.

The ASGI application is built with Starlette. `__main__` runs it with uvicorn, and tests call it
directly. If a client disconnects, its request is cancelled.
"""

import asyncio
import contextlib
import hmac
import importlib.resources
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from bacr_serve.errors import RequestError
from bacr_serve.fields import Asked, Defaults, read_chat, read_completion, read_json
from bacr_serve.generation import Backend, BackendError, Generation, generate
from bacr_serve.policy import ServedPolicy
from bacr_serve.replies import Reply

_LOG = logging.getLogger("bacr_serve")
# Content security policy of the page. The page contains its style and its script, loads nothing
# else, and sends requests only to this server.
_PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# Seconds after which a client may try again if the server is busy.
_RETRY_SECONDS = 1
_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    # Without this header, nginx would buffer the events instead of passing them on immediately.
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True)
class Limits:
    """Limits on the requests that a server accepts.

    Attributes:
      concurrency: maximum number of requests that are being answered or are waiting for a slot.
      seconds: maximum time to answer a request, in seconds.
      body_bytes: maximum size of a request's body in bytes.
      body_seconds: maximum time to receive a request's body, in seconds.
    """

    concurrency: int = 64
    seconds: float = 600.0
    body_bytes: int = 1 << 18
    body_seconds: float = 30.0


class Service:
    """Handles the requests to all routes of the server.

    Attributes:
      running: number of requests that are being answered or are waiting for a slot.
    """

    def __init__(
        self,
        backend: Backend,
        policy: ServedPolicy,
        *,
        limits: Limits = Limits(),
        default_budget: int | None = None,
        api_key: str | None = None,
    ):
        """Creates the service.

        Args:
          backend: engine that generates the responses.
          policy: the policy, with its prompt format and maximum lengths.
          limits: limits of the server.
          default_budget: budget in tokens of a request that contains none, or None for no budget.
          api_key: key that requests to /v1 must contain, or None for no key.
        """
        self.backend = backend
        self.policy = policy
        self.limits = limits
        self.running = 0
        self._default_budget = default_budget
        self._api_key = api_key
        self._defaults = Defaults(
            policy.name,
            policy.levels,
            default_budget,
            policy.largest_budget,
            temperature=policy.temperature,
            top_p=policy.top_p,
        )

    async def chat(self, request: Request) -> Response:
        """Handles POST /v1/chat/completions."""
        return await self._generation(request, read_chat)

    async def completion(self, request: Request) -> Response:
        """Handles POST /v1/completions."""
        return await self._generation(request, read_completion)

    async def _generation(
        self, request: Request, read: Callable[[Mapping[str, Any], Defaults], Asked]
    ) -> Response:
        self.check_key(request)
        self._check_type(request)
        content = await self._body(request)
        asked = read(read_json(content), self._defaults)
        return _GenerationResponse(self, asked, self.policy.generation(asked))

    def check_key(self, request: Request) -> None:
        """Raises RequestError if the server has an API key and the request does not contain it."""
        if self._api_key is None:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        # Compare in constant time, so that the duration does not reveal how many characters are
        # correct.
        is_right = hmac.compare_digest(key.strip().encode(), self._api_key.encode())
        if scheme.lower() != "bearer" or not is_right:
            raise RequestError(
                401,
                "authorization: the API key is missing or wrong; send the header Authorization: "
                "Bearer KEY",
                code="invalid_api_key",
            )

    def _check_type(self, request: Request) -> None:
        """Raises RequestError if the Content-Type header is not application/json.

        This stops web pages of other sites: browsers let them send forms and plain text to any
        server, but not JSON.
        """
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            raise RequestError(
                415,
                f"content-type: the body must be JSON, but its type is {media_type[:80]!r}; send "
                "the header Content-Type: application/json",
                param="content-type",
            )

    async def _body(self, request: Request) -> bytes:
        """Reads the body of a request.

        Raises:
          RequestError: if the body is too large or does not arrive in time. The rest of the body is
            then not read.
        """
        most = self.limits.body_bytes
        declared = request.headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > most:
            raise self._too_large()
        content = bytearray()
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                async for piece in request.stream():
                    content += piece
                    if len(content) > most:
                        raise self._too_large()
        except TimeoutError:
            raise RequestError(
                408,
                "body: the server did not receive the whole request within "
                f"{self.limits.body_seconds:g} s; send it faster",
            ) from None
        return bytes(content)

    def _too_large(self) -> RequestError:
        return RequestError(
            413,
            f"body: the request is larger than the limit of {self.limits.body_bytes} bytes; send "
            "a smaller request",
        )

    async def models(self, request: Request) -> Response:
        """Handles GET /v1/models."""
        self.check_key(request)
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """Handles GET /v1/models/NAME."""
        self.check_key(request)
        name = request.path_params["name"]
        if name != self.policy.name:
            message = f"model: this server has no model {name[:80]!r}; use {self.policy.name!r}"
            raise RequestError(404, message, param="model", code="model_not_found")
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        """Returns OpenAI's model object. The field `bacr` contains our additions to the format."""
        policy = self.policy
        return {
            "id": policy.name,
            "object": "model",
            "created": 0,
            "owned_by": "bacr_jax",
            "bacr": {
                "levels": dict(policy.levels),
                "largest_budget": policy.largest_budget,
                "default_budget": self._default_budget,
                "thinking_without_budget": policy.cap,
                "prompt_tokens": policy.prompt_tokens,
                "answer_tokens": policy.answer_tokens,
            },
        }

    async def health(self, request: Request) -> Response:
        """Handles GET /health: 200 if requests can be answered, otherwise 503 with the reason."""
        problem = await self.backend.problem()
        body = {
            "status": problem or "ok",
            "running": self.running,
            "concurrency": self.limits.concurrency,
        }
        return JSONResponse(body, 503 if problem else 200)

    async def page(self, request: Request) -> Response:
        """Handles GET /: returns the HTML page."""
        headers = {"content-security-policy": _PAGE_POLICY, "cache-control": "no-store"}
        return HTMLResponse(_page(), headers=headers)


def _page() -> str:
    """Returns the HTML page, on which a user can ask a question at two budgets."""
    return importlib.resources.files("bacr_serve").joinpath("page.html").read_text("utf-8")


class _GenerationResponse(Response):
    """An HTTP response whose tokens are generated while the response is being sent."""

    def __init__(self, service: Service, asked: Asked, request: Generation):
        """Creates the response without generating any tokens."""
        super().__init__()
        self._service = service
        self._asked = asked
        self._request = request
        self._has_started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generates and sends the response, or cancels it if the client disconnects."""
        service = self._service
        if service.running >= service.limits.concurrency:
            message = (
                f"server: {service.running} requests are running, which is the limit; try again "
                "later"
            )
            busy = error_response(RequestError(429, message, code="rate_limit_exceeded"))
            return await busy(scope, receive, send)
        service.running += 1
        try:
            await _until_disconnect(receive, self._respond(scope, receive, send))
        finally:
            service.running -= 1
        return None

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response, or an error if generation fails or takes too long."""
        seconds = self._service.limits.seconds
        try:
            async with asyncio.timeout(seconds):
                if self._asked.stream:
                    await self._stream(send)
                else:
                    await JSONResponse(await self._whole())(scope, receive, send)
            return
        except TimeoutError:
            error = RequestError(
                504,
                f"timeout: the response was not complete after {seconds:g} s; use a smaller budget",
            )
        except BackendError as failure:
            error = RequestError(502, f"engine: {failure}")
        except ClientDisconnect:
            return
        except OSError:
            # The connection was closed while the response was sent.
            return
        except Exception:
            _LOG.exception("a request failed")
            error = _internal_error()
        if self._has_started:
            await _send_event(send, error.body(), more=False)
        else:
            await error_response(error)(scope, receive, send)

    async def _whole(self) -> dict[str, Any]:
        """Generates the complete response and returns its JSON body."""
        reply = Reply(self._service.policy, self._asked, self._request)
        pieces = generate(self._service.backend, self._request)
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                reply.take(piece)
        reply.finish()
        return reply.whole()

    async def _stream(self, send: Send) -> None:
        """Generates the response and sends it as server-sent events.

        The HTTP status is sent with the first piece, so that an earlier error can have its own
        status.
        """
        reply = Reply(self._service.policy, self._asked, self._request)
        pieces = generate(self._service.backend, self._request)
        # Closing the generator frees the decoding slot at once if the request is cancelled while an
        # event is sent.
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                change = reply.take(piece)
                if not self._has_started:
                    await self._start(send, reply)
                # Forced tokens change the counts without any text.
                if change or piece.closed_by is not None:
                    await _send_event(send, reply.chunk(change))
        if not self._has_started:
            await self._start(send, reply)
        rest = reply.finish()
        if rest:
            await _send_event(send, reply.chunk(rest))
        await _send_event(send, reply.last_chunk())
        if self._asked.stream_usage:
            await _send_event(send, reply.usage_chunk())
        done = {"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False}
        await send(done)

    async def _start(self, send: Send, reply: Reply) -> None:
        """Sends the status and headers of a stream and, for a chat, the event with the role."""
        self._has_started = True
        await send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})
        if self._asked.is_chat:
            await _send_event(send, reply.first_chunk())


async def _send_event(send: Send, body: dict[str, Any], *, more: bool = True) -> None:
    """Sends a JSON object as a server-sent event. `more` is False for the last event."""
    content = f"data: {json.dumps(body, ensure_ascii=False)}\n\n".encode()
    await send({"type": "http.response.body", "body": content, "more_body": more})


async def _until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine, but cancels it if the client disconnects."""
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()
        disconnect.cancel()
        # Wait until the request has freed its slot.
        await asyncio.gather(task, disconnect, return_exceptions=True)
    if not task.cancelled():
        task.result()


async def _disconnect(receive: Receive) -> None:
    """Waits until the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


def error_response(error: RequestError) -> Response:
    """Converts an error to an HTTP response in OpenAI's format."""
    headers = {}
    if error.status == 429:
        headers["retry-after"] = str(_RETRY_SECONDS)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status in (408, 413):
        # The rest of the body was not read, so the connection can't be used for another request.
        headers["connection"] = "close"
    return JSONResponse(error.body(), error.status, headers)


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Converts Starlette's error for an unknown route or method to OpenAI's format."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path[:80]}"
    return error_response(RequestError(error.status_code, f"{where}: {error.detail}"))


async def _on_disconnect(request: Request, error: Exception) -> Response:
    """Handles a client that disconnected while it sent the body. The response is not sent."""
    return Response(status_code=400)


async def _on_fault(request: Request, error: Exception) -> Response:
    return error_response(_internal_error())


def _internal_error() -> RequestError:
    """Returns the error for an unexpected exception, whose details are only in the server's log."""
    return RequestError(
        500, "server: an internal error occurred; see the log of the server for the details"
    )


_HANDLERS: dict[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
    RequestError: _on_request_error,
    HTTPException: _on_http_error,
    ClientDisconnect: _on_disconnect,
    Exception: _on_fault,
}


def make_app(service: Service) -> Starlette:
    """Builds the ASGI application of a service."""
    routes = [
        Route("/", service.page, methods=["GET"]),
        Route("/health", service.health, methods=["GET"]),
        Route("/v1/models", service.models, methods=["GET"]),
        Route("/v1/models/{name:path}", service.model, methods=["GET"]),
        Route("/v1/chat/completions", service.chat, methods=["POST"]),
        Route("/v1/completions", service.completion, methods=["POST"]),
    ]
    handlers: Any = _HANDLERS
    return Starlette(routes=routes, exception_handlers=handlers)
