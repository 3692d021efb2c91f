"""A verifier of one's own: whatever it does, every answer has a score or a count."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from bacr_grading import pool as pool_module
from bacr_grading.__main__ import main
from bacr_grading.verifier import FAULTS, VerifierGrader, answer_of, load_verifier, packed
from bacr_jax.errors import UserError

SOURCE = """
import os, subprocess, sys, time

def one(question, answer, gold):
    if answer == "hangs":
        time.sleep(100)
    if answer == "raises":
        raise KeyError("no such answer")
    if answer == "exits":
        sys.exit(1)
    if answer == "dies":
        os._exit(3)
    if answer == "fills the memory":
        return len("x" * (4 << 30))
    if answer == "reads":
        return len(input())
    print("what a verifier prints goes nowhere")
    odd = {"nan": float("nan"), "text": "0.5", "none": None, "above": 1.5, "inf": float("inf")}
    odd |= {"part": 0.25, "rounded": 1.0 + 1e-9, "true": True}
    return odd.get(answer, float(answer == gold))

def some_batch(questions, answers, golds):
    if "too few" in answers:
        return [1.0]
    if "words" in answers:
        return "1" * len(answers)
    return (one(*row) for row in zip(questions, answers, golds))

def starts_another(question, answer, gold):
    subprocess.Popen(["sleep", "100"])
    time.sleep(100)

def writes(question, answer, gold):
    with open(gold, "w") as file:
        file.write("something")
        file.flush()
"""
# What an answer makes the verifier do, and what its lack of a score is counted as.
FAILING = {
    "hangs": "late", "raises": "raised", "exits": "raised", "reads": "raised", "dies": "died",
    "fills the memory": "memory", "nan": "nan", "text": "text", "none": "text", "above": "range",
    "inf": "range",
}  # fmt: skip
SCORED = {"5": 1.0, "6": 0.0, "part": 0.25, "rounded": 1.0, "true": 1.0}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("verifier") / "mine.py"
    path.write_text(SOURCE)
    return path


def opened(file, name, **limits):
    return VerifierGrader(load_verifier(f"{file}:{name}"), **{"deadline": 1.0, **limits})


def scores(grader, answers, gold="5"):
    texts = [f"<answer>{answer}</answer>" for answer in answers]
    return grader.grade(texts, [gold] * len(texts), questions=["?"] * len(texts))


def gone(pid, seconds=10.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_every_failure_is_counted_under_its_reason_and_scores_are_scores(file):
    names = [*FAILING, *SCORED]
    with opened(file, "one") as grader:
        verdicts = scores(grader, names)
        counts = grader.counters()
    for name, verdict in zip(names, verdicts):
        assert verdict.correct == verdict.strict == SCORED.get(name, 0.0), name
        assert type(verdict.correct) is float
        assert verdict.path == ("failed" if name in FAILING else "verifier"), name
        assert verdict.timed_out == (name == "hangs")
    expected = {fault: list(FAILING.values()).count(fault) for fault in FAULTS}
    assert {fault: counts[f"failed_{fault}"] for fault in FAULTS} == expected
    assert counts["failed"] == len(FAILING)
    assert (counts["graded"], counts["correct"], counts["partly_correct"]) == (len(names), 3, 1)
    assert counts["timeouts"] == 1


def test_a_batch_is_scored_row_by_row_unless_it_fails_as_a_whole(file):
    with opened(file, "some_batch", batch=3, workers=1) as grader:
        # "5 " is "5" again, so that four batches are made.
        names = ["nan", "5", "part", "raises", "5 ", "6", "8", "too few", "x", "y"]
        verdicts = scores(grader, [*names, "words", "z", "w"])
        counts = grader.counters()
    paths = [verdict.path == "failed" for verdict in verdicts]
    assert paths == [True, False, False, True, False, True, True] + 6 * [True]
    assert [counts[f"failed_{name}"] for name in ("nan", "raised", "length")] == [1, 3, 6]
    assert counts["failed"] == 10


def test_answers_that_were_never_closed_are_not_shown_to_it(file):
    with opened(file, "one") as grader:
        (verdict,) = grader.grade(["<answer>5"], ["5"], questions=["?"])
        assert (verdict.correct, verdict.extracted, verdict.path) == (0.0, None, "none")
        assert grader.counters()["no_answer"] == 1
        assert grader.worker_pids == []


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>\ndef f():\n    return 1\n</answer> more", "def f():\n    return 1"),
        ("so \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("<answer>1</answer><answer>\\boxed{2}</answer>", "\\boxed{2}"),
        ("<answer>1</answer></think>\n<answer>2</answer>", "2"),
        ("<answer>1</answer></think>\n<answer>2", None),
        ("<think><answer>1</answer>", None),
        ("nothing", None),
        (None, None),
    ],
)
def test_the_answer_is_what_the_last_tag_or_box_holds_as_it_was_written(text, answer):
    assert answer_of(text) == answer


def test_scores_are_remembered_and_failures_are_not(file):
    with opened(file, "one") as grader:
        scores(grader, ["5", "5", "raises"])
        scores(grader, ["5", "raises"])
        counts = grader.counters()
    assert counts["cache_hits"] == 1
    assert counts["failed_raised"] == 2


def test_long_answers_that_differ_stay_different_in_records(file):
    one, other = "x" * 600 + "1", "x" * 600 + "2"
    with opened(file, "one") as grader:
        first, second = scores(grader, [one, other])
    assert len(first.extracted) <= 500
    assert first.extracted != second.extracted


def test_what_a_late_verifier_has_started_ends_with_it(file):
    with opened(file, "starts_another", deadline=0.5) as grader:
        grader.check()
        (pid,) = grader.worker_pids
        # Who asks finds the child while the verifier hangs.
        children = []
        look = lambda: children.extend(
            Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            if Path(f"/proc/{pid}").exists()
            else []
        )
        texts = ["<answer>1</answer>"]
        assert grader.grade(texts, ["1"], questions=["?"], poll=look)[0].timed_out
    assert children
    assert all(gone(int(child)) for child in set(children))


OFFSPRING = """
import os, subprocess, sys, time

