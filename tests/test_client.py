"""Budgets enforced by calls: the pieces of an engine join to the response of a sampling loop."""

import asyncio
import dataclasses
import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bacr_client as client
from bacr_client import http_json
from bacr_client.calls import response_of
from bacr_client.fingerprint import file_digests, write_manifest
from bacr_client.http_json import Timeouts, request_json
from bacr_client.server import check_length, parameters, seed_of
from served_world import Reloading, answering

# Tokens: 1 a word, 2 `</`, 3 `think>`, 4 `answer>`, 5 ends the turn, 6 holds a line break, 7 `<a>`.
THINKING = {
    "closing_ids": [2, 3, 7],
    "answer_ids": [7],
    "end_ids": [5],
    "never_sampled": "0 8-9",
    "think_close": {"string": "</think>", "states": 3, "jumps": [[None, 1, "2"], [1, 2, "3"]]},
    "answer_close": {"string": "</answer>", "states": 3, "jumps": [[None, 1, "2"], [1, 2, "4"]]},
    "answer_tokens": 3,
    "cap": 9,
    "grace": 0,
    "line_breaks": "6",
}
WORDS = [1] * 20


def engine(part, drawn, early=()):
    """Answers the calls of a part from a stream of tokens; stops early after some numbers."""
    stream, early = list(drawn), iter(early)
    while (call := part.call()) is not None:
        assert call.prompt == (*part.prompt, *part.tokens) and call.max_tokens > 0
        found = stream[: min(call.max_tokens, next(early, 99))]
        for index, token in enumerate(found):
            if token in call.stop_ids:
                found = found[: index + 1]
                break
        del stream[: len(found)]
        part.take(found)


def said(thought, answered, limit, early=(), **changes):
    """A row for which these tokens are drawn in thinking and answer."""
    rules = client.read_rules({**THINKING, **changes})
    thinking = client.Thinking(rules, [1, 1], limit)
    engine(thinking, thought, early)
    answering = thinking.answering()
    engine(answering, answered, early)
    return response_of(thinking, answering)


class TestAnswers:
    def test_thinking_is_cut_at_the_budget_and_answered(self):
        found = said(WORDS, WORDS, 2)
        assert found.tokens == (1, 1, 2, 3, 7, 1, 1, 1)
        assert (found.closed_by, found.finished) == ("budget", False)

    def test_a_budget_of_zero_asks_for_no_thinking(self):
        assert said([], [2, 4], 0).tokens == (2, 3, 7, 2, 4)

    def test_a_tag_counts_and_asks_for_its_own_suffix(self):
        found = said([1, 2, 3, 1, 1], [1, 2, 4, 1], 3)
        assert found.tokens == (1, 2, 3, 7, 1, 2, 4)
        assert (found.closed_by, found.finished) == ("tag", True)

    def test_the_end_of_the_turn_is_not_kept_in_thinking(self):
        found = said([1, 5], [1, 5, 1], 9)
        assert (found.thinking, found.closed_by) == ((1,), "end of turn")
        assert (found.answer, found.finished) == ((1, 5), True)

    def test_a_cut_waits_for_a_line_break_inside_the_grace_window(self):
        grace = {"grace": 2}
        assert said([1, 6, 1], [5], 1, **grace).thinking == (1, 6)
        assert said([6, 1, 1], [5], 1, **grace).thinking == (6,)
        assert said(WORDS, [5], 2, **grace).thinking == (1, 1, 1, 1)
        assert said(WORDS, [5], 0, **grace).thinking == ()

    def test_what_an_engine_writes_too_much_is_left_out(self):
        rules = client.read_rules(THINKING)
        thinking = client.Thinking(rules, [1], 9)
        thinking.take([1, 2, 3, 1, 1])
        assert thinking.kept == (1, 2, 3) and thinking.call() is None

    def test_an_engine_that_writes_nothing_is_an_error(self):
        with pytest.raises(ValueError, match="returned no tokens"):
            client.Thinking(client.read_rules(THINKING), [1], 9).take([])

    @pytest.mark.parametrize(
        ("tokens", "said"),
        [
            ([-1], "returned -1, which is not a token id"),
            ([10], "returned 10, which is not a token id"),
            ([1.0], "returned 1.0, which is not a token id"),
            ([True], "returned True, which is not a token id"),
            (["1"], "returned '1', which is not a token id"),
            ([float("nan")], "returned nan, which is not a token id"),
            ([1, 8], "the token id 8, which must not be sampled"),
            ([1] * 5, "engine returned 5 tokens, but at most 4 were requested"),
        ],
    )
    def test_an_engine_that_writes_what_it_can_not_is_an_error(self, tokens, said):
        part = client.Thinking(client.read_rules(THINKING, 10), [1], 4)
        with pytest.raises(ValueError, match=re.escape(said)):
            part.take(tokens)
        assert part.tokens == [] and part.calls == 0


