"""Backend that generates responses with this package's decoder.

Only one worker thread uses JAX. It receives requests from the server's event loop and returns the
pieces of responses through queues. If a request is cancelled, its decoding slot becomes free before
the next chunk of tokens is decoded.
"""

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from bacr_jax.out_of_memory import OutOfMemory
from bacr_serve.generation import BackendError, Generation, Piece
from bacr_serve.slots import Event

# Seconds to wait for the worker's running chunk when the server stops.
_STOP_SECONDS = 30.0


class _SlotsLike(Protocol):
    """The methods of `slots.Slots` that the worker thread calls."""

    @property
    def free(self) -> int: ...

    @property
    def size(self) -> int: ...

    def add(self, requests: list[tuple["_Ticket", Generation]]) -> None: ...

    def remove(self, handle: "_Ticket") -> None: ...

    def step(self) -> list[Event]: ...


class _Ticket:
    """A request and the queue through which the worker thread returns its response.

    Attributes:
      request: the request.
      is_abandoned: True if the client no longer waits for the response.
      pieces: queue of the pieces and errors of the response. None marks its end.
    """

    def __init__(self, request: Generation):
        self.request = request
        self.is_abandoned = False
        self.pieces: asyncio.Queue[Piece | BackendError | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def deliver(self, *items: Piece | BackendError | None) -> None:
        """Adds items to `pieces` in the event loop's thread. Called by the worker thread."""

        def put() -> None:
            for item in items:
                self.pieces.put_nowait(item)

        try:
            self._loop.call_soon_threadsafe(put)
        except RuntimeError:
            # The event loop was closed while the worker finished its last chunk.
            self.is_abandoned = True


class EmbeddedBackend:
    """Decodes on this machine, one request per decoding slot. Other requests wait in order."""

    def __init__(self, make_slots: Callable[[], _SlotsLike], warm_up: Generation | None = None):
        """Creates the backend without starting its worker thread.

        Args:
          make_slots: loads the policy and returns its decoder. Called in the worker thread.
          warm_up: request that `start` runs to compile the programs, or None.
        """
        self._make_slots = make_slots
        self._warm_up = warm_up
        self._incoming: queue.SimpleQueue[_Ticket | None] = queue.SimpleQueue()
        self._failure = ""
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    async def start(self) -> None:
        """Starts the worker thread, loads the policy and compiles its programs.

        Raises:
          Exception: any error that occurs while the policy is loaded or its programs are compiled.
        """
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        self._thread = threading.Thread(target=self._work, args=(loop, ready), daemon=True)
        self._thread.start()
        await ready
        if self._warm_up is None:
            return
        try:
            async for _ in self.generate(self._warm_up):
                pass
        except BackendError:
            # Restarting the server doesn't help if its memory is too small. Loading the policy
            # raises the same error.
            if isinstance(self._error, OutOfMemory):
                raise self._error from None
            raise

    async def stop(self) -> None:
        """Stops the worker thread after the chunk that it is decoding."""
        if self._thread is not None:
            self._incoming.put(None)
            await asyncio.to_thread(self._thread.join, _STOP_SECONDS)

    async def problem(self) -> str:
        """Returns the reason why no request can be answered now, or "" if there is none."""
        return self._failure

    async def generate(self, request: Generation) -> AsyncGenerator[Piece, None]:
        """Yields the pieces of a response. Closing the generator stops the decoding of the request.

        Raises:
          BackendError: if the decoder failed.
        """
        ticket = _Ticket(request)
        self._incoming.put(ticket)
        # Check for a failure after adding the request. A failing worker empties the queue only
        # once, so a request that is added later would wait forever.
        if self._failure:
            raise BackendError(self._failure)
        try:
            while (item := await ticket.pieces.get()) is not None:
                if isinstance(item, BackendError):
                    raise item
                yield item
        finally:
            ticket.is_abandoned = True

    def _work(self, loop: asyncio.AbstractEventLoop, ready: "asyncio.Future[None]") -> None:
        """Decodes requests in the worker thread until `stop` is called or the decoder fails.

        Args:
          loop: the server's event loop.
          ready: future that is completed when the policy is loaded or cannot be loaded.
        """
        try:
            slots = self._make_slots()
        except Exception as error:
            loop.call_soon_threadsafe(ready.set_exception, error)
            return
        loop.call_soon_threadsafe(ready.set_result, None)
        tickets: list[_Ticket] = []
        try:
            while self._collect(tickets):
                self._advance(slots, tickets)
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else ""
            # After an error, the state on the device is unknown, so no later request can be
            # answered.
            name = type(error).__name__
            self._error = error
            self._failure = f"the decoder failed ({name}: {reason}); restart the server"
            while not self._incoming.empty():
                tickets += filter(None, [self._incoming.get()])
            for ticket in tickets:
                ticket.deliver(BackendError(self._failure))

    def _collect(self, tickets: list[_Ticket]) -> bool:
        """Moves new requests to `tickets`, and waits for a request if `tickets` is empty.

        Returns False if `stop` was called.
        """
        while not tickets or not self._incoming.empty():
            ticket = self._incoming.get()
            if ticket is None:
                return False
            tickets.append(ticket)
        return True

    def _advance(self, slots: _SlotsLike, tickets: list[_Ticket]) -> None:
        """Removes cancelled requests, starts waiting requests and decodes one chunk of tokens.

        Args:
          slots: the decoder.
          tickets: running and waiting requests in order of arrival.
        """
        for ticket in [ticket for ticket in tickets if ticket.is_abandoned]:
            slots.remove(ticket)
            tickets.remove(ticket)
        running = slots.size - slots.free
        entering = tickets[running : running + slots.free]
        if entering:
            slots.add([(ticket, ticket.request) for ticket in entering])
        for event in slots.step():
            event.handle.deliver(event.result)
            if event.is_last:
                event.handle.deliver(None)
                tickets.remove(event.handle)
