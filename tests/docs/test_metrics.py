"""Tests that docs/metrics.md documents every metric that a run can write, and no others."""

import re

from bacr_grading.grader import ExactGrader, Grader
from bacr_jax.training.logging import Clock, grader_metrics
from documented_metrics import (
    ENTRY,
    advice,
    an_evaluation,
    documented,
    keys_of,
    leaves,
    pattern,
    rows,
    undocumented,
    written_names,
)

METRICS = "metrics.jsonl: ..."


def known_by_code():
    """Names in the source with those that are put together from counters."""
    with Grader(workers=1) as one, ExactGrader() as other:
        counters = one.counters() | other.counters()
    clock = Clock().timed({}, 1)
    return written_names() | set(grader_metrics(counters, counters)) | set(clock)


def as_regex(name):
    return re.compile(re.escape(name).replace(r"\*", ".+"))


def test_every_metric_of_the_source_has_a_row():
    known = keys_of("metrics.jsonl")
    missing = {
        name
        for name in known_by_code()
        if undocumented({name}) and not any(as_regex(name).fullmatch(key) for key in known)
    }
    assert missing == set(), advice(missing, METRICS)


def test_every_row_is_a_metric_of_the_source():
    names = [as_regex(name) for name in known_by_code()]
    gone = {
        key for key in keys_of("metrics.jsonl") if not any(name.fullmatch(key) for name in names)
    }
    assert gone == set(), f"docs/metrics.md: take out the rows of {sorted(gone)}: nothing writes it"


def test_a_name_that_stands_nowhere_is_found():
    assert {"reward/mean", "budget/*_*", "reward/cut_*", "time/learn"} <= written_names()
    assert undocumented({"reward/mean", "budget/p10_3", "reward/cut_4"}) == set()
    assert undocumented({"reward/median", "reward/cut_", "budget/p11_3"}) == {
        "reward/median",
        "reward/cut_",
        "budget/p11_3",
    }


def test_every_number_of_an_evaluation_has_a_row_and_every_row_a_number():
    record = an_evaluation()
    missing = undocumented(leaves(record), "eval.jsonl")
    assert missing == set(), advice(missing, "eval.jsonl: a line per evaluation")
    (entry,) = record["sets"]["A"]["sampled"].values()
    names, known = leaves(entry), documented()[ENTRY]
    missing = {n for n in names if not any(pattern(key).fullmatch(n) for key in known)}
    assert missing == set(), advice(missing, ENTRY)
    for keys, there in ((keys_of("eval.jsonl"), leaves(record)), (known, names)):
        gone = {key for key in keys if not any(pattern(key).fullmatch(n) for n in there)}
        assert gone == set(), f"docs/metrics.md: take out the rows of {sorted(gone)}"


def test_every_row_says_what_is_healthy_and_what_to_do():
    wrong = [row[0] for row in rows() if len(row) != 4 or not all(row)]
    assert wrong == [], "docs/metrics.md: key, meaning, healthy range, what to do otherwise"
    assert len(rows()) == len({(row[0], row[1]) for row in rows()})
