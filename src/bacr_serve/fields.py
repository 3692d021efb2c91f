"""Parses and validates the JSON bodies of requests.

A request is rejected if it contains a field that is not implemented and would change the response.
Fields that only label a request are ignored.
"""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bacr_jax.config.fields import LARGEST_SEED, SMALLEST_TEMPERATURE
from bacr_serve.budget_fields import EFFORT, NUMBERS, REASONING, read_budget_fields
from bacr_serve.errors import RequestError, invalid, short

_LARGEST_TOKENS = 2**31 - 1
_LARGEST_TEMPERATURE = 100.0
_BUDGET_FIELDS = (*NUMBERS, EFFORT, REASONING)
_READ = ("model", "stream", "stream_options", "temperature", "top_p", "seed", "max_tokens")
# Fields that label a request or select how it is stored or billed.
_IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
)
# Fields that are not supported because they would change the response. A request may contain them
# only with one of these values, which have no effect.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stop": ([], ""),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}

# Options of a stream. OpenAI's API pads events if `include_obfuscation` is true, which does not
# change the response.
_USAGE = "stream_options.include_usage"
_OBFUSCATION = "stream_options.include_obfuscation"


@dataclass(frozen=True)
class Defaults:
    """The server's settings for parsing requests.

    Attributes:
      model: name of the served policy.
      levels: dict from the name of each budget level to its tokens.
      budget: budget in tokens of a request that contains none, or None for no budget.
      largest_budget: maximum budget of a request in tokens.
      temperature: sampling temperature of a request that contains none.
      top_p: top-p of a request that contains neither a temperature nor a top-p.
    """

    model: str
    levels: Mapping[str, int]
    budget: int | None
    largest_budget: int
    temperature: float = 0.0
    top_p: float = 1.0


@dataclass(frozen=True)
class Asked:
    """A parsed request.

    Attributes:
      prompt: the question of a chat, or the text or token ids to continue.
      is_chat: True for a chat, whose question is inserted into the policy's prompt format.
      budget: thinking budget in tokens, or None for no budget.
      temperature: sampling temperature.
      top_p: cumulative probability for nucleus sampling.
      seed: random seed. Chosen at random if the request contains none.
      max_tokens: maximum number of tokens after the prompt, or None.
      stream: True if the response is sent piece by piece while it is generated.
      stream_usage: True if the last piece of a stream contains the token counts.
    """

    prompt: str | tuple[int, ...]
    is_chat: bool
    budget: int | None
    temperature: float
    top_p: float
    seed: int
    max_tokens: int | None
    stream: bool
    stream_usage: bool


