"""Samples training rollouts with vLLM servers.

After each update, the learner sends its weights to the servers. The servers then sample the traces
of the next rollout. `training/served.py` builds the fleet. This module does not start or stop
servers.
"""

import asyncio
import dataclasses
import functools
import re
import secrets
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
from bacr_jax.rollout.rows import Callbacks, RolloutRequest, SamplingSetup
from bacr_jax.rollout.served import AnsweredRow, AskedRow, RemoteSampling, ask, together
from bacr_jax.types import Params, Poll, Prompts

# Seconds between two connection attempts to a server that is still starting.
_START_INTERVAL = 2.0
# Timeout in seconds for servers to start.
_START_TIMEOUT = 3600.0
# Maximum number of concurrent requests to a server during a check of its weights.
_CHECKS_AT_ONCE = 16
# Name of a version of weights that a run has sent, see `Fleet.name`.
_VERSION_NAME = re.compile(r"\w+-\d+")
# HTTP status codes of invalid requests, which every other server would reject as well.
_WRONG_REQUEST = (400, 422)
# HTTP status codes of at least this value mean that the server, or a proxy in front of it, is not
# ready yet.
_SERVER_FAULT = 500


class ServersLost(Preempted):
    """Raised if all servers are lost. The run saves a checkpoint and can be resumed."""


@runtime_checkable
class SampleTraces(Protocol):
    """Interface for sampling training rollouts with the built-in decoder or a fleet of servers."""

    def load(self, params: Params, version: int, poll: Poll = None) -> None:
        """Loads parameters of the policy, with which later rollouts are sampled.

        Args:
          params: parameters of the policy.
          version: version number of the parameters.
          poll: callback that may raise an exception to stop waiting. None disables it.
        """

    def generate(
        self,
        prompts: Prompts,
        rows: RolloutRequest,
        key: jax.Array,
        setup: SamplingSetup,
        callbacks: Callbacks,
    ) -> Rollout:
        """Samples a rollout with the loaded parameters.

        The arguments are as for `rollouts.generate`.
        """


