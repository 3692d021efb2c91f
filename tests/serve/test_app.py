"""The HTTP application over a fake engine: replies, streams, limits, keys, clients that leave."""

import asyncio
import json
import socket
import threading

import httpx
import pytest

from bacr_serve.app import Limits, Service, make_app
from bacr_serve.generation import BackendError
from serve_world import (
    FakeBackend,
    chat,
    events,
    letter_policy,
    listening,
    make_service,
    until,
)

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def calls(service, *requests):
    """The replies to requests (method, path, keyword arguments) that are sent at the same time."""

    async def send_all():
        transport = httpx.ASGITransport(make_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await asyncio.gather(
                *(client.request(method, path, **how) for method, path, how in requests)
            )

    return asyncio.run(send_all())


def post(service, body, path=CHAT, **how):
    (reply,) = calls(service, ("POST", path, {"json": body, **how}))
    return reply


def get(service, path, **how):
    (reply,) = calls(service, ("GET", path, how))
    return reply


def error_of(reply):
    assert set(reply.json()) == {"error"}
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    return reply.status_code, reply.json()["error"]["message"]


class TestReplies:
    def test_a_chat(self):
        reply = post(make_service(), chat(budget=8)).json()
        message = reply["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("42", "hmhmhmhm")
        assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": 8}

    def test_a_completion(self):
        reply = post(make_service(), {"prompt": "1+1", "budget": 2}, COMPLETION).json()
        assert reply["choices"][0]["text"] == "hm</think><answer>42</answer>"

    def test_a_request_without_a_budget_gets_the_default(self):
        backend = FakeBackend()
        post(make_service(backend, default_budget=4), chat())
        post(make_service(backend), chat())
        assert [(asked.budget, asked.limit) for asked in backend.asked] == [(4, 4), (None, 32)]

    def test_a_request_without_sampling_gets_that_of_the_policy(self):
        for changes, sampling in (
            ({}, (0.0, 1.0)),
            ({"temperature": 0.6, "top_p": 0.9}, (0.6, 0.9)),
        ):
            backend = FakeBackend()
            post(Service(backend, letter_policy(**changes)), chat())
            assert [(asked.temperature, asked.top_p) for asked in backend.asked] == [sampling]

    def test_a_stream_joins_to_the_reply(self):
        service = make_service(FakeBackend("ab cd"))
        options = {"stream": True, "stream_options": {"include_usage": True}}
        reply = post(service, chat(budget=8, **options))
        assert reply.headers["content-type"].startswith("text/event-stream")
        *chunks, usage = events(reply.text)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        joined = lambda name: "".join(delta.get(name, "") for delta in deltas)
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert (joined("reasoning_content"), joined("content")) == ("ab cd", "42")
        assert [c["choices"][0]["finish_reason"] for c in chunks][-2:] == [None, "stop"]
        assert usage["choices"] == [] and len({chunk["id"] for chunk in [*chunks, usage]}) == 1
        whole = post(service, chat(budget=8)).json()
        assert usage["usage"] == whole["usage"]
        assert chunks[-1]["choices"][0]["bacr"] == whole["choices"][0]["bacr"]

    def test_a_streamed_completion(self):
        reply = post(make_service(), {"prompt": "1", "budget": 4, "stream": True}, COMPLETION)
        texts = [chunk["choices"][0]["text"] for chunk in events(reply.text)]
        assert "".join(texts) == "hmhm</think><answer>42</answer>" and len(texts) > 2

    def test_models_and_health(self):
        service = make_service()
        (model,) = get(service, "/v1/models").json()["data"]
        assert model["id"] == "policy" and model["bacr"]["largest_budget"] == 64
        assert get(service, "/v1/models/policy").json() == model
        assert error_of(get(service, "/v1/models/other"))[0] == 404
        assert get(service, "/health").json() == {"status": "ok", "running": 0, "concurrency": 64}
        sick = get(make_service(FakeBackend(sick="the GPU is gone")), "/health")
        assert (sick.status_code, sick.json()["status"]) == (503, "the GPU is gone")

    def test_the_page_loads_nothing_from_elsewhere(self):
        reply = get(make_service(), "/")
        assert reply.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in reply.headers["content-security-policy"]
        assert "http://" not in reply.text and "https://" not in reply.text


class TestRefusals:
    @pytest.mark.parametrize(
        "method, path, how, status",
        [
            ("POST", CHAT, {"content": b"{", "headers": {"content-type": "application/json"}}, 400),
            ("POST", CHAT, {"content": b"{}"}, 415),
            ("POST", CHAT, {"data": {"a": "b"}}, 415),
            ("POST", CHAT, {"json": chat(budget=65)}, 400),
            ("POST", CHAT, {"json": chat("a" * 500)}, 400),
            ("POST", CHAT, {"json": chat(model="other")}, 404),
            ("GET", CHAT, {}, 405),
            ("GET", "/v1/embeddings", {}, 404),
        ],
    )
    def test_errors_have_openais_form(self, method, path, how, status):
        (reply,) = calls(make_service(), (method, path, how))
        found, message = error_of(reply)
        assert found == status and message.isprintable() and ": " in message

    def test_a_declared_body_that_is_too_large_is_not_read(self):
        service = make_service(limits=Limits(body_bytes=1000))
        status, message = error_of(post(service, chat("a" * 2000)))
        assert (status, message) == (
            413,
            "body: the request is larger than the limit of 1000 bytes; send a smaller request",
        )

    def test_an_endless_body_is_refused_while_it_is_read(self):
        read = []

        async def endless():
            while len(read) < 1000:
                read.append(1)
                yield b" " * 100

        service = make_service(limits=Limits(body_bytes=1000))
        headers = {"content-type": "application/json"}
        (reply,) = calls(service, ("POST", CHAT, {"content": endless(), "headers": headers}))
        assert error_of(reply)[0] == 413 and len(read) == 11

    def test_a_body_that_does_not_arrive_is_refused(self):
        async def slow():
            yield b"{"
            await asyncio.sleep(60)

        service = make_service(limits=Limits(body_seconds=0.05))
        headers = {"content-type": "application/json"}
        (reply,) = calls(service, ("POST", CHAT, {"content": slow(), "headers": headers}))
        assert error_of(reply) == (
            408,
            "body: the server did not receive the whole request within 0.05 s; send it faster",
        )


class TestKey:
    service = staticmethod(lambda: make_service(api_key="secret"))

    @pytest.mark.parametrize(
        "header", [None, "secret", "Bearer", "Bearer wrong", "Bearer secret2", "Basic secret"]
    )
    def test_without_the_key_nothing_is_answered(self, header):
        headers = {} if header is None else {"authorization": header}
        service = self.service()
        for reply in (
            post(service, chat(), headers=headers),
            post(service, {"prompt": "1"}, COMPLETION, headers=headers),
            get(service, "/v1/models", headers=headers),
        ):
            status, message = error_of(reply)
            assert status == 401 and "secret" not in message
        assert service.backend.asked == []

    def test_with_the_key_everything_is(self):
        headers = {"authorization": "Bearer secret"}
        assert post(self.service(), chat(), headers=headers).status_code == 200
        assert get(self.service(), "/v1/models", headers=headers).status_code == 200

    def test_page_and_health_need_no_key(self):
        assert get(self.service(), "/").status_code == 200
        assert get(self.service(), "/health").status_code == 200


class TestLimits:
    def test_fifty_clients_are_answered_at_once(self):
        service = make_service()
        budgets = [n % 30 for n in range(50)]
        requests = [
            ("POST", CHAT, {"json": chat(budget=b, stream=bool(n % 2))})
            for n, b in enumerate(budgets)
        ]
        replies = calls(service, *requests)
        assert {reply.status_code for reply in replies} == {200}
        for number, (budget, reply) in enumerate(zip(budgets, replies)):
            last = events(reply.text)[-1] if number % 2 else reply.json()
            assert last["choices"][0]["bacr"]["thinking_tokens"] == budget
        assert service.backend.most > 25 and service.backend.running == service.running == 0

    def test_more_requests_than_the_limit_are_told_to_try_again(self):
        service = make_service(FakeBackend(hangs_after=1), limits=Limits(concurrency=2, seconds=1))
        replies = calls(service, *[("POST", CHAT, {"json": chat(budget=30)})] * 5)
        statuses = [reply.status_code for reply in replies]
        assert sorted(statuses) == [429, 429, 429, 504, 504]
        assert replies[statuses.index(429)].headers["retry-after"] == "1"
        assert service.backend.running == service.running == 0

    def test_an_engine_that_hangs_is_given_up(self):
        service = make_service(FakeBackend(hangs_after=0), limits=Limits(seconds=0.05))
        status, message = error_of(post(service, chat(budget=8)))
        assert status == 504 and message.startswith(
            "timeout: the response was not complete after 0.05 s"
        )
        assert service.backend.running == 0

    def test_a_stream_that_hangs_ends_with_an_error(self):
        service = make_service(FakeBackend(hangs_after=1), limits=Limits(seconds=0.1))
        reply = post(service, chat(budget=8, stream=True))
        last = json.loads(reply.text.rstrip().rpartition("data: ")[2])
        assert reply.status_code == 200 and last["error"]["message"].startswith("timeout: ")
        assert "[DONE]" not in reply.text and service.backend.running == 0

    def test_a_broken_engine_is_an_error_before_and_within_a_stream(self):
        service = make_service(FakeBackend(failure=BackendError("it burns")))
        assert error_of(post(service, chat(budget=8))) == (502, "engine: it burns")
        # Without thinking nothing has been sent yet.
        early = post(service, chat(budget=0, stream=True))
        assert error_of(early) == (502, "engine: it burns")
        assert '"engine: it burns"' in post(service, chat(budget=8, stream=True)).text

    def test_a_fault_of_ours_says_nothing_about_itself(self):
        service = make_service(FakeBackend(failure=ZeroDivisionError("inside")))
        status, message = error_of(post(service, chat(budget=8)))
        assert status == 500 and "inside" not in message
        assert service.running == 0


def raw_request(body):
    content = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


class TestClients:
    """Over a socket."""

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_client_that_leaves_frees_its_slot(self, stream):
        service = make_service(FakeBackend(hangs_after=1))
        with listening(service) as url:
            port = int(url.rpartition(":")[2])
            with socket.create_connection(("127.0.0.1", port)) as line:
                line.sendall(raw_request(chat(budget=30, stream=stream)))
                until(lambda: service.backend.running == 1)
                assert service.running == 1
            until(lambda: service.backend.running == 0 and service.running == 0)

    def test_a_client_that_leaves_within_its_body_is_forgotten(self):
        service = make_service()
        with listening(service) as url:
            port = int(url.rpartition(":")[2])
            with socket.create_connection(("127.0.0.1", port)) as line:
                line.sendall(raw_request(chat())[:-5])
            assert httpx.post(url + CHAT, json=chat(budget=4)).status_code == 200
        assert len(service.backend.asked) == 1

    def test_slow_clients_do_not_hold_up_others(self):
        service = make_service(FakeBackend("x" * 60))
        with listening(service) as url:
            port = int(url.rpartition(":")[2])
            lines = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
            for line in lines:
                line.sendall(raw_request(chat(stream=True))[:-1])
            assert httpx.post(url + CHAT, json=chat(budget=4), timeout=10).status_code == 200
            for line in lines:
                line.close()

    def test_fifty_clients_over_sockets(self):
        service = make_service()
        replies = []
        with listening(service) as url:

            def ask(number):
                body = chat(budget=number, stream=bool(number % 2))
                replies.append(httpx.post(url + CHAT, json=body, timeout=60).status_code)

            threads = [threading.Thread(target=ask, args=(number,)) for number in range(50)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert replies == [200] * 50 and service.running == 0
