"""An OpenAI-compatible server of vLLM with the plugin `bacr-vllm`, asked for token ids."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from bacr_held.calls import Answer, Call, Sampling, Thinking, answer_of
from bacr_held.http_json import SOON, EngineError, Patience, Refused, request_json, said
from bacr_held.rules import LARGEST, Rules, read_budget

# Rows in flight are waited for, and a large model is read from a disk.
LOADING = Patience(first=600.0, between=600.0, whole=900.0)
# Before that: one that hangs.
THERE = Patience(first=15.0, between=15.0, whole=15.0)
# How vLLM ends a completion that it was let finish; older servers leave it out.
_FINISHED = (None, "stop", "length")
# A number of our own for every call of a row.
_APART = 1_000_003


def seed_of(sampling: Sampling, part: int, call: Call) -> int:
    """Returns the seed of a call; it differs between thinking (part 0) and answers (from 1 on)."""
    return (sampling.seed * _APART + part * 4096 + call.number) % 2**63


def parameters(call: Call, sampling: Sampling, part: int) -> dict[str, Any]:
    """A call as vLLM's own sampling parameters; the same offline and over HTTP."""
    return {
        "max_tokens": call.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": None if sampling.temperature == 0 else seed_of(sampling, part, call),
        "stop": list(call.stop),
        "stop_token_ids": list(call.stop_ids),
        # The turn ends at the ids above, whatever else a folder lists.
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        # What a server might else take from generation_config.json.
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }


def patience_of(call: Call) -> Patience:
    """Returns the timeouts of a completion, for servers that make at least 2 tokens/s."""
    first = 300.0 + call.max_tokens / 2
    return Patience(first=first, between=60.0, whole=first + 300.0)


def extras(budget: int | None, prompt_tokens: int) -> dict[str, int | str]:
    """What the plugin reads: the budget, and where the response begins."""
    return {"budget": "none" if budget is None else budget, "response_from": prompt_tokens}


def check_logprobs(url: str, logprobs: Any, count: int) -> None:
    """Makes sure that each of `count` drawn tokens has one log-probability.

    EngineError: another number of them, or a value that is not the logarithm of a probability in
    (0, 1]. vLLM writes -9999 for the probability 0, which no drawn token has.
    """
    values = logprobs if isinstance(logprobs, list) else [logprobs]
    for value in values:
        if not _is_logprob(value):
            raise EngineError(
                f"{url}: gives its tokens log-probabilities that are no numbers up to 0 "
                f"({said(repr(value), 40)})"
            )
    if len(values) != count:
        raise EngineError(f"{url}: gives {len(values)} log-probabilities for {count} tokens")


def _is_logprob(value: Any) -> bool:
    """True if a value is the logarithm of a probability in (0, 1]."""
    # True is a number for Python.
    if type(value) not in (int, float) or not value <= 0:
        return False
    try:
        return math.exp(value) > 0
    except OverflowError:
        return False


