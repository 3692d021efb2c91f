"""Client of an OpenAI-compatible vLLM server with the plugin `bacr-vllm`.

Sends and receives token ids. Used by rollouts and evaluations on a server.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from bacr_client.calls import Call, Response, Sampling, Thinking, response_of
from bacr_client.http_json import SHORT, EngineError, Refused, Timeouts, one_line, request_json
from bacr_client.rules import LARGEST, BudgetRules, read_budget

# Timeouts while the server finishes running requests or reads a large model from a disk.
LOADING = Timeouts(first=600.0, between=600.0, whole=900.0)
# Timeouts of a request that finds a server that hangs, before requests with long timeouts.
PING = Timeouts(first=15.0, between=15.0, whole=15.0)
# Reasons for which vLLM ends a complete completion; older servers send none.
_FINISHED = (None, "stop", "length")
# Distance between the seeds of two responses, so that their calls have different seeds.
_SEED_STRIDE = 1_000_003


def seed_of(sampling: Sampling, part: int, call: Call) -> int:
    """Returns the seed of a call.

    Args:
      sampling: parameters with the seed of the response.
      part: 0 for thinking, from 1 on for answers, so that their seeds differ.
      call: the call.
    """
    return (sampling.seed * _SEED_STRIDE + part * 4096 + call.number) % 2**63


def parameters(call: Call, sampling: Sampling, part: int) -> dict[str, Any]:
    """Returns vLLM's sampling parameters for a call; the same offline and over HTTP."""
    return {
        "max_tokens": call.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": None if sampling.temperature == 0 else seed_of(sampling, part, call),
        "stop": list(call.stop),
        "stop_token_ids": list(call.stop_ids),
        # Only the ids above end the turn, also if the folder lists others.
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        # Without these values, a server would take them from generation_config.json.
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }


def timeouts_of(call: Call) -> Timeouts:
    """Returns the timeouts of a completion, for a server with at least 2 tokens per second."""
    # A completion is sent in one piece.
    first = 300.0 + call.max_tokens / 2
    return Timeouts(first=first, between=60.0, whole=first + 300.0)


def extras(budget: int | None, prompt_tokens: int) -> dict[str, int | str]:
    """Returns the arguments for the plugin: the budget, and the position of the response."""
    return {"budget": "none" if budget is None else budget, "response_from": prompt_tokens}


def check_logprobs(url: str, logprobs: Any, count: int) -> None:
    """Checks that each of `count` sampled tokens has a log-probability.

    Raises:
      EngineError: the number differs, or a value is not the logarithm of a probability in (0, 1].
        vLLM writes -9999 for the probability 0, which a sampled token cannot have.
    """
    values = logprobs
    if not isinstance(logprobs, list):
        values = [logprobs]
    for value in values:
        if not _is_logprob(value):
            raise EngineError(
                f"{url}: returns log-probabilities that are not numbers up to 0 "
                f"({one_line(repr(value), 40)})"
            )
    if len(values) != count:
        raise EngineError(f"{url}: returns {len(values)} log-probabilities for {count} tokens")


def _is_logprob(value: Any) -> bool:
    """True if a value is the logarithm of a probability in (0, 1]."""
    # An exact comparison, because True is an int.
    if type(value) not in (int, float) or not value <= 0:
        return False
    try:
        return math.exp(value) > 0
    except OverflowError:
        return False


def is_address(url: str) -> bool:
    """True if a text is an address with http or https, a host, and a valid port or none."""
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
    """Returns the completion in a reply; an empty dict if the reply has another form."""
    if not isinstance(reply, dict):
        return {}
    choices = reply.get("choices")
    if not isinstance(choices, list) or len(choices) != 1:
        return {}
    return choices[0] if isinstance(choices[0], dict) else {}