@dataclass
class Fleet:
    """A group of vLLM servers that sample with the same version of the policy.

    A fleet replaces the built-in decoder and implements `SampleTraces`. If a server is lost, for
    example because it no longer responds, another server samples its unfinished traces again with
    the same seeds. Lost servers are tried again at the next weight update.

    Attributes:
      servers: all servers.
      remote_sampling: settings of remote sampling.
      probe: functions with which the learner checks that each server samples with the right
        weights (`probe`).
      write: function that writes parameters to a new folder in Hugging Face format.
      folder: folder that contains one folder per version of the weights. The servers must be able
        to read it.
      dtype: dtype of the servers' matrix products, for error messages.
      bound: maximum root mean square difference between log-probabilities of servers and learner,
        in nats.
      print_line: callback that prints a message.
      lock: open lock file of `folder`. It prevents a second run from deleting the versions of this
        run.
      version: version of the weights that the servers have loaded. None if unknown.
      name: name of this run on the servers, random by default. Versions of two runs that use the
        same server by mistake differ in it.
      alive: servers that are not lost.
    """

    servers: Sequence[Server]
    remote_sampling: RemoteSampling
    probe: Probe
    write: Callable[[Params, Path], Any]
    folder: Path
    dtype: str
    bound: float
    print_line: Callable[[str], None]
    lock: TextIO | None = None
    version: int | None = None
    name: str = field(default_factory=functools.partial(secrets.token_hex, 4))
    alive: list[Server] = field(default_factory=list)
    # Sum of the thinking limits (tokens) of all traces that a server is sampling, by server URL.
    _load: dict[str, int] = field(default_factory=dict)
    # URLs of servers whose settings have been checked by `Server.connect`.
    _connected: set[str] = field(default_factory=set)
    # Contexts (prompts with the beginning of a response) of the next check, and the learner's
    # log-probabilities of all next tokens after them under the current weights.
    _contexts: list[Context] = field(default_factory=list)
    _scores: np.ndarray | None = None
    # Accumulated evidence that a server still samples with older weights, by server URL.
    _evidence: dict[str, float] = field(default_factory=dict)

    def generate(
        self,
        prompts: Prompts,
        rows: RolloutRequest,
        key: jax.Array,
        setup: SamplingSetup,
        callbacks: Callbacks,
    ) -> Rollout:
        """Samples a rollout with the servers; see `SampleTraces.generate`."""
        rollout = ask(prompts, rows, key, setup, callbacks, self._sample_row)
        self._check_versions(callbacks.poll)
        return rollout

    async def _sample_row(self, asked: AskedRow, requests: asyncio.Semaphore) -> AnsweredRow:
        """Samples a trace with the least loaded server. If that server is lost, tries another one.

        Args:
          asked: the trace to sample.
          requests: limits the number of requests in flight.

        Raises:
          ServersLost: all servers are lost.
          UserError: a server rejects the request or returns invalid tokens.
        """
        while True:
            if not self.alive:
                raise ServersLost("rollout.urls: all servers have stopped responding")
            server = min(self.alive, key=lambda server: self._load.get(server.url, 0))
            load = self._load.get(server.url, 0)
            self._load[server.url] = load + asked.limit
            complete = functools.partial(self._complete, server)
            try:
                return await self.remote_sampling.row(asked, complete, requests)
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
        """Requests tokens and their log-probabilities. The arguments are as for `Server.complete`.

        Raises:
          EngineError: the server is lost.
          UserError: the server rejects the request.
        """
        try:
            tokens, logprobs = await server.complete(call, sampling, part, xargs)
        except Refused as refused:
            if refused.status in _WRONG_REQUEST:
                raise UserError(f"rollout.urls: {refused}") from None
            raise
        if tokens and not logprobs:
            raise EngineError(
                f"{server.url} returns no log-probabilities, which training needs; start it with "
                "--logprobs-mode processed_logprobs"
            )
        check_logprobs(server.url, logprobs, len(tokens))
        return tokens, logprobs

    def _lose(self, server: Server, error: Exception) -> None:
        """Marks a server as lost and prints a warning."""
        if server in self.alive:
            self.alive.remove(server)
            remaining = f"{len(self.alive)} of {len(self.servers)} servers continue"
            self.print_line(f"WARNING, rollout.urls: {error}; {remaining}")

    def load(self, params: Params, version: int, poll: Poll = None) -> None:
        """Sends weights to the servers and checks that the servers sample with these weights.

        The weights are not sent if the servers already have this version.

        Raises:
          ServersLost: all servers are lost.
          UserError: a server samples with wrong weights, or the folder is not writable.
        """
        if self.version == version:
            self._check_versions(poll)
        else:
            self._send(params, version, poll)
        self._check(params, version, poll)

    def _version_name(self, version: int) -> str:
        """Returns the name of a version of the weights that servers report."""
        return f"{self.name}-{version}"

    def _check_versions(self, poll: Poll) -> None:
        """Checks that the servers still have the weights that this run sent to them.

        Another learner that uses the same server replaces them, and both would then train on
        samples of the other policy. A server that was restarted since then reports a name that is
        not a run's, and is marked as lost.

        Raises:
          UserError: a server has the weights of another run.
        """
        assert self.version is not None
        expected = self._version_name(self.version)
        servers = list(self.alive)
        work = [self._reported_version(server) for server in servers]
        versions = asyncio.run(together(work, len(work), poll))
        for server, reported in zip(servers, versions):
            if server not in self.alive or reported == expected:
                continue
            if _VERSION_NAME.fullmatch(str(reported)):
                raise UserError(
                    f"rollout.urls: {server.url} reports weights of version {reported!r:.40}, but "
                    f"this run has loaded version {expected!r}, so another run uses the same "
                    "server; use different servers for each run"
                )
            self._lose(server, EngineError(f"{server.url} was restarted and has other weights"))

    async def _reported_version(self, server: Server) -> Any:
        """Returns the version of a server's weights. Marks the server as lost if it has failed."""
        try:
            return await server.weight_version()
        except EngineError as error:
            self._lose(server, error)
            return None

    def _send(self, params: Params, version: int, poll: Poll) -> None:
        """Writes the weights to a folder, makes all servers load it, and deletes older folders."""
        path = self.folder / f"version-{version}"
        is_first_push = self.version is None and not self.alive
        self.version = None
        self._write(params, path)
        if is_first_push:
            self._wait(path, poll)
        self.alive = list(self.servers)
        pushes = [self._push(server, path, version) for server in self.servers]
        asyncio.run(together(pushes, len(pushes), poll))
        if not self.alive:
            raise ServersLost("rollout.urls: none of the servers could load the new weights")
        self.version = version
        for old in set(self.folder.glob("version-*")) - {path}:
            shutil.rmtree(old, ignore_errors=True)

    def _write(self, params: Params, path: Path) -> None:
        """Writes the weights to a folder.

        Raises:
          UserError: writing failed, for example because the disk is full.
        """
        # Also delete hidden folders, which are incomplete writes of a killed process.
        for old in (path, *self.folder.glob(".version-*")):
            shutil.rmtree(old, ignore_errors=True)
        try:
            self.write(params, path)
        except (OSError, UserError) as error:
            shutil.rmtree(path, ignore_errors=True)
            reason = error.strerror if isinstance(error, OSError) else error
            raise UserError(
                f"rollout.weights_dir={self.folder}: the weights can't be written to this folder "
                f"({reason}); use a folder with more free space"
            ) from None

    def _wait(self, path: Path, poll: Poll) -> None:
        """Waits until all servers respond.

        The user may start the servers with the first weights that the run writes, so they may not
        be running yet.

        A server that rejects the request, for example because of a wrong API key, counts as
        started. After `_START_TIMEOUT` seconds, the run continues with the servers that respond.

        Raises:
          ServersLost: no server responds within `_START_TIMEOUT` seconds.
        """
        deadline = time.monotonic() + _START_TIMEOUT
        is_announced = False
        while True:
            attempts = [self._start_problem(server) for server in self.servers]
            reasons = asyncio.run(together(attempts, len(attempts), poll))
            missing = [reason for reason in reasons if reason is not None]
            if not missing:
                return
            if not is_announced:
                self.print_line(f"waiting for servers of {path}: {'; '.join(missing)}")
                is_announced = True
            if time.monotonic() >= deadline:
                break
            time.sleep(_START_INTERVAL)
        if len(missing) == len(self.servers):
            raise ServersLost(
                f"rollout.urls: none of the servers responded within {_START_TIMEOUT:g} s"
            )

    async def _start_problem(self, server: Server) -> str | None:
        """Returns why a server has not started yet, or None if it has started."""
        try:
            await server.find()
        except Refused as refused:
            return str(refused) if refused.status >= _SERVER_FAULT else None
        except EngineError as error:
            return str(error)
        return None

    async def _push(self, server: Server, path: Path, version: int) -> None:
        """Makes a server load the weights. A server that fails to load them is marked as lost."""
        try:
            await server.load(str(path.absolute()), self._version_name(version))
            # Connect after loading, because a server whose previous learner died while loading
            # weights does not respond to any other request until it has loaded weights.
            if server.url not in self._connected:
                await server.connect()
                self._connected.add(server.url)
        except EngineError as error:
            self._lose(server, error)

    def _check(self, params: Params, version: int, poll: Poll) -> None:
        """Checks that each server samples with the weights that were sent to it.

        Each server samples a token after each of a set of contexts. Its log-probabilities of these
        tokens are compared with the learner's.

        Raises:
          UserError: a server samples with wrong weights or returns invalid tokens.
        """
        if not self._contexts:
            self._contexts = self._draw_contexts(version, poll)
        ours = self.probe.score(params, self._contexts)
        lengths = [1] * len(ours)
        servers = list(self.alive)
        work = [self._continue(server, self._contexts, lengths) for server in servers]
        replies = asyncio.run(together(work, len(work), poll))
        for server, reply in zip(servers, replies):
            if reply is not None:
                tokens = [ids[0] for ids, _ in reply]
                theirs = [logprobs[0] for _, logprobs in reply]
                self._judge(server, np.array(tokens), np.array(theirs, float), ours)
        self._contexts = self._draw_contexts(version + 1, poll)
        self._scores = self.probe.score(params, self._contexts)

    def _judge(
        self, server: Server, tokens: np.ndarray, theirs: np.ndarray, ours: np.ndarray
    ) -> None:
        """Raises UserError if a server does not sample with the most recent weights.

        Args:
          tokens: the token that the server sampled after each context.
          theirs: the server's log-probabilities of these tokens.
          ours: the learner's log-probabilities of all tokens, [contexts, vocabulary].
        """
        by_learner = picked(ours, tokens)
        difference = rms_difference(theirs, by_learner)
        # Use `not` and `<=`, because a comparison with NaN is False, and NaN must be rejected.
        if not difference <= self.bound:
            raise UserError(
                f"rollout.urls: {server.url} does not sample with the weights that it received: "
                "its log-probabilities of a fixed prompt differ from the learner's by "
                f"{difference:.2g} (allowed: {self.bound:.2g}); start the server again, with "
                f"--logprobs-mode processed_logprobs and --dtype {self.dtype}"
            )
        if self._scores is None:
            return
        before = picked(self._scores, tokens)
        evidence = self._evidence.get(server.url, 0.0)
        evidence += evidence_of_stale_weights(theirs, by_learner, before, self.bound)
        self._evidence[server.url] = max(evidence, 0.0)
        if evidence > CERTAIN:
            raise UserError(
                f"rollout.urls: {server.url} does not sample with the weights that it received: "
                "its log-probabilities of fixed prompts are closer to those of the previous "
                f"weights (difference {rms_difference(theirs, before):.2g}) than to those of the "
                f"new ones ({difference:.2g}); start the server again (docs/vllm-training.md)"
            )

    def _draw_contexts(self, version: int, poll: Poll) -> list[Context]:
        """Returns contexts (prompts with the beginning of a response) for the check of a version.

        The responses are sampled by the first server that is not lost.

        Raises:
          ServersLost: all servers are lost.
        """
        prompts = self.probe.draw(version)
        lengths = [1 + index % DEPTH for index in range(len(prompts))]
        while self.alive:
            server = self.alive[0]
            work = [self._continue(server, prompts, lengths)]
            (reply,) = asyncio.run(together(work, 1, poll))
            if reply is not None:
                contexts = []
                for prompt, (ids, _) in zip(prompts, reply):
                    contexts.append(dataclasses.replace(prompt, response=tuple(ids)))
                return contexts
        raise ServersLost("rollout.urls: all servers have stopped responding")

    async def _continue(
        self, server: Server, contexts: Sequence[Context], lengths: Sequence[int]
    ) -> list[tuple[list[int], list[float]]] | None:
        """Samples tokens after each context with one server.

        Args:
          lengths: number of tokens to sample after each context.

        Returns:
          Tokens and log-probabilities for each context, or None if the server is lost.

        Raises:
          UserError: the server returns tokens that the policy can't sample.
        """

        async def continue_one(index: int) -> tuple[list[int], list[float]]:
            context = contexts[index]
            length = lengths[index]
            tokens_before = (*context.prompt, *context.response)
            call = Call(tokens_before, length, (), (), 0)
            xargs = extras(context.budget, len(context.prompt))
            sampling = Sampling(self.probe.temperature, 1.0, index)
            tokens, logprobs = await self._complete(server, call, sampling, 0, xargs)
            try:
                check_tokens(self.remote_sampling.rules, tokens, length)
                if len(tokens) < length:
                    raise ValueError(f"{length} were requested")
            except ValueError as error:
                raise UserError(
                    f"rollout.urls: {server.url} returns the invalid tokens {shown(tokens)} for a "
                    f"fixed prompt ({error}); start the server again (docs/vllm-training.md)"
                ) from None
            return tokens, logprobs

        try:
            work = [continue_one(index) for index in range(len(contexts))]
            return await together(work, _CHECKS_AT_ONCE, None)
        except EngineError as error:
            self._lose(server, error)
            return None
