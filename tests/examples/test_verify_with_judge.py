"""The example that asks a judge: tries, pauses, budget, and what is counted if it misbehaves."""

import os
from pathlib import Path

from bacr_grading.verifier import VerifierGrader, load_verifier
from judge_world import judge, point_at

FILE = Path(__file__).parents[2] / "examples" / "verify_with_judge.py"


def scores(answers, deadline=6.0, **limits):
    limits = {"workers": 4, **limits}
    with VerifierGrader(load_verifier(f"{FILE}:judge"), deadline=deadline, **limits) as grader:
        texts = [f"<answer>{answer}</answer>" for answer in answers]
        verdicts = grader.grade(texts, ["gold"] * len(texts), questions=["?"] * len(texts))
        return [verdict.correct for verdict in verdicts], grader.counters(), grader.last_failure


def misbehaving(answer, times):
    """A judge that fails by the answer: twice with 500 and then not, always, and so on."""
    replies = {"busy": 500 if times < 3 else "0.5", "broken": 500, "refuses": 401, "nan": "NaN"}
    return {**replies, "words": "a fine answer", "above": "7"}.get(answer, answer)


def test_scores_tries_and_what_is_counted(tmp_path, monkeypatch):
    answers = ["1", "0.25", "busy", "broken", "refuses", "nan", "words", "above", "garbage"]
    with judge(misbehaving) as server:
        point_at(server, monkeypatch, tmp_path / "budget")
        found, counts, _ = scores(answers)
    assert found == [1.0, 0.25, 0.5, 0, 0, 0, 0, 0, 0]
    reasons = {name: counts[f"failed_{name}"] for name in ("raised", "nan", "text", "range")}
    assert reasons == {"raised": 3, "nan": 1, "text": 1, "range": 1}
    assert counts["failed"] == 6
    # Four tries, but one of what was refused.
    expected = {"busy": 3, "broken": 4, "garbage": 4, "refuses": 1, "1": 1, "nan": 1}
    assert {name: server.asked[name] for name in expected} == expected
    assert os.readlink(tmp_path / "budget" / "calls") == str(sum(server.asked.values()))


def test_a_judge_that_hangs_costs_its_seconds_and_a_count(tmp_path, monkeypatch):
    with judge(lambda answer, times: "hang") as server:
        point_at(server, monkeypatch, tmp_path / "budget", SECONDS=0.3)
        _, counts, said = scores(["1", "2"])
        assert counts["failed_raised"] == 2
        assert "timed out" in said
        # Longer than the grader's deadline: its worker is killed.
        point_at(server, monkeypatch, tmp_path / "budget", SECONDS=30)
        _, counts, _ = scores(["1"], deadline=0.5)
    assert counts["failed_late"] == counts["timeouts"] == 1


def test_nobody_calls_more_often_than_the_budget_says(tmp_path, monkeypatch):
    answers = [f"0.{n}" for n in range(1, 9)]
    with judge(lambda answer, times: answer) as server:
        point_at(server, monkeypatch, tmp_path / "budget", CALLS=5)
        found, counts, said = scores(answers)
        assert sum(server.asked.values()) == 5
        assert sum(score > 0 for score in found) == 5
        assert counts["failed_raised"] == 3
        assert "BudgetSpent: all 5 calls" in said
        # Of all legs of a run.
        assert scores(["1"])[1]["failed_raised"] == 1


def test_no_judge_at_all_is_counted(tmp_path, monkeypatch):
    with judge(misbehaving) as server:
        point_at(server, monkeypatch, tmp_path / "budget", SECONDS=0.2, TRIES=2)
    found, counts, said = scores(["1"])
    assert (found, counts["failed_raised"]) == ([0.0], 1)
    assert "refused" in said