@settings(max_examples=200)
@given(
    thought=st.lists(st.integers(1, 7), min_size=10, max_size=10),
    answered=st.lists(st.integers(1, 7), min_size=6, max_size=6),
    limit=st.integers(0, 6),
    grace=st.integers(0, 3),
    answer_tokens=st.integers(1, 5),
    early=st.lists(st.integers(1, 3), max_size=8),
)
def test_calls_say_what_the_loop_in_transformers_says(
    thought, answered, limit, grace, answer_tokens, early
):
    torch = pytest.importorskip("torch", reason="needs torch: pip install -e '.[parity]'")
    from bacr_jax.export import budget_generation as loop

    changes = {"grace": grace, "answer_tokens": answer_tokens}
    rows = loop.Rows(loop.Rules({**THINKING, **changes}, 10, "cpu"), torch.tensor([limit]))
    streams, expected = {loop.THINKING: iter(thought), loop.ANSWERING: iter(answered)}, []
    while not rows.done:
        drawn = next(streams.get(int(rows.phase), iter([9])))
        expected.append(int(rows.take(torch.tensor([drawn]), 0)))
    assert list(said(thought, answered, limit, early, **changes).tokens) == expected


def test_an_answer_at_an_earlier_cut_keeps_fewer_tokens():
    thinking = client.Thinking(client.read_rules(THINKING), [1], 9)
    thinking.take([1, 6, 1, 2, 3])
    early = thinking.answering_at(2)
    assert early.prompt == (1, 1, 6, 2, 3, 7) and early.forced == (2, 3, 7)
    assert thinking.answering().prompt == (1, 1, 6, 1, 2, 3, 7)


@pytest.mark.parametrize(
    ("budget", "found"),
    [(8, 8), (0, 0), (None, None), ("none", None), ("low", 16), (np.int64(3), 3)],
)
def test_budgets(budget, found):
    assert client.read_budget(budget, {"low": 16}) == found


@pytest.mark.parametrize("budget", [-1, 8.5, 8.0, True, "8", "high", 2**31, 101, [8], {}])
def test_what_is_no_budget_is_a_value_error_that_names_it(budget):
    with pytest.raises(ValueError, match=r"^budget: expected a whole number from 0 to 100"):
        client.read_budget(budget, {"low": 16}, 100)


def test_a_long_text_is_not_repeated_in_the_refusal():
    with pytest.raises(ValueError) as refused:
        client.read_budget("9" * 10_000, {})
    assert len(str(refused.value)) < 200


def test_a_row_has_to_fit_the_engine():
    rules = client.read_rules({**THINKING, "grace": 2})
    # 10 prompt tokens, 7 thinking, 2 grace, 3 forced, 3 answer.
    check_length(rules, 7, 10, 25)
    check_length(rules, 0, 10, 16)
    with pytest.raises(ValueError, match="budget: 7 allows .* 24 positions leave room for only 6;"):
        check_length(rules, 7, 10, 24)
    with pytest.raises(
        ValueError,
        match="4 positions leave room for only 0; use a smaller budget or a shorter prompt",
    ):
        check_length(rules, 7, 10, 4)
    with pytest.raises(ValueError, match="budget: none allows up to 9"):
        check_length(rules, None, 10, 24)