def read_json(content: bytes) -> dict[str, Any]:
    """Parses the body of a request. Raises RequestError if it is not a JSON object."""
    try:
        body = json.loads(content, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = str(error).partition(":")[0]
        raise RequestError(
            400, f"body: the request is not valid JSON ({reason}); send a JSON object"
        ) from None
    if not isinstance(body, dict):
        raise RequestError(400, f"body: expected a JSON object, but found {short(body)}")
    return body


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def read_chat(body: Mapping[str, Any], defaults: Defaults) -> Asked:
    """Parses a request to /v1/chat/completions. Raises RequestError if a field is invalid."""
    _check_names(body, ("messages", "max_completion_tokens"))
    question = _question(body.get("messages"))
    return _asked(body, question, True, _max_tokens(body, "max_completion_tokens"), defaults)


def read_completion(body: Mapping[str, Any], defaults: Defaults) -> Asked:
    """Parses a request to /v1/completions. Raises RequestError if a field is invalid."""
    _check_names(body, ("prompt",))
    prompt = _prompt(body.get("prompt"))
    return _asked(body, prompt, False, _max_tokens(body), defaults)


def _asked(
    body: Mapping[str, Any],
    prompt: str | tuple[int, ...],
    is_chat: bool,
    max_tokens: int | None,
    defaults: Defaults,
) -> Asked:
    """Parses the fields that chats and completions share."""
    model = body.get("model")
    if model is not None and model != defaults.model:
        message = f"model: this server has no model {short(model)}; use {defaults.model!r}"
        raise RequestError(404, message, param="model", code="model_not_found")
    budget = read_budget_fields(
        body, levels=defaults.levels, default=defaults.budget, most=defaults.largest_budget
    )
    temperature = _float(body, "temperature", defaults.temperature, _is_temperature)
    default_top_p = defaults.top_p if body.get("temperature") is None else 1.0
    top_p = _float(body, "top_p", default_top_p, lambda p: 0 < p <= 1)
    seed = body.get("seed")
    if seed is None:
        seed = secrets.randbelow(LARGEST_SEED + 1)
    is_seed = type(seed) is int and -(2**63) <= seed < 2**63
    if not is_seed:
        raise invalid(
            "seed", f"expected a whole number that fits in 64 bits, but found {short(seed)}"
        )
    stream = _flag(body, "stream")
    return Asked(
        prompt=prompt,
        is_chat=is_chat,
        budget=budget,
        temperature=temperature,
        top_p=top_p,
        seed=seed % (LARGEST_SEED + 1),
        max_tokens=max_tokens,
        stream=stream,
        stream_usage=_stream_usage(body, stream),
    )


def _check_names(body: Mapping[str, Any], more: Sequence[str]) -> None:
    """Raises RequestError if a field is unknown, or if its value is not supported.

    Args:
      body: the request.
      more: names of the fields that are accepted only on this route.
    """
    accepted = (*_READ, *_BUDGET_FIELDS, *_IGNORED, *more)
    for name, value in body.items():
        if name in accepted or value is None:
            continue
        if name not in _NEUTRAL:
            raise invalid(name, "the field is unknown; leave it out")
        # Compare the values as JSON, because True equals 1 in Python.
        neutral_values = [json.dumps(one) for one in _NEUTRAL[name]]
        if json.dumps(value) not in neutral_values:
            raise invalid(name, f"the value {short(value)} is not supported; leave out this field")


def _question(messages: Any) -> str:
    """Returns the question of a chat, which must consist of a single user message."""
    if not isinstance(messages, list) or not messages:
        raise invalid(
            "messages", f"expected a list with one user message, but found {short(messages)}"
        )
    roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
    if roles != ["user"]:
        raise invalid(
            "messages",
            f"expected one message with the role 'user', but found the roles {short(roles)}; send "
            "one user message, because the policy was trained on single questions",
        )
    content = messages[0].get("content")
    if isinstance(content, list):
        content = "".join(_text_part(part) for part in content)
    if not isinstance(content, str) or not content.strip():
        raise invalid(
            "messages[0].content", f"expected a text that is not empty, but found {short(content)}"
        )
    _check_text("messages[0].content", content)
    return content


def _text_part(part: Any) -> str:
    """Returns the text of a message part such as {"type": "text", "text": "What is 2+3?"}."""
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise invalid(
            "messages[0].content",
            f'expected a part such as {{"type": "text", ...}}, but found {short(part)}',
        )
    return text


def _prompt(prompt: Any) -> str | tuple[int, ...]:
    """Checks and returns the prompt of a completion, which is a text or a list of token ids."""
    if isinstance(prompt, str) and prompt:
        _check_text("prompt", prompt)
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return tuple(prompt)
    raise invalid(
        "prompt", f"expected one text, or one list of token ids, but found {short(prompt)}"
    )


def _check_text(name: str, text: str) -> None:
    """Raises RequestError if a text has unpaired surrogates, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise invalid(
            name,
            "the text contains an unpaired surrogate, which is not valid Unicode; send valid "
            "Unicode",
        ) from None


def _max_tokens(body: Mapping[str, Any], newer: str | None = None) -> int | None:
    """Returns the maximum number of tokens after the prompt, or None.

    Args:
      body: the request.
      newer: another name for the field `max_tokens`, or None.
    """
    values: dict[str, int] = {}
    for name in filter(None, ("max_tokens", newer)):
        value = body.get(name)
        if value is None:
            continue
        if type(value) is not int or not 1 <= value <= _LARGEST_TOKENS:
            raise invalid(name, f"expected a whole number of at least 1, but found {short(value)}")
        values[name] = value
    if len(set(values.values())) > 1:
        raise invalid(
            str(newer),
            "the value differs from the field 'max_tokens'; send only one of the two fields",
        )
    return next(iter(values.values()), None)


def _is_temperature(value: float) -> bool:
    """True if a number is a valid sampling temperature."""
    return value == 0 or SMALLEST_TEMPERATURE <= value <= _LARGEST_TEMPERATURE


def _float(
    body: Mapping[str, Any], name: str, default: float, is_valid: Callable[[float], bool]
) -> float:
    """Returns the value of a numeric field of a request, or the default if it is missing.

    Raises:
      RequestError: if the value is not a number, or if `is_valid` rejects it.
    """
    value = body.get(name)
    if value is None:
        return default
    if type(value) not in (int, float) or not is_valid(value):
        ranges = {
            "temperature": f"0, or a number from {SMALLEST_TEMPERATURE:g} to "
            f"{_LARGEST_TEMPERATURE:g}",
            "top_p": "a number above 0, up to 1",
        }
        raise invalid(name, f"expected {ranges[name]}, but found {short(value)}")
    return float(value)


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise invalid(name, f"expected true or false, but found {short(value)}")
    return value


def _stream_usage(body: Mapping[str, Any], stream: bool) -> bool:
    """True if the client requests the token counts in the last piece of a stream."""
    name = "stream_options"
    options = body.get(name)
    if options is None:
        return False
    if not isinstance(options, dict):
        raise invalid(name, f'expected {{"include_usage": true}}, but found {short(options)}')
    fields = {f"{name}.{key}": value for key, value in options.items()}
    for field, value in fields.items():
        if field not in (_USAGE, _OBFUSCATION) and value is not None:
            raise invalid(field, "the field is unknown; leave it out")
    _flag(fields, _OBFUSCATION)
    if not stream:
        raise invalid(
            name,
            "the field has no effect unless 'stream' is true; leave it out, or set stream=true",
        )
    return _flag(fields, _USAGE)
