"""Training rollouts by servers of vLLM: the learner's weights go out, rows come back."""

import asyncio
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO, runtime_checkable

import jax
import numpy as np

from bacr_held import Call, EngineError, Refused, Sampling, Server
from bacr_held.server import extras
from bacr_jax.config.values import shown
from bacr_jax.errors import UserError
from bacr_jax.parallel.preemption import Preempted
from bacr_jax.rollout.nccl import Sender, Tensor
from bacr_jax.rollout.rollouts import Rollout
from bacr_jax.rollout.rows import Listeners, Rows, Sampler
from bacr_jax.rollout.served import AnsweredRow, AskedRow, Asking, ask
from bacr_jax.types import Params, Poll, Prompts

# Seconds between two questions to a server that starts, and until one is given up.
_BETWEEN, _STARTING = 2.0, 3600.0
# Tokens that are asked for after new weights were read, and how far off their log-probabilities
# may be, by the type in which either side takes products.
_PROBE, BOUNDS = 4, {"float32": 1e-3, "bfloat16": 0.1}


class ServersLost(Preempted):
    """No server is left: the run is saved, and the same command goes on with it."""


@runtime_checkable
class SampleTraces(Protocol):
    """What samples the traces of training: the decoder of this package, or servers."""

    def load(self, params: Params, version: int, poll: Poll = None) -> None:
        """Takes the learner's parameters, which a version names, for all rollouts to come."""

    def generate(
        self, prompts: Prompts, rows: Rows, key: jax.Array, sampler: Sampler, listeners: Listeners
    ) -> Rollout:
        """As `rollouts.generate`, under these parameters."""


@dataclass(frozen=True)
class Probe:
    """A prompt whose continuation is known to the learner."""

    prompt: Sequence[int]
    budget: int | None
    score: Callable[[Params, Sequence[int]], np.ndarray]


