"""Answers that are graded early: the same verdicts, asked about once, and nothing left behind."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from bacr_grading import LENIENT, STRICT, Grader, VerifierGrader, load_verifier, pooled
from bacr_grading.pooled import BackgroundGrader
from bacr_jax.errors import UserError

# Keeps sympy busy for much longer than the deadline.
SLOW = "\\int_0^1 \\frac{\\sin(\\tan x) e^{x^3} \\log(1+x^5)}{\\arctan(\\sin x)+x^7} dx"
# Numbers, words, lists, expressions that only math-verify compares, nothing at all; and golds.
PAIRS = [
    ("1", "1"), ("\\frac{x+1}{2}", "(1+x)/2"), ("(1, 2)", "(1,2)"), ("yes", "yes"),
    ("x^2+2x+1", "(x+1)^2"), ("\\sqrt{8}", "2\\sqrt{2}"), (SLOW, "1+x"), ("", "2"), ("x+1", "x"),
]  # fmt: skip
TEXTS = [f"so \\boxed{{{answer}}}" for answer, _ in PAIRS] + ["nothing", "\\boxed{1+x}", None]
GOLDS = [gold for _, gold in PAIRS] + ["1", "x+1", "3"]

# What an answer makes the verifier do.
SOURCE = """
import os, time

def score(question, answer, gold):
    if answer == "hangs":
        time.sleep(100)
    if answer == "raises":
        raise KeyError(answer)
    if answer.startswith("waits for "):
        while not os.path.exists(answer[10:]):
            time.sleep(0.01)
    return min(len(answer) / 10, 1.0)

def score_batch(questions, answers, golds):
    return [score(*row) for row in zip(questions, answers, golds)]
