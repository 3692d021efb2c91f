"""Backend that answers requests with this package's decoder, in one worker thread that owns JAX.

The event loop and the worker exchange requests and pieces through queues. A request that is
cancelled frees its slot before the next chunk.
"""

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from bacr_serve.generation import BackendError, Generation, Piece
from bacr_serve.slots import Event

# Seconds to wait for the worker's running chunk when the server stops.
_STOP_SECONDS = 30.0


class _SlotsLike(Protocol):
    """The part of `slots.Slots` that the worker calls."""

    @property
    def free(self) -> int: ...

    @property
    def size(self) -> int: ...

    def add(self, requests: list[tuple["_Ticket", Generation]]) -> None: ...

    def remove(self, handle: "_Ticket") -> None: ...

    def step(self) -> list[Event]: ...


class _Ticket:
    """A request on its way through the worker.

    Attributes:
      request: the request.
      is_abandoned: True if the client no longer waits for the response. Set by the event loop.
      pieces: pieces and errors of the response; None after the last one.
    """

    def __init__(self, request: Generation):
        self.request = request
        self.is_abandoned = False
        self.pieces: asyncio.Queue[Piece | BackendError | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def deliver(self, *items: Piece | BackendError | None) -> None:
        """Passes items to the event loop. Called by the worker."""

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
        """Creates the backend. The worker starts with `start`.

        Args:
          make_slots: loads the policy. Called in the worker thread.
          warm_up: request that is answered before the server is ready, which compiles the programs.
        """
        self._make_slots = make_slots
        self._warm_up = warm_up
        self._incoming: queue.SimpleQueue[_Ticket | None] = queue.SimpleQueue()
        self._failure = ""
        self._thread: threading.Thread | None = None

    async def start(self) -> None:
        """Loads the policy and compiles its programs.

        Raises:
          Exception: any error of the loading or of the compilation.
        """
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        self._thread = threading.Thread(target=self._work, args=(loop, ready), daemon=True)
        self._thread.start()
        await ready
        if self._warm_up is not None:
            async for _ in self.generate(self._warm_up):
                pass

    async def stop(self) -> None:
        """Waits until the worker has finished its running chunk."""
        if self._thread is not None:
            self._incoming.put(None)
            await asyncio.to_thread(self._thread.join, _STOP_SECONDS)

    async def problem(self) -> str:
        """Returns why no request can be answered now, or ""."""
        return self._failure

    async def generate(self, request: Generation) -> AsyncGenerator[Piece, None]:
        """Yields the pieces of a response. Closing the generator stops the decoding of the request.

        Raises:
          BackendError: if the decoder failed.
        """
        ticket = _Ticket(request)
        self._incoming.put(ticket)
        # A worker that fails empties the queue once. The failure is checked after the request was
        # added, so that a request added later does not wait forever.
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
        """Runs in the worker thread until `stop`, or until the decoder fails."""
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
            self._failure = f"the decoder failed ({name}: {reason}); restart the server"
            while not self._incoming.empty():
                tickets += filter(None, [self._incoming.get()])
            for ticket in tickets:
                ticket.deliver(BackendError(self._failure))

    def _collect(self, tickets: list[_Ticket]) -> bool:
        """Appends new tickets, and waits for one if there is none. Returns False after `stop`."""
        while not tickets or not self._incoming.empty():
            ticket = self._incoming.get()
            if ticket is None:
                return False
            tickets.append(ticket)
        return True

    def _advance(self, slots: _SlotsLike, tickets: list[_Ticket]) -> None:
        """Removes cancelled requests, starts waiting ones, and decodes one chunk of all.

        Args:
          slots: the decoder.
          tickets: running and waiting tickets, in the order of their arrival.
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
