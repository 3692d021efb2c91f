"""Training rollouts by servers of vLLM: the learner's weights go out, rows come back."""

import asyncio
import dataclasses
import functools
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO, runtime_checkable

import jax
import numpy as np

from bacr_client import Call, EngineError, Refused, Sampling, Server
from bacr_client.calls import check_tokens
from bacr_client.server import check_logprobs, extras
from bacr_jax.config.values import shown
from bacr_jax.errors import UserError
from bacr_jax.parallel.preemption import Preempted
from bacr_jax.rollout.probe import (
    CERTAIN,
    DEPTH,
    Context,
    Probe,
    evidence_of_stale_weights,
    picked,
    rms_difference,
)
from bacr_jax.rollout.rollouts import Rollout
from bacr_jax.rollout.rows import Listeners, Rows, Sampler
from bacr_jax.rollout.served import AnsweredRow, AskedRow, Asking, ask, together
from bacr_jax.types import Params, Poll, Prompts

# Seconds between two questions to a server that starts, and until one is given up.
_BETWEEN, _STARTING = 2.0, 3600.0
# Contexts that a server is asked about at once when it is checked.
_CHECKS_AT_ONCE = 16
# Statuses of a server that finds fault with the request: every other server would, too.
_WRONG_REQUEST = (400, 422)
# From here on a status means that a server or what is in front of it does not work yet.
_SERVER_FAULT = 500


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