"""
OWN_COUNTERS = ("worker_", "timeouts")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("verifier") / "mine.py"
    path.write_text(SOURCE)
    return path


def at_work():
    return [thread for thread in threading.enumerate() if thread.name == "grading"]


def counted(grader):
    """Counters that must not tell whether anything was begun early."""
    counts = grader.counters().items()
    return {name: number for name, number in counts if not name.startswith(OWN_COUNTERS)}


@pytest.mark.parametrize(
    ("mode", "cache_size", "workers"),
    [(STRICT, 100, "ready"), pytest.param(LENIENT, 0, None, marks=pytest.mark.slow)],
)
def test_verdicts_and_counters_are_those_of_grading_at_once(
    mode, cache_size, workers, monkeypatch, request
):
    if workers is not None:
        request.getfixturevalue(workers)
    monkeypatch.setattr(pooled, "CACHE_SIZE", cache_size)
    given = {"workers": 2, "deadline": 0.5}
    with Grader(**given) as early, Grader(**given) as late:
        for texts, golds in ((TEXTS, GOLDS), (TEXTS[:6] * 2, GOLDS[:6] * 2)):
            for part in (slice(0, 4), slice(3, 9), slice(9, 12)):
                early.ahead(texts[part], golds[part], mode=mode)
            assert early.grade(texts, golds, mode=mode) == late.grade(texts, golds, mode=mode)
        assert counted(early) == counted(late)
        assert early.counters()["timeouts"] == late.counters()["timeouts"] > 0


@pytest.mark.parametrize("name", ["score", "score_batch"])
def test_a_verifiers_scores_and_failures_are_those_of_scoring_at_once(file, name):
    answers = ["1", "raises", "22", "1", "333", "raises", "4444"]
    texts, questions = [f"<answer>{answer}</answer>" for answer in answers], ["?"] * 7
    texts[2], golds = "never closed", ["g"] * 7
    # One answer in a batch: what fails takes no other with it, whatever the batches are.
    open_ = lambda: VerifierGrader(load_verifier(f"{file}:{name}"), batch=1, workers=2)
    with open_() as early, open_() as late:
        for part in (slice(0, 3), slice(3, 7)):
            early.ahead(texts[part], golds[part], questions=questions[part])
        assert early.grade(texts, golds, questions=questions) == late.grade(
            texts, golds, questions=questions
        )
        assert counted(early) == counted(late)
        assert early.last_failure == late.last_failure != ""


def test_workers_work_before_anybody_waits_and_are_asked_once(file, tmp_path):
    go = tmp_path / "go"
    text, quick = f"<answer>waits for {go}</answer>", "<answer>1</answer>"
    with VerifierGrader(load_verifier(f"{file}:score"), workers=1, deadline=60) as grader:
        grader.ahead([text], ["?"], questions=["?"])
        # It waits for a file that is there only because this line is reached.
        go.touch()
        grader.ahead([quick, text], ["?", "?"], questions=["?", "?"])
        while at_work():
            time.sleep(0.01)
        (pid,) = grader.worker_pids
        os.kill(pid, signal.SIGKILL)
        # Both were answered before: without a worker nothing can be.
        verdicts = grader.grade([text, quick], ["?", "?"], questions=["?", "?"])
        assert [verdict.path for verdict in verdicts] == ["verifier"] * 2
        assert grader.counters()["worker_starts"] == 1


def test_an_interrupted_wait_drops_the_work_and_the_grader_goes_on(file):
    class Interrupted(Exception):
        pass

    def interrupt():
        raise Interrupted

    with VerifierGrader(load_verifier(f"{file}:score"), workers=2, deadline=60) as grader:
        hanging = ["<answer>hangs</answer>"]
        for text in (*hanging, "<answer>1</answer>"):
            grader.ahead([text], ["?"], questions=["?"])
        with pytest.raises(Interrupted):
            grader.grade(hanging, ["?"], poll=interrupt, questions=["?"])
        assert not at_work()
        (verdict,) = grader.grade(["<answer>1</answer>"], ["?"], questions=["?"])
        assert verdict.correct == 0.1


def test_closing_ends_what_is_under_way(file):
    grader = VerifierGrader(load_verifier(f"{file}:score"), workers=1, deadline=600)
    grader.check()
    (pid,) = grader.worker_pids
    grader.ahead(["<answer>hangs</answer>"], ["?"], questions=["?"])
    grader.close()
    assert not Path(f"/proc/{pid}").exists()
    assert not at_work()


def test_workers_that_cannot_start_are_told_of_by_the_next_call(tmp_path):
    (tmp_path / "v.py").write_text("import nonsense_xyz\n")
    with VerifierGrader(load_verifier(f"{tmp_path / 'v.py'}:f")) as grader:
        request = (["<answer>1</answer>"], ["1"])
        grader.ahead(*request, questions=["?"])
        with pytest.raises(UserError, match="nonsense_xyz"):
            grader.grade(*request, questions=["?"])


def test_requests_that_make_no_sense_are_refused_at_once(file):
    with Grader() as grader, pytest.raises(UserError, match="1 texts and 2 references"):
        grader.ahead(["1"], ["1", "2"])
    with (
        VerifierGrader(load_verifier(f"{file}:score")) as grader,
        pytest.raises(UserError, match="a verifier also reads the questions"),
    ):
        grader.ahead(["1"], ["1"])


def test_requests_are_run_once_in_the_order_of_their_turns():
    runs = []

    def run(asked, poll):
        poll()
        runs.append(asked)
        return {one: -one for one in asked}

    ahead = BackgroundGrader(run)
    assert ahead.finish() == {}
    ahead.begin(lambda: [1, 2, 2])
    assert ahead.finish() == {1: -1, 2: -2}
    assert ahead.finish() == {}
    for part in ([3, 4], [4, 5], [3]):
        ahead.begin(lambda part=part: part)
    assert ahead.finish() == {3: -3, 4: -4, 5: -5}
    assert sorted(one for asked in runs for one in asked) == [1, 2, 3, 4, 5]