@dataclass
class Fleet:
    """Servers that hold the policy of one version; stands where the decoder does.

    A row that a server did not end is sampled again by another, under the same seed. A server that
    is lost is asked again when the next weights go out.

    Attributes:
      write: writes parameters as a Hugging Face folder that does not exist yet.
      folder: where such folders go, one for each version; the servers read it too.
      dtype: of the servers, and `bound`, how far off their log-probabilities may be.
      sender: brings weights over NCCL; a folder is then written only for servers to start with.
      lock: of the folder: another run of its name would take versions away.
      held: version that the servers hold; None: not known.
      alive: servers that can be asked.
    """

    servers: Sequence[Server]
    asking: Asking
    probe: Probe
    write: Callable[[Params, Path], Any]
    folder: Path
    dtype: str
    bound: float
    say: Callable[[str], None]
    sender: Sender | None = None
    lock: TextIO | None = None
    held: int | None = None
    alive: list[Server] = field(default_factory=list)
    _load: dict[str, int] = field(default_factory=dict)
    _known: set[str] = field(default_factory=set)

    def generate(
        self, prompts: Prompts, rows: Rows, key: jax.Array, sampler: Sampler, listeners: Listeners
    ) -> Rollout:
        """See `SampleTraces`."""
        return ask(prompts, rows, key, sampler, listeners, self._sampled)

    async def _sampled(self, asked: AskedRow) -> AnsweredRow:
        """A row by the server with the least to do, and by another if that is lost."""
        while True:
            if not self.alive:
                raise ServersLost("rollout.urls: no server is left")
            server = min(self.alive, key=lambda one: self._load.get(one.url, 0))
            self._load[server.url] = self._load.get(server.url, 0) + asked.limit
            try:
                return await self.asking.row(asked, server.complete)
            except (Refused, ValueError) as error:
                raise UserError(f"rollout.urls: {error}") from None
            except EngineError as error:
                self._lose(server, error)
            finally:
                self._load[server.url] -= asked.limit

    def _lose(self, server: Server, error: Exception) -> None:
        if self.sender is not None:
            self.sender.drop(server.url)
        if server in self.alive:
            self.alive.remove(server)
            rest = f"{len(self.alive)} of {len(self.servers)} go on"
            self.say(f"WARNING, rollout.urls: {error}; {rest}")

    def load(self, params: Params, version: int, poll: Poll = None) -> None:
        """Sends weights to every server that has others, and looks whether it samples with them.

        Raises:
          ServersLost: none is there.
          UserError: a server samples with others, or the folder can't be written.
        """
        if self.held != version:
            self._send(params, version, poll)
        self._check(params)

    def _send(self, params: Params, version: int, poll: Poll) -> None:
        path = self.folder / f"version-{version}"
        first, self.held = self.held is None and not self.alive, None
        if first or self.sender is None:
            self._write(params, path)
        if first:
            self._wait(path, poll)
        self.alive = list(self.servers)
        tensors = () if self.sender is None else self.sender.tensors(params)
        asyncio.run(self._push(path, tensors, version))
        if not self.alive:
            raise ServersLost("rollout.urls: no server took the weights")
        self.held = version
        if first or self.sender is None:
            for old in set(self.folder.glob("version-*")) - {path}:
                shutil.rmtree(old, ignore_errors=True)

    def _write(self, params: Params, path: Path) -> None:
        # Nor is anything left of what a killed process was writing.
        for old in (path, *self.folder.glob(".version-*")):
            shutil.rmtree(old, ignore_errors=True)
        try:
            self.write(params, path)
        except (OSError, UserError) as error:
            shutil.rmtree(path, ignore_errors=True)
            reason = error.strerror if isinstance(error, OSError) else error
            raise UserError(
                f"rollout.weights_dir={self.folder}: can't hold the policy ({reason}); write a "
                "folder with more room"
            ) from None

    def _wait(self, path: Path, poll: Poll) -> None:
        """Until all servers answer: those that are started with the run read its first folder."""
        until, told = time.monotonic() + _STARTING, False
        while time.monotonic() < until:
            found = asyncio.run(self._connected())
            if not any(isinstance(one, Exception) for one in found):
                return
            if not told:
                self.say(
                    f"waiting for servers of {path}: {'; '.join(map(str, filter(None, found)))}"
                )
                told = True
            if poll is not None:
                poll()
            time.sleep(_BETWEEN)
        raise ServersLost(f"rollout.urls: not there after {_STARTING:g} s")

    async def _connected(self) -> list[Any]:
        return await asyncio.gather(
            *(server.find() for server in self.servers), return_exceptions=True
        )

    async def _push(self, path: Path, tensors: Sequence[Tensor], version: int) -> None:
        async def one(server: Server) -> None:
            try:
                if self.sender is None:
                    await server.load(str(path.absolute()), str(version))
                else:
                    await self.sender.load(server, tensors, str(version))
                # Only now: one whose learner died while it read weights answers nothing before.
                if server.url not in self._known:
                    await server.connect()
                    self._known.add(server.url)
            except EngineError as error:
                self._lose(server, error)

        await asyncio.gather(*map(one, self.servers))

    def _check(self, params: Params) -> None:
        """Compares log-probabilities of a fixed prompt with the learner's own."""
        probe, bound = self.probe, self.bound
        call = Call(tuple(probe.prompt), _PROBE, (), (), 0)
        told = extras(probe.budget, len(probe.prompt))
        for server in list(self.alive):
            try:
                tokens, theirs = asyncio.run(server.complete(call, Sampling(1.0, 1.0, 0), 0, told))
            except EngineError as error:
                self._lose(server, error)
                continue
            if len(theirs) != len(tokens):
                raise UserError(
                    f"rollout.urls: {server.url} gives no log-probabilities; start it with "
                    "--logprobs-mode processed_logprobs"
                )
            if not tokens or not all(isinstance(token, int) for token in tokens):
                said = f"rollout.urls: {server.url} answers a fixed prompt with the tokens "
                raise UserError(f"{said}{shown(tokens)}; start it again (docs/serving.md)")
            off = float(np.abs(probe.score(params, tokens) - np.array(theirs)).max())
            if not off <= bound:
                raise UserError(
                    f"rollout.urls: {server.url} does not sample with the weights it was sent: "
                    f"log-probabilities of a fixed prompt differ by {off:.2g} (at most {bound:g}); "
                    "start it again, with --logprobs-mode processed_logprobs and --dtype "
                    f"{self.dtype}"
                )