class Server:
    """A server at an address; its requests are coroutines.

    All requests raise an `EngineError` if the server cannot be reached, closes the connection,
    takes too long or sends an invalid response, and a `Refused` if it refuses a request.

    Attributes:
      url: the address without `/v1`.
      folder: fingerprint of the folder that the server must serve, sent with every request; "" for
        any folder.
      model: name of the served model, after `connect`.
      length: largest number of tokens of prompt and response, after `connect`.
    """

    def __init__(self, url: str, *, folder: str = ""):
        """Stores an address such as http://127.0.0.1:8000.

        Raises:
          ValueError: `url` is not an address.
        """
        if not is_address(url):
            raise ValueError(f"{url}: is not an address; write http://HOST:PORT")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.folder = folder
        self.model = ""
        self.length = LARGEST

    async def ask(self, path: str, body: Any, timeouts: Timeouts = SHORT) -> Any:
        """Returns the server's reply to a request: POST with a body, GET if the body is None."""
        return await request_json(self.url + path, body, timeouts)

    async def _field(self, path: str, body: Any, name: str, kind: type) -> Any:
        """Returns one field of a reply, which must have a type."""
        reply = await self.ask(path, body)
        value = reply.get(name) if isinstance(reply, dict) else None
        if not isinstance(value, kind):
            raise EngineError(f"{self.url}{path}: answers without {name!r}")
        return value

    async def find(self, timeouts: Timeouts = SHORT) -> None:
        """Requests the name and length of the served model and stores both.

        Raises:
          EngineError: the server is missing or of another kind.
          Refused: the server does not list its models.
        """
        try:
            reply = await self.ask("/v1/models", None, timeouts)
        except Refused as refused:
            raise Refused(
                refused.status,
                f"{self.url}: the server refuses requests ({refused}); write the address of a vLLM "
                "server, or set VLLM_API_KEY",
            ) from None
        try:
            # Adapters have a parent.
            (served, *_) = [model for model in reply["data"] if not model.get("parent")]
            self.model = str(served["id"])
            length = served.get("max_model_len")
            self.length = LARGEST if length is None else length
            if type(self.length) is not int or self.length < 1:
                raise ValueError
        except (KeyError, TypeError, ValueError, AttributeError):
            raise EngineError(f"{self.url}: is not an OpenAI-compatible server") from None

    async def connect(self) -> None:
        """Finds the model and checks that the plugin enforces budgets.

        Raises:
          EngineError: the server is missing or of another kind, has no plugin, or serves another
            folder.
        """
        await self.find()
        # The plugin refuses a budget that is not a number or a level.
        if await self._refusal({"budget": "?"}, "budget: ") is None:
            raise EngineError(
                f"{self.url}: serves {one_line(self.model, 80)} but does not read budgets; install "
                "the plugin bacr-vllm next to vLLM, and serve a folder of "
                "bacr export"
            )
        other_folder = await self._refusal({"budget": 0}, "folder: ")
        if other_folder is not None:
            raise EngineError(f"{self.url}: serves another folder ({other_folder})")

    async def _refusal(self, xargs: Mapping[str, Any], start: str) -> str | None:
        """Requests a token; returns the message of a refusal from `start` on, or None.

        Raises:
          EngineError: the message does not contain `start`.
        """
        call = Call(prompt=(0,), max_tokens=1, stop=(), stop_ids=(), number=0)
        try:
            await self.complete(call, Sampling(), 0, xargs, SHORT)
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
          sampling: parameters of sampling.
          part: 0 for thinking, from 1 on for answers.
          xargs: arguments for the plugin (`extras`).
          timeouts: by default from the length of the call.

        Returns:
          The values that the server returned as ids, unchecked, and their log-probabilities, or an
          empty list without them.

        Raises:
          EngineError: also if the server aborts the completion.
        """
        folder = {"folder": self.folder} if self.folder else {}
        body = {
            "model": self.model,
            "prompt": list(call.prompt),
            **parameters(call, sampling, part),
            "return_token_ids": True,
            # Only the sampled token's log-probability, which shows broken weights.
            "logprobs": 0,
            "vllm_xargs": {**folder, **xargs},
        }
        reply = await self.ask("/v1/completions", body, timeouts or timeouts_of(call))
        return self._completion(reply)

    def _completion(self, reply: Any) -> tuple[list[Any], list[float]]:
        """Returns the tokens and log-probabilities, if any, in the reply to `complete`."""
        choice = _only_choice(reply)
        reason = choice.get("finish_reason")
        if reason not in _FINISHED:
            raise EngineError(f"{self.url}: ended a completion by {one_line(repr(reason), 40)}")
        tokens = choice.get("token_ids")
        if not isinstance(tokens, list):
            raise EngineError(f"{self.url}: answers without the ids of its tokens")
        logprobs = choice.get("logprobs")
        if isinstance(logprobs, dict):
            logprobs = logprobs.get("token_logprobs")
        if logprobs is None:
            return tokens, []
        check_logprobs(self.url, logprobs, len(tokens))
        return tokens, [float(logprob) for logprob in logprobs]

    async def load(self, folder: str, version: str) -> None:
        """Makes the server read the weights of a folder after its running requests have ended.

        After an error the server stays paused, because its weights are unknown.

        Args:
          folder: path of the folder on the server's machine.
          version: name of the new weights, which the server reports from then on.

        Raises:
          EngineError: also if the server cannot read the folder or reports another version.
        """
        reload = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        await self.find(PING)
        try:
            await self.ask("/pause?mode=wait", {}, LOADING)
            await self.ask("/collective_rpc", reload, LOADING)
            # The cache contains keys and values of the old weights.
            await self.ask("/reset_prefix_cache", {})
            await self.ask("/update_weight_version", {"new_version": version})
            reply = await self.ask("/weight_info", None)
            reported = reply.get("weight_version") if isinstance(reply, dict) else None
            if reported != version:
                raise EngineError(f"{self.url}: has weights {reported!r:.40}, not {version!r}")
            await self.ask("/resume", {})
        except Refused as refused:
            if refused.status == 404:
                raise EngineError(
                    f"{self.url}: takes no weights; start it with VLLM_SERVER_DEV_MODE=1"
                ) from None
            raise EngineError(
                f"{self.url}: could not take the weights of {folder} ({refused})"
            ) from None

    async def tokens(self, prompt: Any, budget: Any = None) -> list[int]:
        """Returns a prompt as ids.

        Args:
          prompt: ids, which are returned, or a text or chat messages, which the server encodes.
          budget: for the chat template of a policy whose prompt contains the budget.
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
        """Decodes ids."""
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
        """Samples thinking within a budget, and an answer.

        Args:
          rules: rules of the served folder (`read_folder`).
          prompt: ids, a text, or chat messages.
          budget: number of tokens, name of a level, or None for no budget.
          levels: the named budgets.
          sampling: parameters of sampling; greedy by default.

        Raises:
          ValueError: the budget is not valid, or the response could be longer than the server
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
    """Checks that prompt and response fit into an engine.

    Args:
      rules: rules of the exported policy.
      budget: the budget in tokens, or None.
      prompt_tokens: number of tokens of the prompt.
      length: largest number of tokens of prompt and response.

    Raises:
      ValueError: the response could be too long.
    """
    needed = prompt_tokens + rules.longest(budget)
    if needed > length:
        limit = rules.limit(budget)
        which = "none" if budget is None else budget
        raise ValueError(
            f"budget: found {which}, which thinks up to {limit} tokens; the engine's {length} "
            f"positions leave {max(limit + length - needed, 0)}; write a smaller number or prompt"
        )