def test_every_call_of_every_row_has_a_seed_of_its_own():
    call = lambda number: client.Call((1,), 1, (), (), number)
    seeds = {
        seed_of(client.Sampling(1.0, 1.0, seed), part, call(number))
        for seed in range(20)
        for part in range(3)
        for number in range(3)
    }
    assert len(seeds) == 180
    assert parameters(call(0), client.Sampling(), 0)["seed"] is None


def test_a_folder_that_is_not_ours_is_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"the file config.json can't be read \(No such file"):
        client.read_folder(tmp_path)
    for config in ({}, [], {"thinking": None}, {"thinking": {"cap": 8}}, {"thinking": 3}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match="has no valid section 'thinking', which") as refused:
            client.read_folder(tmp_path)
        assert "\n" not in str(refused.value)


def test_a_fingerprint_changes_with_config_and_weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError):
        client.fingerprint(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(10_000))
    first = client.fingerprint(tmp_path)
    weights.write_bytes(bytes(9_999) + b"1")
    second = client.fingerprint(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert len({first, second, client.fingerprint(tmp_path)}) == 3


def whole(body, status="200 OK"):
    return [f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body]


def asked(url, **patience):
    return asyncio.run(request_json(url, timeouts=Timeouts(**patience)))


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
CLOSED = b"HTTP/1.1 200 OK\r\n\r\n"
IN_PIECES = [
    whole(b'{"a": 1}'),
    [CLOSED, b'{"a"', b": 1}"],
    [CLOSED + b'{"a"', b": 1}"],
    [CHUNKED + b"4\r\n{", b'"a"', b"\r\n4;x\r\n: 1}\r\n0\r\n\r\n"],
]


@pytest.mark.parametrize("pieces", IN_PIECES)
def test_an_answer_may_come_in_pieces_with_or_without_a_length(pieces):
    with answering([pieces]) as (url, _):
        assert asked(url) == {"a": 1}


def test_every_request_sends_the_key_that_the_environment_holds(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with answering([whole(b"{}")]) as (url, tries):
        asked(url)
    assert tries[0].startswith(b"GET / HTTP/1.1") and b"Bearer secret\r\n" in tries[0]


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        (whole(b"[" * 100_000), "the server's reply is not JSON"),
        (whole(b"\xff\xfe"), "the server's reply is not JSON"),
        (
            [b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000 + b"\r\n\r\n"],
            "the server's reply is not HTTP",
        ),
        ([b"\0\0\r\n\r\n"], "the server's reply is not HTTP"),
        ([CHUNKED + b"zz\r\n"], "the server's reply is not HTTP"),
        ([CHUNKED + b"1" * 100_000], "the server's reply is not HTTP"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n"], "the server's reply is not HTTP"),
        (whole(b"", "99999999999999999999 X"), "answered with status 99999999999999999999"),
        (whole(b"", "307 Elsewhere"), "answered with status 307"),
    ],
)
def test_what_is_no_answer_is_one_line(pieces, said):
    with answering([pieces]) as (url, _), pytest.raises(client.EngineError, match=said) as error:
        asked(url)
    assert str(error.value).isprintable() and str(error.value).startswith(url)


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("no-such-host.invalid", r"no server responds at this address \((?!Unknown error)"),
        ("a..b", "its host is not a host name"),
        ("a" * 64, "its host is not a host name"),
    ],
)
def test_a_host_that_does_not_exist_is_one_line(host, message):
    with pytest.raises(client.EngineError, match=message):
        asked(f"http://{host}:8001")


def test_what_a_server_says_is_short_and_can_not_move_the_cursor():
    body = json.dumps({"error": {"message": "\x1b[2Jred\u202e" + "x" * 9000}}).encode()
    with answering([whole(body, "400 Bad")]) as (url, _), pytest.raises(client.Refused) as error:
        asked(url)
    assert str(error.value).startswith(f"{url}: \\x1b[2Jred\\u202exxx")
    assert str(error.value).isprintable() and len(str(error.value)) == len(f"{url}: ") + 300


