"""What the start of a run says of the starting policy's form."""

from bacr_jax.config import Config
from bacr_jax.training.format_report import evaluation_notes, format_lines
from config_world import changed


def summary(closed, lenient, strict, mode="greedy"):
    entry = {"closed_rate": closed, "accuracy": lenient, "strict_accuracy": strict, "problems": 64}
    # The largest budget counts, and "none" is no number.
    worse = {**entry, "closed_rate": 0.0}
    return {mode: {"8": worse, "64": entry, "none": worse}}


def test_a_policy_in_good_form_gets_one_line():
    lines = list(format_lines(summary(0.98, 0.5, 0.48), "train_holdout", Config()))
    assert lines == [
        "format of the starting policy (train_holdout (validation, not a test set), 64 questions, "
        "greedy, budget 64): 2.0% of the answers were never closed, 2.0% are right by the lenient "
        "rules alone"
    ]


def test_failures_of_form_get_advice():
    unclosed = list(format_lines(summary(0.5, 0.4, 0.4), "x", Config()))
    assert len(unclosed) == 2
    assert "rollout.answer_tokens=128" in unclosed[1] and "--show-prompts" in unclosed[1]
    lenient = list(format_lines(summary(1.0, 0.4, 0.1), "x", Config()))
    assert len(lenient) == 2
    assert "30.0% are right by the lenient rules alone" in lenient[0]
    assert "data.prompt_format" in lenient[1]


class Grader:
    last_failure = "it returned None"

    def __init__(self, **counts):
        self.counts = counts

    def counters(self):
        return self.counts


def test_it_is_said_once_and_can_be_switched_off():
    notes = lambda config, when: list(
        evaluation_notes(
            config, Grader(graded=4), {"when": when, "sets": {"a": summary(1, 1, 1)}}, {}
        )
    )
    assert len(notes(Config(), "before")) == 1
    assert notes(Config(), "during") == []
    assert notes(changed(output={"format_report": False}), "before") == []


def test_answers_that_a_verifier_gave_no_score_are_said_each_time():
    reasons = dict.fromkeys(
        ("late", "died", "memory", "raised", "text", "nan", "range", "length"), 0
    )
    failed = {f"failed_{name}": count for name, count in (reasons | {"late": 2, "nan": 3}).items()}
    grader = Grader(graded=20, failed=5, **failed)
    counted = {"graded": 10, "failed": 2, "failed_late": 2}
    record = {"when": "during", "sets": {}}
    assert list(evaluation_notes(Config(), grader, record, counted)) == [
        "WARNING: the verifier gave no score to 3 of 10 answers, which count as 0: 3 got NaN (the "
        "last: it returned None)"
    ]
