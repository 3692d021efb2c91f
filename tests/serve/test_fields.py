"""Bodies of requests become checked records, and every other body is a 400 that names the field."""

import dataclasses
import json

import pytest

from bacr_serve.errors import RequestError
from bacr_serve.fields import Defaults, read_chat, read_completion, read_json

DEFAULTS = Defaults(model="policy", levels={"low": 4}, budget=None, largest_budget=64)
USER = [{"role": "user", "content": "1+1"}]


def chat(**fields):
    return read_chat({"messages": USER, **fields}, DEFAULTS)


def completion(**fields):
    return read_completion({"prompt": "1+1", **fields}, DEFAULTS)


def refusal(read, **fields):
    with pytest.raises(RequestError) as refused:
        read(**fields)
    return refused.value


def test_a_chat_is_one_question_with_greedy_defaults():
    asked = chat(model="policy", budget=8)
    assert (asked.prompt, asked.is_chat, asked.budget) == ("1+1", True, 8)
    assert (asked.temperature, asked.top_p, asked.max_tokens) == (0.0, 1.0, None)
    assert not asked.stream and not asked.stream_usage


def test_the_server_has_other_defaults_of_sampling():
    defaults = dataclasses.replace(DEFAULTS, temperature=0.6, top_p=0.95)

    def sampling(**fields):
        asked = read_chat({"messages": USER, **fields}, defaults)
        return asked.temperature, asked.top_p

    assert sampling() == sampling(temperature=None, top_p=None) == (0.6, 0.95)
    assert sampling(temperature=0) == (0.0, 1.0)
    assert sampling(temperature=0.3) == (0.3, 1.0)
    assert sampling(top_p=0.4) == (0.6, 0.4)
    assert sampling(temperature=0.3, top_p=0.4) == (0.3, 0.4)


def test_settings_are_read():
    options = {"include_usage": True}
    asked = chat(
        temperature=1, top_p=0.9, seed=-1, max_tokens=5, stream=True, stream_options=options
    )
    assert (asked.temperature, asked.top_p, asked.seed) == (1.0, 0.9, 2**32 - 1)
    assert (asked.max_tokens, asked.stream, asked.stream_usage) == (5, True, True)
    assert chat(max_completion_tokens=6).max_tokens == 6
    assert chat(max_completion_tokens=6, max_tokens=6).max_tokens == 6


@pytest.mark.parametrize("read", [chat, completion])
@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("obfuscation", [None, False, True])
def test_options_of_a_stream_are_read(read, usage, obfuscation):
    options = {"include_usage": usage, "include_obfuscation": obfuscation, "foo": None}
    assert read(stream=True, stream_options=options).stream_usage == usage


def test_without_a_seed_two_requests_differ():
    assert len({chat().seed for _ in range(4)}) > 1


def test_a_question_may_be_written_in_parts():
    parts = [{"type": "text", "text": "1"}, {"type": "text", "text": "+1"}]
    assert chat(messages=[{"role": "user", "content": parts}]).prompt == "1+1"


def test_a_completion_is_a_text_or_ids():
    assert completion().prompt == "1+1" and not completion().is_chat
    assert completion(prompt=[3, 4]).prompt == (3, 4)


def test_labels_and_neutral_values_are_ignored():
    neutral = {"n": 1, "stop": None, "presence_penalty": 0, "frequency_penalty": 0.0, "tools": []}
    assert chat(user="me", metadata={"a": 1}, **neutral).prompt == "1+1"


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"messages": []}, "messages"),
        ({"messages": "1+1"}, "messages"),
        ({"messages": [{"role": "system", "content": "Be brief"}, *USER]}, "messages"),
        ({"messages": [*USER, {"role": "assistant", "content": "2"}, *USER]}, "messages"),
        ({"messages": ["1+1"]}, "messages"),
        ({"messages": [{"role": "user", "content": " "}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
        ),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        # Logits that are divided by it exceed the range of float32.
        ({"temperature": 1e-30}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"seed": 1.5}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": 1}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": "no"}},
            "stream_options.include_obfuscation",
        ),
        ({"stream": True, "stream_options": {"foo": 1}}, "stream_options.foo"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"stop": ["\n"]}, "stop"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": True}, "logprobs"),
        ({"temprature": 1}, "temprature"),
    ],
)
def test_an_invalid_field_is_refused_by_its_name(fields, param):
    error = refusal(chat, **fields)
    assert (error.status, error.param) == (400, param)
    assert error.message.startswith(param) and error.message.isprintable()


@pytest.mark.parametrize("prompt", [None, "", [], ["a", "b"], [[1]], [True], 5, "\udfff"])
def test_a_completion_without_a_prompt_is_refused(prompt):
    assert refusal(completion, prompt=prompt).param == "prompt"


def test_another_model_is_not_found():
    error = refusal(chat, model="gpt-5")
    assert (error.status, error.code) == (404, "model_not_found")
    assert error.body()["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"1", b'{"a": NaN}', b"\xff", b"[" * 100_000, b'"a"']
)
def test_a_body_that_is_no_object_is_refused(content):
    with pytest.raises(RequestError) as refused:
        read_json(content)
    assert refused.value.status == 400 and refused.value.message.startswith("body: ")


def test_an_error_has_openais_form():
    error = refusal(chat, temperature=-1).body()
    assert json.loads(json.dumps(error)) == {
        "error": {
            "message": "temperature: expected 0, or a number from 0.001 to 100, but found -1",
            "type": "invalid_request_error",
            "param": "temperature",
            "code": "invalid_value",
        }
    }