@pytest.mark.parametrize(
    ("pieces", "limits", "said"),
    [
        ([None], {"first": 0.1}, "the server did not begin its reply within 0.1 s"),
        (
            [CLOSED + b"1", None],
            {"between": 0.1},
            "the server sent nothing for 0.1 s in the middle of a reply",
        ),
        ([CLOSED, *[b" "] * 3000], {"whole": 0.2}, "did not complete its reply within 0.2 s"),
    ],
)
def test_a_silent_or_dripping_server_has_its_limits(pieces, limits, said):
    with answering([pieces]) as (url, tries), pytest.raises(client.EngineError, match=said):
        asked(url, **limits)
    assert len(tries) == 1


@pytest.mark.parametrize(
    "fault", [whole(b"", "429 Busy"), whole(b"", "503 Busy"), [b""], [CHUNKED + b"4\r\n{"]]
)
def test_busy_servers_and_cut_lines_are_tried_again_and_not_for_ever(fault, monkeypatch):
    monkeypatch.setattr(http_json, "BACK_OFF", (0.01, 0.02))
    with answering([fault, fault, whole(b"[1]")]) as (url, tries):
        assert asked(url) == [1]
    assert len(tries) == 3
    with answering([fault] * 4) as (url, tries), pytest.raises(client.EngineError):
        asked(url)
    assert len(tries) == 3


def completed(body):
    """What a server's completion of three tokens at most is read as."""
    call = client.Call((1,), 3, (), (), 0)
    with answering([whole(json.dumps(body).encode())]) as (url, _):
        return asyncio.run(client.Server(url).complete(call, client.Sampling(), 0, {}))


@pytest.mark.parametrize(
    "body",
    [
        {},
        [],
        3,
        "choices",
        {"choices": []},
        {"choices": {"0": {"token_ids": [1]}}},
        {"choices": ["a"]},
        {"choices": [{"token_ids": [1]}, {"token_ids": [2]}]},
        {"choices": [{}]},
        {"choices": [{"token_ids": None}]},
        {"choices": [{"token_ids": "abc"}]},
        {"choices": [{"token_ids": {"0": 1}}]},
        {"error": {"message": "overloaded"}},
    ],
)
def test_a_completion_without_ids_is_one_line(body):
    with pytest.raises(client.EngineError, match="the server's reply has no field 'token_ids'"):
        completed(body)


@pytest.mark.parametrize(
    "value",
    [None, 0.5, 1e-9, 1, -9999.0, -9999, -1e30, float("nan"), float("inf"), float("-inf"),
     True, False, "-0.5", [-0.5], {"-0.5": 1}, -(10**400)],
)  # fmt: skip
@pytest.mark.parametrize("place", [0, 1])
def test_a_log_probability_is_that_of_a_token_that_was_drawn(value, place):
    values = [-0.5, -0.5]
    values[place] = value
    choice = {"token_ids": [1, 1], "logprobs": {"token_logprobs": values}}
    with pytest.raises(
        client.EngineError, match="log-probability of a sampled token, which must be"
    ):
        completed({"choices": [choice]})


@pytest.mark.parametrize("values", [[], [-1.0], [-1.0] * 3, {}, "abc", 0, True])
def test_there_are_as_many_log_probabilities_as_tokens(values):
    choice = {"token_ids": [1, 1], "logprobs": {"token_logprobs": values}}
    with pytest.raises(client.EngineError, match="log-probabilit"):
        completed({"choices": [choice]})


def test_numbers_up_to_zero_are_taken_as_they_are():
    choice = {"token_ids": [1, 4, 6], "logprobs": {"token_logprobs": [0, -0.0, -87.5]}}
    for reason in ("stop", "length", None):
        found = completed({"choices": [{**choice, "finish_reason": reason}]})
        assert found == ([1, 4, 6], [0, 0, -87.5])


@pytest.mark.parametrize("scores", [None, {}, {"token_logprobs": None}])
def test_a_server_may_give_no_log_probabilities_where_nothing_is_learned(scores):
    assert completed({"choices": [{"token_ids": [1], "logprobs": scores}]}) == ([1], [])


