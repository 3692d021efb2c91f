"""Async client for an OpenAI-compatible vLLM server with the plugin `bacr-vllm`.

Prompts and completions are sent and received as token ids. Used for rollouts and evaluations on a
server.
"""

import contextlib
import dataclasses
import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from bacr_client.calls import Call, Response, Sampling, Thinking, response_of
from bacr_client.http_json import (
    SHORT,
    EngineError,
    Refused,
    Timeouts,
    one_line,
    request_json,
    stream_json,
)
from bacr_client.rules import LARGEST, BudgetRules, read_budget

# Timeouts of a request that waits for running requests or for loading a large model from disk.
LOADING = Timeouts(first=600.0, between=600.0, whole=900.0)
# Timeouts of a health check, which detects a server that hangs before a request with long timeouts
# is sent.
PING = Timeouts(first=15.0, between=15.0, whole=15.0)
# Timeouts of a request that may wait in the server's queue for any time, for a caller that limits
# the time of the whole response. Only connecting is limited, because a server with a full queue
# still accepts connections.
QUEUED = Timeouts(first=math.inf, between=math.inf, whole=math.inf, connect=PING.first)
# Values of `finish_reason` for a completion that was not aborted. Older servers send None.
_FINISHED = (None, "stop", "length")
# HTTP status code of a server that limits the number of requests.
TOO_MANY_REQUESTS = 429
# The seed of a response is multiplied by this number, to which the number of the call is added.
# Calls of different responses therefore have different seeds.
_SEED_STRIDE = 1_000_003


def seed_of(sampling: Sampling, part: int, call: Call) -> int:
    """Returns the random seed of a single completion request (call).

    A response is sampled by several calls, and each of them gets a different seed.

    Args:
      sampling: sampling parameters, including the seed of the response.
      part: index of the part of the response that the call samples: 0 for the thinking, and 1 or
        more for the answers.
      call: the call.
    """
    return (sampling.seed * _SEED_STRIDE + part * 4096 + call.number) % 2**63


def parameters(call: Call, sampling: Sampling, part: int) -> dict[str, Any]:
    """Returns vLLM's sampling parameters for a call.

    The same parameters are used for offline inference and over HTTP.

    Args:
      call: the call.
      sampling: sampling parameters of the response.
      part: 0 for the thinking, 1 or more for the answers (see `seed_of`).
    """
    return {
        "max_tokens": call.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": None if sampling.temperature == 0 else seed_of(sampling, part, call),
        "stop": list(call.stop),
        "stop_token_ids": list(call.stop_ids),
        # Only the stop ids above end the turn, even if the model's config lists other EOS tokens.
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        # Set explicitly, because the server would otherwise use the values of the model's
        # generation_config.json.
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }


def timeouts_of(call: Call) -> Timeouts:
    """Returns the timeouts of a completion, assuming at least 2 tokens per second."""
    # The completion is not streamed, so no bytes arrive until all tokens are sampled.
    first = 300.0 + call.max_tokens / 2
    return Timeouts(first=first, between=60.0, whole=first + 300.0)


def extras(budget: int | None, prompt_tokens: int) -> dict[str, int | str]:
    """Returns the request arguments (vLLM's `vllm_xargs`) from which the plugin reads the budget.

    Args:
      budget: thinking budget in tokens, or None for no budget.
      prompt_tokens: number of tokens in the prompt, which is the position at which the response
        starts.
    """
    return {"budget": "none" if budget is None else budget, "response_from": prompt_tokens}


def check_logprobs(url: str, logprobs: Any, count: int) -> None:
    """Checks the log-probabilities of sampled tokens that a server returned.

    Args:
      url: address of the server, for error messages.
      logprobs: the value that the server returned.
      count: number of sampled tokens.

    Raises:
      EngineError: if there are not `count` values, or a value is not the logarithm of a probability
        in (0, 1]. vLLM returns -9999 for the probability 0, which a sampled token cannot have.
    """
    values = logprobs
    if not isinstance(logprobs, list):
        values = [logprobs]
    for value in values:
        if not _is_logprob(value):
            raise EngineError(
                f"{url}: the server returned {one_line(repr(value), 40)} as the log-probability "
                "of a sampled token, which must be a finite number of at most 0"
            )
    if len(values) != count:
        raise EngineError(
            f"{url}: the server returned {len(values)} log-probabilities for {count} tokens"
        )


def _is_logprob(value: Any) -> bool:
    """True if a value is the logarithm of a probability in (0, 1]."""
    # Compare the exact type, because bool is a subclass of int.
    if type(value) not in (int, float) or not value <= 0:
        return False
    try:
        return math.exp(value) > 0
    except OverflowError:
        return False