def lasting(question, answer, gold):
    # A session of its own, and a child of its own that nobody waits for.
    shell = "sleep 100 & echo $! >&2; exec sleep 100"
    child = subprocess.Popen(["sh", "-c", shell], stderr=subprocess.PIPE, start_new_session=True)
    pids = [child.pid, int(child.stderr.readline())]
    raise ValueError(" ".join(map(str, pids)))

def malformed(question, answer, gold):
    for fd in range(3, 10):
        try:
            os.write(fd, answer.encode() + b"\\n")
        except OSError:
            pass
    time.sleep(100)
"""


@pytest.fixture(scope="module")
def offspring(tmp_path_factory):
    path = tmp_path_factory.mktemp("verifier") / "offspring.py"
    path.write_text(OFFSPRING)
    return path


def test_what_it_starts_in_sessions_of_their_own_ends_with_its_worker(offspring):
    with opened(offspring, "lasting", deadline=20.0) as grader:
        scores(grader, ["5"])
        pids = re.findall(r"\d+", grader.last_failure.split("(line")[0])
        assert len(pids) == 2 and not any(gone(int(pid), 0.1) for pid in pids)
    assert all(gone(int(pid), 0.5) for pid in pids)


@pytest.mark.parametrize(
    "reply",
    [
        '{"scores": 5, "faults": [""], "message": ""}',
        '{"scores": [2.0], "faults": [""], "message": ""}',
        '{"scores": [null], "faults": ["tired"], "message": ""}',
        '{"scores": [1, 1], "faults": ["", ""], "message": ""}',
        '{"ready": true}',
        "[1]",
        "7",
        "nothing",
        "[" * 5000,
    ],
)
def test_a_reply_that_is_none_costs_its_answers_and_not_the_run(offspring, reply):
    with opened(offspring, "malformed", deadline=20.0) as grader:
        (verdict,) = scores(grader, [reply])
        counts = grader.counters()
    assert verdict.path == "failed"
    # The answer is given to another worker once.
    assert (counts["failed_died"], counts["worker_deaths"]) == (1, 2)


def test_a_worker_that_no_longer_reads_is_late(file):
    with opened(file, "one", workers=1, deadline=0.5) as grader:
        assert scores(grader, ["5"])[0].correct == 1.0
        os.kill(grader.worker_pids[0], signal.SIGSTOP)
        rescue = threading.Timer(15, os.kill, (grader.worker_pids[0], signal.SIGKILL))
        rescue.start()
        # Far more than a pipe holds; the second answer gets to a worker of its own, piece by piece.
        verdicts = scores(grader, ["x" * 300_000, "y" * 300_000 + "5"], gold="y" * 300_000 + "5")
        rescue.cancel()
        assert [verdict.timed_out for verdict in verdicts] == [True, False]
        assert [verdict.correct for verdict in verdicts] == [0.0, 1.0]
        assert grader.counters()["failed_late"] == 1


def test_a_verifier_that_is_slow_to_load_is_spoken_of(tmp_path, monkeypatch):
    monkeypatch.setattr(pool_module, "PATIENCE_SECONDS", 0.2)
    (tmp_path / "v.py").write_text("import time\ntime.sleep(1)\ndef f(q, a, g): return 1.0\n")
    said = []
    with VerifierGrader(load_verifier(f"{tmp_path / 'v.py'}:f")) as grader:
        grader.check(said.append)
    assert (
        "no worker process is ready after" in said[0]
        and f"check grader={tmp_path / 'v.py'}:f" in said[0]
    )


def test_it_may_not_write_into_files(file, tmp_path):
    target = tmp_path / "out"
    with opened(file, "writes") as grader:
        scores(grader, ["1"], gold=str(target))
        assert grader.counters()["failed_raised"] == 1
        assert "OSError" in grader.last_failure
    assert target.read_text() == ""


def test_a_run_keeps_the_verifier_that_it_began_with(tmp_path, monkeypatch):
    path = tmp_path / "v.py"
    path.write_text("def f(q, a, g):\n    return 0.5\n")
    before = load_verifier(f"{path}:f")
    monkeypatch.setattr(pool_module, "RECYCLE_AFTER", 1)
    with VerifierGrader(before) as grader:
        path.write_text("def f(q, a, g):\n    return 1.0\n")
        assert [verdict.correct for verdict in scores(grader, ["1", "2"])] == [0.5, 0.5]
        assert grader.counters()["worker_starts"] >= 2
    assert load_verifier(f"{path}:f").digest != before.digest


def test_workers_that_no_longer_start_lose_answers_and_not_the_run(tmp_path):
    needed, path = tmp_path / "needed", tmp_path / "v.py"
    needed.touch()
    path.write_text(f"open({str(needed)!r})\ndef f(q, a, g):\n    return 1.0\n")
    with VerifierGrader(load_verifier(f"{path}:f"), workers=1) as grader:
        assert scores(grader, ["0"])[0].correct == 1.0
        needed.unlink()
        (pid,) = grader.worker_pids
        os.kill(pid, signal.SIGKILL)
        assert gone(pid)
        assert [verdict.path for verdict in scores(grader, ["1", "2"])] == ["failed"] * 2
        assert grader.counters()["failed_died"] == 2
        needed.touch()
        assert scores(grader, ["3"])[0].correct == 1.0


@pytest.mark.parametrize(
    ("source", "name", "says"),
    [
        ("def f(q, a, g): return 1", "g", "the file defines no function g"),
        ("f = 5", "f", "the file defines no function f"),
        ("import nonsense_xyz", "f", "ModuleNotFoundError: No module named 'nonsense_xyz' (line"),
        ("\nraise SystemExit(0)", "f", "SystemExit: 0 (line 2)"),
        ("import os; os._exit(0)", "f", "exited with status 0"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_one_line(tmp_path, source, name, says):
    (tmp_path / "v.py").write_text(source)
    grader = VerifierGrader(load_verifier(f"{tmp_path / 'v.py'}:{name}"))
    with grader, pytest.raises(UserError) as refused:
        grader.check()
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("none.py:f", "no file 'none.py'"),
        ("mine.py", "expected FILE.py:function"),
        ("mine.py:1f", "expected FILE.py:function"),
        ("bad.py:f", "not valid Python"),
        ("latin.py:f", "not valid Python"),
    ],
)
def test_a_spec_that_cannot_be_used_is_refused_unrun(tmp_path, monkeypatch, spec, says):
    monkeypatch.chdir(tmp_path)
    Path("bad.py").write_text("def f(:\n")
    Path("latin.py").write_bytes(b"# \xff\n")
    with pytest.raises(UserError, match=says):
        load_verifier(spec)


def test_questions_are_needed(file):
    with (
        opened(file, "one") as grader,
        pytest.raises(UserError, match="a verifier also reads the questions"),
    ):
        grader.grade(["<answer>5</answer>"], ["5"])


def test_the_command_grades_by_it(file, tmp_path, capsys):
    cases = tmp_path / "cases.jsonl"
    preds = ["5", "so <answer>part</answer>", "raises"]
    rows = [{"pred": pred, "gold": "5", "question": "?"} for pred in preds]
    cases.write_text("\n".join(map(json.dumps, rows)))
    assert main(["--cases", str(cases), "--grader", f"{file}:one"]) == 0
    shown = capsys.readouterr()
    verdicts = [json.loads(line) for line in shown.out.splitlines()]
    assert [verdict["correct"] for verdict in verdicts] == [1.0, 0.25, 0.0]
    assert "KeyError: 'no such answer' (line 8)" in shown.err
    assert main(["--cases", str(cases), "--grader", f"{file}:one", "--mode", "strict"]) == 0
    strict = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [verdict["correct"] for verdict in strict] == [0.0, 0.25, 0.0]
    cases.write_text('{"pred": "5", "gold": "5"}')
    assert main(["--cases", str(cases), "--grader", f"{file}:one"]) == 2
    assert "fields pred and gold and question" in capsys.readouterr().err


def test_the_worker_loads_nothing_of_this_library(file):
    program = (
        "def f(q, a, g):\n    import sys\n"
        "    return float(not {'jax', 'numpy', 'bacr_jax', 'math_verify'} & set(sys.modules))\n"
    )
    path = file.with_name("modules.py")
    path.write_text(program)
    with VerifierGrader(load_verifier(f"{path}:f")) as grader:
        assert scores(grader, ["1"])[0].correct == 1.0


def test_workers_end_when_their_parent_is_killed(file):
    program = (
        "import os, signal\n"
        "from bacr_grading import VerifierGrader, load_verifier\n"
        f"grader = VerifierGrader(load_verifier({str(file) + ':one'!r}))\n"
        "grader.check()\n"
        "print(grader.worker_pids[0], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    import sys

    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert run.returncode == -signal.SIGKILL, run.stderr
    assert gone(int(run.stdout))


TRL = """
import re