@pytest.mark.parametrize("reason", ["abort", "error", "content_filter", "", 5, True, ["stop"]])
def test_a_completion_that_was_not_let_finish_is_an_error(reason):
    choice = {"token_ids": [1], "finish_reason": reason}
    with pytest.raises(client.EngineError, match="did not finish a completion .finish reason"):
        completed({"choices": [choice]})


@pytest.mark.parametrize("body", [{}, [], 3, {"tokens": 3}, {"prompt": [1]}])
def test_texts_and_ids_of_a_server_are_looked_at(body):
    answers = [whole(json.dumps(body).encode())] * 2
    with answering(answers) as (url, _):
        with pytest.raises(
            client.EngineError, match="/tokenize: the server's reply has no valid field 'tokens'"
        ):
            asyncio.run(client.Server(url).tokens("a"))
        with pytest.raises(
            client.EngineError, match="/detokenize: the server's reply has no valid field 'prompt'"
        ):
            asyncio.run(client.Server(url).text([1]))


@pytest.mark.parametrize("length", ["1e999", "true", "[]", "-4", '"x"'])
def test_a_server_that_lies_about_its_length_is_no_server(length):
    body = f'{{"data": [{{"id": "a", "max_model_len": {length}}}]}}'.encode()
    said = pytest.raises(client.EngineError, match="is not an OpenAI-compatible server")
    with answering([whole(body)]) as (url, _), said:
        asyncio.run(client.Server(url).connect())


def test_a_manifest_knows_every_file_and_lets_people_edit_what_they_read(tmp_path):
    folder = tmp_path / "hf"
    (folder / "custom_generate").mkdir(parents=True)
    files = ("model.safetensors", "config.json", "custom_generate/generate.py", "README.md")
    for name in files:
        (folder / name).write_text(f"of {name}")
    client.check_manifest(folder)
    write_manifest(folder)
    (folder / ".cache").write_text("later")
    (folder / "README.md").write_text("edited")
    client.check_manifest(folder)
    for name in files[:-1]:
        text = (folder / name).read_bytes()
        for spoilt in (None, bytes([text[0] ^ 64]) + text[1:]):
            (folder / name).unlink()
            if spoilt is not None:
                (folder / name).write_bytes(spoilt)
            with pytest.raises(
                ValueError, match=f"^{folder / name} is not the file that was exported"
            ):
                client.check_manifest(folder)
            if name == "model.safetensors":
                client.check_manifest(folder, weights=False)
            (folder / name).write_bytes(text)
    client.check_manifest(folder)
    few = file_digests(folder, most_bytes=len(f"of {files[1]}") + len("edited"))
    assert set(few) == {"config.json", "README.md"}
    (folder / "model.safetensors").write_text("other")
    client.check_manifest(folder, digests=few)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="model.safetensors is not the file that was exported"):
        client.check_manifest(folder, digests=few)
    (folder / "manifest.json").write_text("[")
    with pytest.raises(ValueError, match="manifest.json is not a JSON object"):
        client.check_manifest(folder)


LOADED = ["/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"]


def test_weights_are_read_while_nothing_is_answered_and_their_keys_are_forgotten():
    with Reloading() as world:
        server = client.Server(world.url)
        asyncio.run(server.load("/weights/version-3", "3"))
        assert world.routes == LOADED and world.version == "3" and world.running.is_set()
        asyncio.run(server.connect())


def test_a_server_whose_learner_died_while_it_read_weights_is_woken_by_the_next_ones():
    with Reloading(paused=True) as world:
        server = client.Server(world.url)
        asyncio.run(server.find())
        asyncio.run(server.load("/weights/version-3", "3"))
        asyncio.run(server.connect())


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (
            {"fails": {"/pause": 404}},
            "does not accept new weights; start it with .* VLLM_SERVER_DEV_MODE=1",
        ),
        ({"fails": {"/collective_rpc": 500}}, "could not load the weights in /weights"),
        (
            {"fails": {"/collective_rpc": None}},
            "the connection was closed before the reply was complete",
        ),
        ({"holds": "2"}, "reports weights of version '2' after version '3' was loaded"),
    ],
)
def test_a_server_that_took_no_weights_stays_paused(how, says, monkeypatch):
    monkeypatch.setattr(http_json, "BACK_OFF", (0.01,))
    with Reloading(**how) as world:
        with pytest.raises(client.EngineError, match=says):
            asyncio.run(client.Server(world.url).load("/weights", "3"))
        assert "/resume" not in world.routes


