"""A command prints which checkpoint it takes and why, and whether that one has declined."""

from pathlib import Path

import pytest

from bacr_jax.evaluation.decline import Decline
from bacr_jax.report.chosen_step import best_note, declines_of, step_lines
from bacr_jax.runs.chosen_step import ChosenStep

RUN = Path("runs/one")
HEALTHY = {
    "step": 20,
    "accuracy": 0.712,
    "set": "train_holdout",
    "worst": {"budget": "48", "before": 0.558, "after": 0.632},
    "declines": [],
}
DECLINED = {
    **HEALTHY,
    "worst": {"budget": "48", "before": 0.558, "after": 0.0},
    "declines": [
        {
            "mode": "greedy", "budget": "48", "measure": "accuracy", "before": 0.558, "after": 0.0,
            "problems": 64, "is_shown": True,
        }
    ],
}  # fmt: skip
NOTHING = {"step": 30, "accuracy": None, "set": None, "worst": None, "declines": []}
WHY = "mean accuracy 71.2 % on train_holdout (validation, not a test set), worst budget 48: 55.8 to"


@pytest.mark.parametrize(
    ("step", "requested", "best", "line"),
    [
        (20, None, HEALTHY, f"step 20, the best: {WHY} 63.2 %; --step newest takes step 30"),
        (20, "best", HEALTHY, f"step 20, the best: {WHY} 63.2 %; --step newest takes step 30"),
        (
            30,
            None,
            {**HEALTHY, "step": 30},
            f"step 30, the best: {WHY} 63.2 %, and the newest",
        ),
        (30, "newest", HEALTHY, "step 30, the newest"),
        (30, None, None, "step 30, the newest, as no evaluation chose a best one"),
        (30, None, NOTHING, "step 30, the newest, as no evaluation chose a best one"),
        (
            30,
            None,
            HEALTHY,
            "step 30, the newest, as the best, step 20, has no checkpoint any more",
        ),
        (30, "best", NOTHING, "step 30, the only one that was evaluated in or after training"),
    ],
)
def test_one_line_has_the_step_and_the_reason(step, requested, best, line):
    assert list(step_lines(ChosenStep(RUN, step, 30, requested, best))) == [f"runs/one: {line}"]


def test_a_step_that_was_given_needs_no_reason():
    assert list(step_lines(ChosenStep(RUN, 20, 30, 20, HEALTHY))) == []
    assert list(step_lines(ChosenStep(RUN, 30, 30, 30, DECLINED))) == []


@pytest.mark.parametrize("requested", [None, "best", 20])
def test_a_best_checkpoint_that_has_declined_is_warned_of(requested):
    *_, warning = step_lines(ChosenStep(RUN, 20, 30, requested, DECLINED))
    assert warning == (
        "WARNING, step 20: the best checkpoint, yet worse than before training on train_holdout "
        "(validation, not a test set): greedy at 48: accuracy 55.8 to 0.0 % (shown by an exact "
        "test)"
    )


def test_a_last_checkpoint_that_has_declined_is_warned_of_on_each_set():
    ruined = DECLINED["declines"]
    sets = {"ledger": ruined, "train_holdout": ruined, "gsm8k:x": []}
    for best, requested in ((NOTHING, None), (HEALTHY, "newest"), (None, 30)):
        warnings = [
            line
            for line in step_lines(ChosenStep(RUN, 30, 30, requested, best, sets))
            if line.startswith("WARNING")
        ]
        assert warnings == [
            f"WARNING, step 30: worse than before training on {title}: greedy at 48: accuracy 55.8 "
            "to 0.0 % (shown by an exact test)"
            for title in ("Ledger", "train_holdout (validation, not a test set)")
        ]
    # The selection set is named once.
    lines = list(step_lines(ChosenStep(RUN, 30, 30, None, {**DECLINED, "step": 30}, sets)))
    assert [line.partition(" on ")[2].partition(":")[0] for line in lines[1:]] == [
        "train_holdout (validation, not a test set)",
        "Ledger",
    ]


def test_declines_are_read_from_their_records():
    assert declines_of(DECLINED["declines"]) == [
        Decline("greedy", "48", "accuracy", 0.558, 0.0, problems=64, is_shown=True)
    ]


def test_a_finished_run_names_its_best_checkpoint():
    assert best_note(HEALTHY) == (
        f"the best checkpoint is step 20 ({WHY} 63.2 %); export, evaluate, generate and serve take "
        "it"
    )
    assert best_note(DECLINED).endswith(
        "take it, although it is worse than before training: greedy at 48: accuracy 55.8 to 0.0 %"
    )
    only_once = {**HEALTHY, "set": "ledger", "worst": None}
    assert "step 20 (mean accuracy 71.2 % on Ledger);" in best_note(only_once)
    for nothing in (None, NOTHING):
        assert best_note(nothing).startswith("no evaluation chose a best checkpoint, so export")