def is_address(url: str) -> bool:
    """Whether a server may be at it: http or https, a host, and a port that there can be."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        return bool(good) and url.split() == [url]
    except ValueError:
        return False


class Server:
    """A server at an address; its calls are coroutines.

    Attributes:
      url: its address, without `/v1`.
      folder: fingerprint of the folder that it must serve, sent with every request; "": any.
      model: the name under which it serves a model, and `length`, the most tokens of a row; known
        after `connect`.
    """

    def __init__(self, url: str, *, folder: str = ""):
        """Takes an address such as http://127.0.0.1:8000; ValueError: it is none of a server."""
        if not is_address(url):
            raise ValueError(f"{url}: is no address; write http://HOST:PORT")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.folder = folder
        self.model, self.length = "", LARGEST

    async def ask(self, path: str, body: Any, patience: Patience = SOON) -> Any:
        """The server's answer on one of its routes; without a body it is a GET."""
        return await request_json(self.url + path, body, patience)

    async def _part(self, path: str, body: Any, name: str, kind: type) -> Any:
        found = await self.ask(path, body)
        part = found.get(name) if isinstance(found, dict) else None
        if not isinstance(part, kind):
            raise EngineError(f"{self.url}{path}: answers without {name!r}")
        return part

    async def find(self, patience: Patience = SOON) -> None:
        """Finds the model.

        EngineError: no server, or another kind of server. Refused: a server that does not list its
        models.
        """
        try:
            found = await self.ask("/v1/models", None, patience)
            (served, *_) = [one for one in found["data"] if not one.get("parent")]
            self.model = str(served["id"])
            length = served.get("max_model_len")
            self.length = LARGEST if length is None else length
            if type(self.length) is not int or self.length < 1:
                raise ValueError
        except Refused as refused:
            raise Refused(
                refused.status,
                f"{self.url}: is no server that can be asked ({refused}); write the address of "
                "vLLM's, or set VLLM_API_KEY",
            ) from None
        except (KeyError, TypeError, ValueError, AttributeError):
            raise EngineError(f"{self.url}: is no OpenAI-compatible server") from None

    async def connect(self) -> None:
        """Finds the model, and makes sure that the plugin reads budgets there.

        EngineError: no server, another kind of server, no plugin, or another folder.
        """
        await self.find()
        # No budget is called this: whoever reads budgets refuses it.
        if await self._refusal({"budget": "?"}, "budget: ") is None:
            raise EngineError(
                f"{self.url}: serves {said(self.model, 80)}, and no one there reads budgets; "
                "install the plugin bacr-vllm beside vLLM, and serve a folder of "
                "bacr export"
            )
        other = await self._refusal({"budget": 0}, "folder: ")
        if other is not None:
            raise EngineError(f"{self.url}: serves another folder ({other})")

    async def _refusal(self, xargs: Mapping[str, Any], start: str) -> str | None:
        """The refusal of a token, from where it says so; None: it is not refused."""
        try:
            await self.complete(Call((0,), 1, (), (), 0), Sampling(), 0, xargs, SOON)
        except Refused as refused:
            text = str(refused)
            if start not in text:
                raise EngineError(text) from None
            return text[text.index(start) :]
        return None

    async def complete(
        self,
        call: Call,
        sampling: Sampling,
        part: int,
        xargs: Mapping[str, Any],
        patience: Patience | None = None,
    ) -> tuple[list[Any], list[float]]:
        """The tokens that follow a prompt, which a part looks at, and log-probabilities if any.

        `part`: 0 for thinking, from 1 on for answers; `xargs`: what the plugin reads; `patience`:
        by the length of the call by default.

        EngineError: the server went away, takes too long, aborts the row, or its reply contains no
        completion. Refused: it refuses the call.
        """
        of_folder = {"folder": self.folder} if self.folder else {}
        body = {
            "model": self.model,
            "prompt": list(call.prompt),
            **parameters(call, sampling, part),
            "return_token_ids": True,
            # Of the token that was drawn alone: weights that are broken show there.
            "logprobs": 0,
            "vllm_xargs": {**of_folder, **xargs},
        }
        reply = await self.ask("/v1/completions", body, patience or patience_of(call))
        return self._completion(reply)

    def _completion(self, reply: Any) -> tuple[list[Any], list[float]]:
        """Reads tokens and log-probabilities, if any, of a completion; errors as of `complete`."""
        choices = reply.get("choices") if isinstance(reply, dict) else None
        choice: dict[str, Any] = {}
        if isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict):
            choice = choices[0]
        reason = choice.get("finish_reason")
        if reason not in _FINISHED:
            raise EngineError(f"{self.url}: ended a completion by {said(repr(reason), 40)}")
        tokens = choice.get("token_ids")
        if not isinstance(tokens, list):
            raise EngineError(f"{self.url}: answers without the ids of its tokens")
        scores = choice.get("logprobs")
        if isinstance(scores, dict):
            scores = scores.get("token_logprobs")
        if scores is None:
            return tokens, []
        check_logprobs(self.url, scores, len(tokens))
        return tokens, [float(score) for score in scores]

    async def load(self, folder: str, version: str) -> None:
        """Makes the server read a folder's weights and call them `version`.

        Rows in flight end first. After an error the server stays paused, because it is not known
        which weights it has.

        EngineError: the server does not answer, can't read the folder, or reports another version.
        """
        reload = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        await self.find(THERE)
        try:
            await self.ask("/pause?mode=wait", {}, LOADING)
            await self.ask("/collective_rpc", reload, LOADING)
            # Keys and values of the weights before.
            await self.ask("/reset_prefix_cache", {})
            await self.ask("/update_weight_version", {"new_version": version})
            found = await self.ask("/weight_info", None)
            held = found.get("weight_version") if isinstance(found, dict) else None
            if held != version:
                raise EngineError(f"{self.url}: holds weights {held!r:.40}, not {version!r}")
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
        """A prompt as ids: ids stay, texts and chats (messages) are encoded by the server.

        `budget` is for the template of a policy that is told in its prompt.
        """
        if not isinstance(prompt, str) and all(isinstance(item, int) for item in prompt):
            return list(prompt)
        body: dict[str, Any] = {"model": self.model, "add_special_tokens": False}
        if isinstance(prompt, str):
            body["prompt"] = prompt
        else:
            body |= {"messages": list(prompt), "chat_template_kwargs": {"budget": budget}}
        return list(await self._part("/tokenize", body, "tokens", list))

    async def text(self, tokens: Sequence[int]) -> str:
        """Ids as text."""
        body = {"model": self.model, "tokens": list(tokens)}
        return str(await self._part("/detokenize", body, "prompt", str))

    async def answer(
        self,
        rules: Rules,
        prompt: Any,
        budget: Any = None,
        *,
        levels: Mapping[str, int] | None = None,
        sampling: Sampling | None = None,
    ) -> Answer:
        """Thinks within a budget (tokens, the name of a level, or none) and answers.

        The prompt is ids, a text, or messages; `rules` are of the folder that is served
        (`read_folder`); sampling is greedy by default.

        ValueError: the budget can't be used. EngineError: the server refuses or went away.
        """
        drawn = Sampling() if sampling is None else sampling
        told = read_budget(budget, levels or {})
        ids = await self.tokens(prompt, told)
        check_length(rules, told, len(ids), self.length)
        xargs = extras(told, len(ids))
        thinking = Thinking(rules, ids, rules.limit(told))
        await thinking.finish(lambda call: self.complete(call, drawn, 0, xargs))
        answering = thinking.answering()
        await answering.finish(lambda call: self.complete(call, drawn, 1, xargs))
        said = answer_of(thinking, answering)
        return dataclasses.replace(said, text=await self.text(said.tokens))


def check_length(rules: Rules, budget: int | None, prompt_tokens: int, length: int) -> None:
    """Refuses, by a ValueError, a row beyond the tokens that an engine was started for."""
    needed = prompt_tokens + rules.longest(budget)
    if needed > length:
        limit = rules.limit(budget)
        which = "none" if budget is None else budget
        raise ValueError(
            f"budget: found {which}, which thinks up to {limit} tokens; the engine's {length} "
            f"positions leave {max(limit + length - needed, 0)}; write a smaller number or prompt"
        )
