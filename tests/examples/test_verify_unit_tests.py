"""The example that runs unit tests: what passes, what is stopped, and what cheats get."""

import importlib.util
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bacr_grading.verifier import VerifierGrader, load_verifier

FILE = Path(__file__).parents[2] / "examples" / "verify_unit_tests.py"
TESTS = json.dumps([f"assert add({n}, 2) == {n + 2}" for n in (0, 1, 2)])
RIGHT = "def add(a, b):\n    return a + b\n"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("verify_unit_tests", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.SECONDS, module.CPU_SECONDS = 0.5, 1
    return module


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        (RIGHT, 1.0),
        (f"Here:\n```python\n{RIGHT}```\nDone.", 1.0),
        ("def add(a, b):\n    return 3", 1 / 3),
        ("def add(a, b", 0.0),
        # Ends before its test, whatever it says and with whatever status.
        ("import os\nos.write(1, b'PPP')\nos._exit(0)", 0.0),
        ("raise SystemExit(0)", 0.0),
        # One test hangs: the others count.
        ("import time\n" + RIGHT.replace("return", "a == 1 and time.sleep(60)\n    return"), 2 / 3),
        ("x = bytearray(1 << 30)\n" + RIGHT, 0.0),
        ("import os\nassert 'HOME' not in os.environ\n" + RIGHT, 1.0),
    ],
)
def test_the_score_is_the_share_of_tests_that_pass(example, answer, score):
    assert example.grade("?", answer, TESTS) == score


@pytest.mark.parametrize(
    "gold",
    [
        *("[]", "", '["  "]', "{}", "1", "null", '"assert add(0, 2) == 2"'),
        # Layouts of public sets of programming tasks.
        json.dumps([{"input": "3\n", "output": "9\n", "type": "stdin_stdout"}]),
        json.dumps({"inputs": ["3\n"], "outputs": ["9\n"]}),
        json.dumps(["assert add(0, 2) == 2", {"input": "3\n"}]),
        json.dumps([["assert add(0, 2) == 2"]]),
    ],
)
def test_a_gold_without_a_test_is_no_zero(example, gold):
    with pytest.raises(ValueError, match="^the gold answer contains no test; use a JSON list"):
        example.grade("?", RIGHT, gold)


def test_one_test_may_stand_as_it_is(example):
    assert example.grade("?", RIGHT, "for n in range(3):\n    assert add(n, n) == 2 * n") == 1.0


def test_code_writes_nothing_into_files(example, tmp_path):
    target = tmp_path / "out"
    answer = f"import os\nfile = os.open({str(target)!r}, os.O_CREAT | os.O_WRONLY)\n"
    assert example.grade("?", f"{answer}os.write(file, b'x')\n{RIGHT}", TESTS) == 0.0
    assert target.read_bytes() == b""


def test_code_reaches_no_network_where_the_kernel_has_namespaces(example, monkeypatch):
    program = "import os; os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNET)"
    if sys.version_info < (3, 12):
        program = (
            "import ctypes, sys; libc = ctypes.CDLL(None);"
            "sys.exit(bool(libc.unshare(0x50000000) and libc.unshare(0x40000000)))"
        )
    allowed = subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
    monkeypatch.setattr(example, "REQUIRE_NO_NETWORK", True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        answer = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)\n{RIGHT}"
        if allowed:
            assert example.grade("?", answer, TESTS) == 0.0
            assert example.grade("?", RIGHT, TESTS) == 1.0
        else:
            with pytest.raises(RuntimeError, match="no network namespace"):
                example.grade("?", answer, TESTS)


def test_it_runs_in_the_graders_workers():
    with VerifierGrader(load_verifier(f"{FILE}:grade"), deadline=20) as grader:
        texts = [f"<answer>\n```python\n{RIGHT}```\n</answer>", "<answer>add = 1</answer>"]
        verdicts = grader.grade(texts, [TESTS, TESTS], questions=["?", "?"])
        assert [verdict.correct for verdict in verdicts] == [1.0, 0.0]
        assert grader.counters()["failed"] == 0