@dataclass
class Fleet:
    """Servers that hold the policy of one version; stands where the decoder does.

    A row that a server did not end is sampled again by another, under the same seed. A server that
    is lost is asked again when the next weights go out.

    Attributes:
      write: writes parameters as a Hugging Face folder that does not exist yet.
      folder: where such folders go, one for each version; the servers read it too.
      probe: finds servers that sample with other weights than they were sent.
      dtype: of the servers, and `bound`, how far off their log-probabilities may be.
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
    lock: TextIO | None = None
    held: int | None = None
    alive: list[Server] = field(default_factory=list)
    _load: dict[str, int] = field(default_factory=dict)
    _known: set[str] = field(default_factory=set)
    # Contexts of the next check, and their scores by the weights that were sent last.
    _contexts: list[Context] = field(default_factory=list)
    _scores: np.ndarray | None = None
    # Evidence that a server has kept older weights, by its address.
    _evidence: dict[str, float] = field(default_factory=dict)

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
            complete = functools.partial(self._complete, server)
            try:
                return await self.asking.row(asked, complete)
            except UserError:
                raise
            except ValueError as error:
                raise UserError(f"rollout.urls: {server.url}: {error}") from None
            except EngineError as error:
                self._lose(server, error)
            finally:
                self._load[server.url] -= asked.limit

    async def _complete(
        self, server: Server, call: Call, sampling: Sampling, part: int, xargs: Mapping[str, Any]
    ) -> tuple[list[Any], list[float]]:
        """Asks a server for tokens with their log-probabilities; arguments as of its `complete`.

        EngineError: the server is lost. UserError: the request itself is refused.
        """
        try:
            tokens, logprobs = await server.complete(call, sampling, part, xargs)
        except Refused as refused:
            if refused.status in _WRONG_REQUEST:
                raise UserError(f"rollout.urls: {refused}") from None
            raise
        if tokens and not logprobs:
            raise EngineError(
                f"{server.url}: gives no log-probabilities; start it with "
                "--logprobs-mode processed_logprobs"
            )
        check_logprobs(server.url, logprobs, len(tokens))
        return tokens, logprobs

    def _lose(self, server: Server, error: Exception) -> None:
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
        self._check(params, version, poll)

    def _send(self, params: Params, version: int, poll: Poll) -> None:
        path = self.folder / f"version-{version}"
        is_first_push = self.held is None and not self.alive
        self.held = None
        self._write(params, path)
        if is_first_push:
            self._wait(path, poll)
        self.alive = list(self.servers)
        pushes = [self._push(server, path, version) for server in self.servers]
        asyncio.run(together(pushes, len(pushes), poll))
        if not self.alive:
            raise ServersLost("rollout.urls: no server took the weights")
        self.held = version
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
        """Waits until all servers answer: those started with the run read its first folder.

        A server that refuses to be asked (a wrong key, say) is not waited for. A server that does
        not answer is waited for `_STARTING` seconds; ServersLost: none answers until then.
        """
        until, is_announced = time.monotonic() + _STARTING, False
        while True:
            attempts = [self._absence(server) for server in self.servers]
            reasons = asyncio.run(together(attempts, len(attempts), poll))
            missing = [reason for reason in reasons if reason is not None]
            if not missing:
                return
            if not is_announced:
                self.say(f"waiting for servers of {path}: {'; '.join(missing)}")
                is_announced = True
            if time.monotonic() >= until:
                break
            time.sleep(_BETWEEN)
        if len(missing) == len(self.servers):
            raise ServersLost(f"rollout.urls: not there after {_STARTING:g} s")

    async def _absence(self, server: Server) -> str | None:
        """Returns why a server can't be asked yet; None: nothing is to be waited for."""
        try:
            await server.find()
        except Refused as refused:
            return str(refused) if refused.status >= _SERVER_FAULT else None
        except EngineError as error:
            return str(error)
        return None

    async def _push(self, server: Server, path: Path, version: int) -> None:
        """Makes a server read the weights; a server that fails to read them is lost."""
        try:
            await server.load(str(path.absolute()), str(version))
            # Only now: one whose learner died while it read weights answers nothing before.
            if server.url not in self._known:
                await server.connect()
                self._known.add(server.url)
        except EngineError as error:
            self._lose(server, error)

    def _check(self, params: Params, version: int, poll: Poll) -> None:
        """Compares log-probabilities of the servers' tokens with the learner's own.

        UserError: a server samples with other weights, or its tokens can't be used.
        """
        if not self._contexts:
            self._contexts = self._drawn_contexts(version, poll)
        ours = self.probe.score(params, self._contexts)
        servers = list(self.alive)
        work = [self._continued(server, self._contexts, [1] * len(ours)) for server in servers]
        replies = asyncio.run(together(work, len(work), poll))
        for server, reply in zip(servers, replies):
            if reply is not None:
                tokens = np.array([ids[0] for ids, _ in reply])
                theirs = np.array([logprobs[0] for _, logprobs in reply], float)
                self._judge(server, tokens, theirs, ours)
        self._contexts = self._drawn_contexts(version + 1, poll)
        self._scores = self.probe.score(params, self._contexts)

    def _judge(
        self, server: Server, tokens: np.ndarray, theirs: np.ndarray, ours: np.ndarray
    ) -> None:
        """Refuses, by a UserError, a server that samples with other weights than it was sent."""
        by_learner = picked(ours, tokens)
        off = rms_difference(theirs, by_learner)
        if not off <= self.bound:
            raise UserError(
                f"rollout.urls: {server.url} does not sample with the weights it was sent: "
                f"log-probabilities of a fixed prompt differ by {off:.2g} (at most "
                f"{self.bound:g}); start it again, with --logprobs-mode processed_logprobs and "
                f"--dtype {self.dtype}"
            )
        if self._scores is None:
            return
        before = picked(self._scores, tokens)
        evidence = self._evidence.get(server.url, 0.0)
        evidence += evidence_of_stale_weights(theirs, by_learner, before, self.bound)
        self._evidence[server.url] = max(evidence, 0.0)
        if evidence > CERTAIN:
            raise UserError(
                f"rollout.urls: {server.url} does not sample with the weights it was sent: its "
                "log-probabilities of fixed prompts are nearer to the weights before "
                f"({rms_difference(theirs, before):.2g} off) than to these ({off:.2g} off); "
                "start it again (docs/serving.md)"
            )

    def _drawn_contexts(self, version: int, poll: Poll) -> list[Context]:
        """Returns contexts for the check of a version, continued by the first server that can."""
        prompts = self.probe.draw(version)
        lengths = [1 + place % DEPTH for place in range(len(prompts))]
        while self.alive:
            server = self.alive[0]
            work = [self._continued(server, prompts, lengths)]
            (reply,) = asyncio.run(together(work, 1, poll))
            if reply is not None:
                return [
                    dataclasses.replace(prompt, response=tuple(ids))
                    for prompt, (ids, _) in zip(prompts, reply)
                ]
        raise ServersLost("rollout.urls: no server is left")

    async def _continued(
        self, server: Server, contexts: Sequence[Context], lengths: Sequence[int]
    ) -> list[tuple[list[int], list[float]]] | None:
        """Returns tokens and log-probabilities that a server draws after contexts.

        None: the server is lost. UserError: its tokens are not those of a policy.

        Args:
          lengths: number of tokens after each context.
        """

        async def one(place: int) -> tuple[list[int], list[float]]:
            context, length = contexts[place], lengths[place]
            call = Call((*context.prompt, *context.response), length, (), (), 0)
            xargs = extras(context.budget, len(context.prompt))
            sampling = Sampling(1.0, 1.0, place)
            tokens, logprobs = await self._complete(server, call, sampling, 0, xargs)
            try:
                check_tokens(self.asking.rules, tokens, length)
                if len(tokens) < length:
                    raise ValueError(f"{length} were asked for")
            except ValueError as error:
                raise UserError(
                    f"rollout.urls: {server.url} answers a fixed prompt with the tokens "
                    f"{shown(tokens)} ({error}); start it again (docs/serving.md)"
                ) from None
            return tokens, logprobs

        try:
            work = [one(place) for place in range(len(contexts))]
            return await together(work, _CHECKS_AT_ONCE, None)
        except EngineError as error:
            self._lose(server, error)
            return None