def lengths(completions, **kwargs):
    return [len(text) / 100 for text in completions]

def exact(prompts, completions, answer, completion_ids=None, **columns):
    assert len(prompts) == len(completions) == len(answer)
    found = [re.search("<answer>(.*?)</answer>", text) for text in completions]
    return [float(one is not None and one[1] == gold) for one, gold in zip(found, answer)]

def of_columns(completions, prompts, solution, ground_truth, question, **kwargs):
    assert solution == ground_truth and question == prompts
    return [float(gold in text) for gold, text in zip(solution, completions)]

def of_own_column(completions, label):
    return [float(gold in text) for gold, text in zip(label, completions)]

def of_ids(prompts, completions, completion_ids, **kwargs):
    return [len(ids) / 10 for ids in completion_ids]

async def later(completions, **kwargs):
    return [0.25 for _ in completions]

def unknown(completions, image):
    return [1.0 for _ in completions]

def nothing(completions, **kwargs):
    return [None for _ in completions]
"""
CHAT = """
def check(completions, prompts, answer, **kwargs):
    assert all(prompt[0]["role"] == "user" for prompt in prompts)
    contents = [completion[0]["content"] for completion in completions]
    return [float(gold in text) for gold, text in zip(answer, contents)]
"""


def trl(tmp_path, name, source=TRL, columns=(), **settings):
    (tmp_path / "trl.py").write_text(source)
    verifier = load_verifier(f"{tmp_path / 'trl.py'}:{name}")
    verifier = dataclasses.replace(verifier, references=columns)
    return VerifierGrader(verifier, workers=1, deadline=5, **settings)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("exact", [1.0, 0.0, 0.0]),
        ("lengths", [0.18, 0.18, 0.09]),
        ("of_columns", [1.0, 0.0, 1.0]),
        ("of_own_column", [1.0, 0.0, 1.0]),
        ("later", [0.25] * 3),
    ],
)
def test_a_function_of_trls_form_gets_whole_texts_and_columns(tmp_path, name, expected):
    texts = ["<answer>5</answer>", "<answer>6</answer>", "<answer>5"]
    with trl(tmp_path, name, columns=("label",)) as grader:
        verdicts = grader.grade(texts, ["5"] * 3, questions=["?"] * 3)
        assert grader.last_failure == ""
    assert [verdict.correct for verdict in verdicts] == pytest.approx(expected)
    # What votes compare is the answer.
    assert [verdict.extracted for verdict in verdicts] == ["5", "6", "<answer>5"]


def test_a_function_of_trls_form_gets_token_ids_where_there_is_a_tokenizer(tmp_path):
    with trl(tmp_path, "of_ids", encode=lambda text: [ord(c) for c in text]) as grader:
        (verdict,) = grader.grade(["abcde"], ["5"], questions=["?"])
    assert verdict.correct == 0.5
    with trl(tmp_path, "of_ids") as grader, pytest.raises(UserError, match="completion_ids"):
        grader.check()


def test_a_file_that_reads_content_gets_lists_of_messages(tmp_path):
    with trl(tmp_path, "check", CHAT) as grader:
        verdicts = grader.grade(["it is 5", "6"], ["5", "5"], questions=["?", "?"])
    assert [verdict.correct for verdict in verdicts] == [1.0, 0.0]


def test_what_no_grader_has_is_refused_and_no_score_is_counted(tmp_path):
    needed = "has the parameter 'image', but the data has no column of this name; give the"
    with trl(tmp_path, "unknown") as grader, pytest.raises(UserError, match=needed):
        grader.check()
    with trl(tmp_path, "nothing") as grader:
        (verdict,) = grader.grade(["5"], ["5"], questions=["?"])
        assert (verdict.correct, grader.counters()["failed_text"]) == (0.0, 1)
    made = "f = lambda completions, **kwargs: []"
    elsewhere = "must be defined in the file itself; define it there with"
    with trl(tmp_path, "f", made) as grader, pytest.raises(UserError, match=elsewhere):
        grader.check()


def test_an_answer_of_a_worker_that_died_once_is_scored_by_another(tmp_path):
    (tmp_path / "v.py").write_text(
        "import os, pathlib\n"
        "def f(question, answer, gold):\n"
        "    mark = pathlib.Path(question)\n"
        "    if not mark.exists():\n"
        "        mark.touch()\n"
        "        os._exit(1)\n"
        "    return float(answer == gold)\n"
    )
    with VerifierGrader(load_verifier(f"{tmp_path / 'v.py'}:f"), workers=1) as grader:
        asked = [str(tmp_path / "mark")] * 1000
        verdicts = grader.grade(["<answer>5</answer>"] * 1000, ["5"] * 1000, questions=asked)
        counts = grader.counters()
    assert [verdict.correct for verdict in verdicts] == [1.0] * 1000
    assert (counts["failed"], counts["worker_deaths"]) == (0, 1)


def test_a_scorer_has_time_to_prepare_a_row(tmp_path):
    """`prepare` takes longer than twice the deadline, but less than the spare time of a batch."""
    file = tmp_path / "scorer.py"
    file.write_text(
        "import time\n"
        "READY = []\n"
        "def prepare(row):\n"
        "    if not READY:\n"
        "        time.sleep(3.5)\n"
        "        READY.append(True)\n"
        "def score(answer, row):\n"
        "    return float(answer == row.answer)\n"
    )
    verifier = load_verifier(f"{file}:score")
    verifier = dataclasses.replace(verifier, of_rows=True, third_party=True)
    rows = {("q", "g"): packed({"id": "1", "question": "q", "answer": "g"})}
    with VerifierGrader(verifier, rows=rows, workers=1, deadline=0.5) as grader:
        (verdict,) = grader.grade(["<answer>g</answer>"], ["g"], questions=["q"])
    assert (verdict.path, verdict.correct) == ("verifier", 1.0)