def is_address(url: str) -> bool:
    """True if a text is an http or https URL with a host and an optional, valid port."""
    try:
        parts = urlsplit(url)
        has_port = parts.port != 0
    except ValueError:
        return False
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return False
    has_blanks = url.split() != [url]
    return has_port and not has_blanks


def _only_choice(reply: Any) -> dict[str, Any]:
    """Returns the only completion in a reply, or an empty dict if the reply is malformed."""
    if not isinstance(reply, dict):
        return {}
    choices = reply.get("choices")
    if not isinstance(choices, list) or len(choices) != 1:
        return {}
    return choices[0] if isinstance(choices[0], dict) else {}


class Server:
    """Async client for a single server.

    All requests raise `EngineError` if the server cannot be reached, closes the connection, times
    out or sends an invalid response. They raise `Refused` if the server rejects the request.

    Attributes:
      url: base URL of the server without `/v1`.
      folder: fingerprint of the exported model folder that the server must serve, which is sent
        with every request. The empty string accepts any folder.
      model: name of the served model. Set by `connect` or `find`.
      length: maximum number of tokens in prompt and response together. Set by `connect` or `find`.
    """

    def __init__(self, url: str, *, folder: str = ""):
        """Initializes the client without connecting to the server.

        Args:
          url: address of the server, such as http://127.0.0.1:8000.
          folder: fingerprint of the folder that the server must serve, or "" for any folder.

        Raises:
          ValueError: if `url` is not a valid address.
        """
        if not is_address(url):
            raise ValueError(
                f"{url!r} is not an address of a server; use the form http://HOST:PORT"
            )
        self.url = url.rstrip("/").removesuffix("/v1")
        self.folder = folder
        self.model = ""
        self.length = LARGEST

    async def ask(self, path: str, body: Any, timeouts: Timeouts = SHORT) -> Any:
        """Sends a request and returns the JSON reply.

        Args:
          path: path of the endpoint, such as "/v1/models".
          body: value that is sent as JSON in a POST request. None for a GET request.
          timeouts: timeouts of the request.
        """
        return await request_json(self.url + path, body, timeouts)

    async def _field(self, path: str, body: Any, name: str, kind: type) -> Any:
        """Sends a request and returns the field `name` of the reply.

        Raises:
          EngineError: if the reply has no such field, or its type is not `kind`.
        """
        reply = await self.ask(path, body)
        value = reply.get(name) if isinstance(reply, dict) else None
        if not isinstance(value, kind):
            raise EngineError(f"{self.url}{path}: the server's reply has no valid field {name!r}")
        return value

    async def find(self, timeouts: Timeouts = SHORT) -> None:
        """Requests the name and the maximum length of the served model and stores them.

        Raises:
          EngineError: if the server cannot be reached or is not OpenAI-compatible.
          Refused: if the server rejects the request for its list of models.
        """
        try:
            reply = await self.ask("/v1/models", None, timeouts)
        except Refused as refused:
            raise Refused(
                refused.status,
                f"{self.url}: the server refuses requests ({refused}); use the address of a vLLM "
                "server, or set the environment variable VLLM_API_KEY",
            ) from None
        try:
            # Skip LoRA adapters, which have a parent model.
            (served, *_) = [model for model in reply["data"] if not model.get("parent")]
            self.model = str(served["id"])
            length = served.get("max_model_len")
            self.length = LARGEST if length is None else length
            if type(self.length) is not int or self.length < 1:
                raise ValueError
        except (KeyError, TypeError, ValueError, AttributeError):
            raise EngineError(
                f"{self.url} is not an OpenAI-compatible server, because its reply to /v1/models "
                "has another form; use the address of a vLLM server"
            ) from None

    async def check(self) -> None:
        """Checks that the server responds, with the timeouts `PING`. The server may be busy.

        Raises:
          EngineError: if the server cannot be reached, does not respond, or is not
            OpenAI-compatible.
        """
        try:
            await self.find(PING)
        except Refused as refused:
            if refused.status != TOO_MANY_REQUESTS:
                raise EngineError(str(refused)) from None

    async def connect(self) -> None:
        """Connects to the server and checks that its plugin enforces budgets.

        Raises:
          EngineError: if the server cannot be reached, is not OpenAI-compatible, does not have the
            plugin, or serves a folder with a different fingerprint.
        """
        await self.find()
        # Send an invalid budget. A server with the plugin must reject it.
        if await self._refusal({"budget": "?"}, "budget: ") is None:
            raise EngineError(
                f"{self.url}: the server serves {one_line(self.model, 80)}, but does not read "
                "budgets; install the plugin bacr-vllm next to vLLM, and serve a folder that "
                "bacr export wrote"
            )
        other_folder = await self._refusal({"budget": 0}, "folder: ")
        if other_folder is not None:
            raise EngineError(
                f"{self.url}: the server serves another folder than this command uses "
                f"({other_folder}); start the server with the same folder"
            )

    async def _refusal(self, xargs: Mapping[str, Any], start: str) -> str | None:
        """Requests a single token and returns the error message if the server rejects the request.

        Args:
          xargs: arguments for the plugin.
          start: start of the expected error message. Text before it is removed.

        Returns:
          The error message, or None if the request succeeds.

        Raises:
          EngineError: if the error message does not contain `start`.
        """
        call = Call(prompt=(0,), max_tokens=1, stop=(), stop_ids=(), number=0)
        try:
            # A request that is not rejected may wait in the server's queue.
            await self.complete(call, Sampling(), 0, xargs)
        except Refused as refused:
            message = str(refused)
            if start not in message:
                raise EngineError(message) from None
            return message[message.index(start) :]
        return None

    async def complete(
        self,
        call: Call,
        sampling: Sampling,
        part: int,
        xargs: Mapping[str, Any],
        timeouts: Timeouts | None = None,
    ) -> tuple[list[Any], list[float]]:
        """Samples the tokens of a call.

        Args:
          call: the call.
          sampling: sampling parameters of the response.
          part: 0 for the thinking, 1 or more for the answers.
          xargs: arguments for the plugin (see `extras`).
          timeouts: timeouts of the request. Defaults to timeouts based on `call.max_tokens`.

        Returns:
          A pair of the token ids, which are not validated, and their log-probabilities. The second
          list is empty if the server does not return log-probabilities.

        Raises:
          EngineError: for the reasons listed in the class docstring, or if the server aborts the
            completion.
        """
        body = self._completion_body(call, sampling, part, xargs)
        # Return only the log-probability of the sampled token, which helps to detect broken
        # weights.
        body["logprobs"] = 0
        reply = await self.ask("/v1/completions", body, timeouts or timeouts_of(call))
        return self._completion(reply)

    async def stream(
        self,
        call: Call,
        sampling: Sampling,
        part: int,
        xargs: Mapping[str, Any],
        timeouts: Timeouts | None = None,
    ) -> AsyncGenerator[list[Any], None]:
        """Yields the tokens of a call while the server samples them.

        Closing the generator closes the connection, and the server then aborts the completion. The
        request is not retried.

        Args:
          call, sampling, part, xargs: as for `complete`.
          timeouts: as for `complete`. vLLM sends the headers before the request leaves its queue,
            so the time in the queue is limited by `Timeouts.between`.

        Raises:
          EngineError: for the reasons listed in the class docstring, or if the server aborts the
            completion.
        """
        body = {**self._completion_body(call, sampling, part, xargs), "stream": True}
        url = self.url + "/v1/completions"
        events = stream_json(url, body, timeouts or timeouts_of(call))
        async with contextlib.aclosing(events):
            async for event in events:
                # An event without a choice contains token counts.
                if event.get("choices") == []:
                    continue
                tokens, _ = self._completion(event)
                if tokens:
                    yield tokens

    def _completion_body(
        self, call: Call, sampling: Sampling, part: int, xargs: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Returns the body of a completion request. The arguments are as for `complete`."""
        folder = {"folder": self.folder} if self.folder else {}
        return {
            "model": self.model,
            "prompt": list(call.prompt),
            **parameters(call, sampling, part),
            "return_token_ids": True,
            "vllm_xargs": {**folder, **xargs},
        }

    def _completion(self, reply: Any) -> tuple[list[Any], list[float]]:
        """Parses the token ids and log-probabilities in the reply to a completion request."""
        choice = _only_choice(reply)
        reason = choice.get("finish_reason")
        if reason not in _FINISHED:
            raise EngineError(
                f"{self.url}: the server did not finish a completion (finish reason "
                f"{one_line(repr(reason), 40)}); see the log of the server"
            )
        tokens = choice.get("token_ids")
        if not isinstance(tokens, list):
            raise EngineError(
                f"{self.url}: the server's reply has no field 'token_ids'; use a vLLM version "
                "that supports return_token_ids"
            )
        logprobs = choice.get("logprobs")
        if isinstance(logprobs, dict):
            logprobs = logprobs.get("token_logprobs")
        if logprobs is None:
            return tokens, []
        check_logprobs(self.url, logprobs, len(tokens))
        return tokens, [float(logprob) for logprob in logprobs]

    async def load(self, folder: str, version: str) -> None:
        """Loads new weights into the server after its running requests have finished.

        If an error occurs, the server stays paused, because the state of its weights is unknown.

        Args:
          folder: path of the folder with the weights on the server's machine.
          version: name of the new weights, which the server reports from then on.

        Raises:
          EngineError: for the reasons listed in the class docstring, or if the server cannot load
            the folder or reports a different version.
        """
        reload = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        await self.find(PING)
        try:
            await self.ask("/pause?mode=wait", {}, LOADING)
            await self.ask("/collective_rpc", reload, LOADING)
            # The prefix cache still contains keys and values computed with the old weights.
            await self.ask("/reset_prefix_cache", {})
            await self.ask("/update_weight_version", {"new_version": version})
            reported = await self.weight_version()
            if reported != version:
                raise EngineError(
                    f"{self.url}: the server reports weights of version {reported!r:.40} after "
                    f"version {version!r} was loaded; restart the server"
                )
            await self.ask("/resume", {})
        except Refused as refused:
            if refused.status == 404:
                raise EngineError(
                    f"{self.url}: the server does not accept new weights; start it with the "
                    "environment variable VLLM_SERVER_DEV_MODE=1"
                ) from None
            raise EngineError(
                f"{self.url}: the server could not load the weights in {folder} ({refused}); "
                "check that it can read this folder"
            ) from None

    async def weight_version(self) -> Any:
        """Returns the name of the weights that were loaded last, or None if none is reported.

        Raises:
          EngineError: for the reasons listed in the class docstring.
        """
        reply = await self.ask("/weight_info", None)
        return reply.get("weight_version") if isinstance(reply, dict) else None

    async def tokens(self, prompt: Any, budget: Any = None) -> list[int]:
        """Tokenizes a prompt on the server.

        Args:
          prompt: a text, a list of chat messages, or a list of token ids, which is returned as is.
          budget: thinking budget in tokens, or None for no budget. For chat messages, the budget is
            passed to the chat template, because the prompts of some policies contain the budget.

        Returns:
          The token ids.
        """
        body: dict[str, Any] = {"model": self.model, "add_special_tokens": False}
        if isinstance(prompt, str):
            body["prompt"] = prompt
        elif all(isinstance(item, int) for item in prompt):
            return list(prompt)
        else:
            body["messages"] = list(prompt)
            body["chat_template_kwargs"] = {"budget": budget}
        return list(await self._field("/tokenize", body, "tokens", list))

    async def text(self, tokens: Sequence[int]) -> str:
        """Decodes token ids to text on the server."""
        body = {"model": self.model, "tokens": list(tokens)}
        return str(await self._field("/detokenize", body, "prompt", str))

    async def answer(
        self,
        rules: BudgetRules,
        prompt: Any,
        budget: Any = None,
        *,
        levels: Mapping[str, int] | None = None,
        sampling: Sampling | None = None,
    ) -> Response:
        """Samples a response: thinking within a budget, followed by an answer.

        Args:
          rules: budget rules of the served folder (see `read_folder`).
          prompt: token ids, a text, or chat messages.
          budget: thinking budget as a number of tokens or the name of a budget level. None for no
            budget.
          levels: dict from the name of a budget level to its number of tokens.
          sampling: sampling parameters. Defaults to greedy decoding.

        Returns:
          The response, including its decoded text.

        Raises:
          EngineError: for the reasons listed in the class docstring.
          ValueError: if the budget is invalid, or if the response could be longer than the server
            allows.
        """
        chosen_sampling = Sampling() if sampling is None else sampling
        tokens = read_budget(budget, levels or {})
        ids = await self.tokens(prompt, tokens)
        check_length(rules, tokens, len(ids), self.length)
        xargs = extras(tokens, len(ids))
        thinking = Thinking(rules, ids, rules.limit(tokens))
        await thinking.finish(lambda call: self.complete(call, chosen_sampling, 0, xargs))
        answering = thinking.answering()
        await answering.finish(lambda call: self.complete(call, chosen_sampling, 1, xargs))
        response = response_of(thinking, answering)
        return dataclasses.replace(response, text=await self.text(response.tokens))


def check_length(rules: BudgetRules, budget: int | None, prompt_tokens: int, length: int) -> None:
    """Checks that the prompt and the longest possible response fit into the engine's context.

    Args:
      rules: budget rules of the exported policy.
      budget: thinking budget in tokens, or None for no budget.
      prompt_tokens: number of tokens in the prompt.
      length: maximum number of tokens in prompt and response together.

    Raises:
      ValueError: if the response could be too long.
    """
    needed = prompt_tokens + rules.longest(budget)
    if needed > length:
        limit = rules.limit(budget)
        which = "none" if budget is None else budget
        raise ValueError(
            f"budget: {which} allows up to {limit} thinking tokens, but next to the prompt and "
            f"the answer the engine's {length} positions leave room for only "
            f"{max(limit + length - needed, 0)}; use a smaller budget or a shorter prompt"
        )