EVENTS = [
    b'data: {"choices": [{"token_ids": [1, 1]}]}\n\n',
    b'data: {"choices": [{"token_ids": [4]}]}\n\n',
    b"data: [DONE]\n\n",
]


def streamed(pieces, timeouts=None):
    """The tokens of a stream of which a server sends these pieces, one every 0.02 s."""

    async def read(url):
        call = client.Call((1,), 3, (), (), 0)
        stream = client.Server(url).stream(call, client.Sampling(), 0, {}, timeouts)
        async with asyncio.timeout(10):
            return [tokens async for tokens in stream]

    with answering([pieces]) as (url, _):
        return asyncio.run(read(url))


def test_a_stream_has_the_timeouts_of_the_caller_or_those_of_its_call(monkeypatch):
    with pytest.raises(client.EngineError, match="did not begin its reply within 0.1 s"):
        streamed([None], Timeouts(first=0.1))
    short_pause = Timeouts(between=0.1)
    with pytest.raises(client.EngineError, match="sent nothing for 0.1 s"):
        streamed([CLOSED, None], short_pause)
    monkeypatch.setattr(client.server, "timeouts_of", lambda call: short_pause)
    # vLLM sends the headers before a request leaves its queue.
    late = [CLOSED, *[b""] * 15, *EVENTS]
    with pytest.raises(client.EngineError, match="sent nothing for 0.1 s"):
        streamed(late)
    assert streamed(late, client.server.QUEUED) == [[1, 1], [4]]


def test_a_server_that_accepts_no_connection_is_given_up_before_one_with_a_queue(monkeypatch):
    assert client.server.QUEUED.connect <= 15 and client.server.QUEUED.first == float("inf")

    async def never(*_, **__):
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio, "open_connection", never)
    queued = dataclasses.replace(client.server.QUEUED, connect=0.1)
    for timeouts in (queued, Timeouts(first=0.1)):
        with pytest.raises(client.EngineError, match="did not accept a connection within 0.1 s"):
            streamed([None], timeouts)


@pytest.mark.parametrize(
    ("status", "is_well"),
    [("200 OK", True), ("429 Busy", True), ("503 Busy", False), ("401 No", False)],
)
def test_a_server_that_limits_requests_is_well(status, is_well, monkeypatch):
    monkeypatch.setattr(http_json, "BACK_OFF", (0.01,))
    models = whole(b'{"data": [{"id": "policy"}]}', status)
    with answering([models] * 2) as (url, _):
        if is_well:
            asyncio.run(client.Server(url).check())
        else:
            with pytest.raises(client.EngineError, match="the server refuses requests") as error:
                asyncio.run(client.Server(url).check())
            assert not isinstance(error.value, client.Refused)


def test_a_server_that_hangs_has_its_time_for_weights_and_for_rows(monkeypatch):
    soon = Timeouts(first=0.1, between=0.1, whole=0.2)
    for name, short in (("LOADING", soon), ("PING", soon), ("timeouts_of", lambda call: soon)):
        monkeypatch.setattr(client.server, name, short)
    with Reloading(paused=True) as world:
        row = client.Call((1,), 4, (), (), 0)
        with pytest.raises(client.EngineError, match="did not begin its reply within 0.1 s"):
            asyncio.run(client.Server(world.url).complete(row, client.Sampling(), 0, {}))
    # Nothing at all, or no end of reading weights.
    with answering([[None]]) as (url, _), pytest.raises(client.EngineError, match="v1/models: "):
        asyncio.run(client.Server(url).load("/weights", "3"))
    with Reloading(hangs="/collective_rpc") as world:
        with pytest.raises(client.EngineError, match="/collective_rpc: the server did not begin"):
            asyncio.run(client.Server(world.url).load("/weights", "3"))
        assert "/resume" not in world.routes
