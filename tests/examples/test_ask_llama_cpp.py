"""The example that asks a llama.cpp server: two requests, ids, closing text and refusals."""

import contextlib
import json
import runpy
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "ask_llama_cpp.py"))
CLOSE, END = 5, 6
# Closing tags of one token each; 8 and 9 are the closing text, 7 follows a tag of the policy.
THINKING = {
    "think_close": {"string": "</think>", "states": 2, "jumps": [[None, 1, "5"]]},
    "answer_close": {"string": "</answer>", "states": 2, "jumps": [[None, 1, "4"]]},
    "end_ids": [END],
    "closing_ids": [8, 9],
    "answer_ids": [7],
    "never_sampled": "0-2",
    "cap": 12,
    "grace": 0,
    "answer_tokens": 3,
}


@pytest.fixture
def folder(tmp_path):
    config = {"thinking": THINKING, "vocab_size": 40, "budget_levels": {"low": 2}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@contextlib.contextmanager
def server(completions):
    """A server with llama.cpp's paths that completes with the given ids in turn."""
    requests = []
    remaining = list(completions)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append((self.path, body))
            reply = {
                "/apply-template": lambda: {"prompt": "a prompt"},
                "/tokenize": lambda: {"tokens": [20, 21]},
                "/completion": lambda: {"tokens": remaining.pop(0)[: body["n_predict"]]},
                "/detokenize": lambda: {"content": str(body["tokens"])},
            }[self.path]()
            content = json.dumps(reply).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{http.server_port}", requests
    finally:
        http.shutdown()
        http.server_close()


def test_thinking_is_cut_at_the_budget_and_the_closing_text_follows(folder):
    with server([[30, 31, 32, 33], [34, 4]]) as (url, requests):
        response = SCRIPT["ask"](url, folder, "7 + 8?", 3)
    assert (response.thinking, response.closed_by) == ((30, 31, 32), "budget")
    assert (response.forced, response.answer, response.finished) == ((8, 9), (34, 4), True)
    (template, tokenize, first, second) = [body for _, body in requests]
    assert template["chat_template_kwargs"] == {"budget": 3}
    assert tokenize["content"] == "a prompt" and tokenize["parse_special"] is True
    assert (first["prompt"], first["n_predict"]) == ([20, 21], 3)
    assert first["stop"] == ["</think>"] and second["stop"] == ["</answer>"]
    assert second["prompt"] == [20, 21, 30, 31, 32, 8, 9]
    assert first["logit_bias"] == [[0, False], [1, False], [2, False]]


def test_a_tag_of_the_policy_is_followed_by_the_text_of_training(folder):
    with server([[30, CLOSE], [34, 4]]) as (url, requests):
        response = SCRIPT["ask"](url, folder, "7 + 8?", "low")
    assert (response.closed_by, response.forced) == ("tag", (7,))
    assert requests[-1][1]["prompt"] == [20, 21, 30, CLOSE, 7]


def test_no_thinking_is_requested_for_a_budget_of_nothing(folder):
    with server([[34, 4]]) as (url, requests):
        response = SCRIPT["ask"](url, folder, "7 + 8?", 0)
    assert response.thinking == () and response.answer == (34, 4)
    assert [path for path, _ in requests].count("/completion") == 1


@pytest.mark.parametrize("budget, words", [("-4", "but found '-4'"), ("high", "low")])
def test_an_invalid_budget_is_one_line(folder, budget, words, monkeypatch, capsys):
    options = ["ask_llama_cpp.py", "--folder", str(folder), f"--budget={budget}", "7 + 8?"]
    monkeypatch.setattr("sys.argv", options)
    assert SCRIPT["main"]() == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_a_missing_server_is_one_line(folder, monkeypatch, capsys):
    options = ["--folder", str(folder), "--url", "http://127.0.0.1:9", "7 + 8?"]
    monkeypatch.setattr("sys.argv", ["ask_llama_cpp.py", *options])
    assert SCRIPT["main"]() == 2
    error = capsys.readouterr().err
    assert "pass --url with a running llama-server" in error and error.count("\n") == 1
