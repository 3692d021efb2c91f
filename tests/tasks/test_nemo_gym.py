"""Rows whose answers a server scores."""

import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from bacr_jax.config import Config, DataConfig
from bacr_jax.errors import UserError
from bacr_jax.prompts.graders import open_graders
from bacr_jax.questions.loaders import load_questions

DATA = DataConfig(num_groups=1)
ROWS = [
    {
        "responses_create_params": {"input": [{"role": "user", "content": f"{n} + 1?"}]},
        "expected_answer": str(n + 1),
        "reply": reply,
    }
    for n, reply in enumerate(("reward", "reward", "none", "html", "status", "long"))
]


class Verify(BaseHTTPRequestHandler):
    """An environment: the row says what kind of server it is."""

    asked: list[dict] = []

    def do_POST(self):
        row = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(row)
        text = row["response"]["output"][0]["content"][0]["text"]
        right = f"<answer>{row['expected_answer']}</answer>" in text
        reply = {
            "reward": json.dumps({"reward": 1.0 if right else 0.25}),
            "none": json.dumps({"score": 1.0}),
            "html": "<html>",
            "long": json.dumps({"reward": 1.0, "x": "x" * (1 << 20)}),
        }.get(row["reply"], "")
        self.send_response(200 if reply else 503)
        self.end_headers()
        self.wfile.write(reply.encode())

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    path = tmp_path_factory.mktemp("nemo") / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)) + "\n")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Verify)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"nemo_gym:{path}?verify=http://127.0.0.1:{server.server_port}/verify"
    server.shutdown()
    server.server_close()


def test_a_server_scores_answers_once_and_what_is_no_reward_is_counted(spec):
    questions = load_questions(spec, DATA, 0, "train")
    assert questions.questions[0] == "0 + 1?" and questions.answers[0] == "1"
    with open_graders(Config(), [questions])[questions.graded_by] as grader:
        texts = [f"<answer>{text}</answer>" for text in ("1", "7", "3", "4", "5", "6")]
        asked = {"questions": questions.questions}
        found = [grader.grade(texts[:2], questions.answers[:2], questions=asked["questions"][:2])]
        found += [grader.grade(texts, questions.answers, **asked)]
        counts, said = grader.counters(), grader.last_failure
    assert [verdict.correct for verdict in found[1]] == [1.0, 0.25, 0.0, 0.0, 0.0, 0.0]
    assert counts["failed_raised"] == 4 and counts["cache_hits"] == 2
    assert len(Verify.asked) == len(ROWS)
    assert "gives no number as reward" in said and said.isprintable()


def test_what_a_server_scores_is_the_row_that_was_asked(tmp_path):
    """A grader is given a question and its answer: rows that share both have one reward."""

    def of(name, *rules):
        rows = [{"responses_create_params": {"input": "Write."}, "rule": rule} for rule in rules]
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
        spec = f"nemo_gym:{tmp_path / name}?verify=http://[::1]:8000/verify"
        return load_questions(spec, DATA, 0, "train")

    one = of("one", "short", "long", "short")
    assert one.ids == ["one-train-1", "one-train-3"]
    open_graders(Config(), [one])[one.graded_by].close()
    with pytest.raises(UserError, match="'two-train-1' of .* what 'one-train-1' asks, with"):
        open_graders(Config(), [one, of("two", "long")])


def test_a_mark_at_the_start_and_line_ends_inside_a_text_are_read(tmp_path):
    row = {"responses_create_params": {"input": "a\u2028b"}}
    path = tmp_path / "rows.jsonl"
    path.write_text("\ufeff" + json.dumps(row, ensure_ascii=False) + "\n")
    found = load_questions(f"nemo_gym:{path}?verify=http://[::1]:8000/verify", DATA, 0, "test")
    assert found.questions == ["a\u2028b"] and found.ids == ["rows-test-1"]


@pytest.mark.parametrize(
    ("spec", "content", "fragment"),
    [
        ("rows.jsonl", "", "names no server; write nemo_gym:FILE?verify=http://"),
        ("rows.jsonl?verify=file:///x", "", "names no server"),
        ("rows.jsonl?verify=http://", "", "names no server"),
        ("rows.jsonl?verify=http://x:99999/x", "", "names no server"),
        ("rows.jsonl?verify=http://x/x y", "", "names no server"),
        ("none.jsonl?verify=http://x/verify", "", "none.jsonl: no file or folder"),
        ("pipe.jsonl?verify=http://x/verify", "", "pipe.jsonl' is no regular file"),
        ("rows.jsonl?verify=http://x/verify", '{"input": 1}', "row 1: no row with"),
        ("rows.jsonl?verify=http://x/verify", b"{}\n\xff", "rows.jsonl is not UTF-8 at byte 3"),
    ],
)
def test_what_is_no_set_of_rows_is_refused_in_one_line(tmp_path, spec, content, fragment):
    (tmp_path / "rows.jsonl").write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(UserError) as error:
        load_questions(f"nemo_gym:{spec}", DataConfig(dir=str(tmp_path)), 0, "train")
    assert fragment in str(error.value) and str(error.value).isprintable()
