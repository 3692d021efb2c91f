"""A command takes a run's best checkpoint, unless there is none or another one is named."""

import json

import pytest

from bacr_jax.errors import UserError
from bacr_jax.files import write_json
from bacr_jax.runs.chosen_step import choose_step
from bacr_jax.runs.folder import RunPaths

WORST = {"budget": "8", "before": 0.5, "after": 0.1}
DECLINE = {
    **WORST, "mode": "greedy", "measure": "accuracy", "problems": 64, "is_shown": True,
}  # fmt: skip
BEST = {"step": 2, "accuracy": 0.5, "set": "ledger", "worst": WORST, "declines": [DECLINE]}


@pytest.fixture
def run(tmp_path):
    """A run with checkpoints 2 and 10, and one that was never finished."""
    for name in ("2", "10", "30.orbax-checkpoint-tmp"):
        (RunPaths(tmp_path).checkpoints / name).mkdir(parents=True)
    return tmp_path


def test_a_run_without_a_choice_gives_its_newest_finished_checkpoint(run):
    chosen = choose_step(run)
    assert (chosen.step, chosen.newest, chosen.is_best) == (10, 10, False)
    assert choose_step(run, 2).step == 2
    for missing in (30, "last"):
        with pytest.raises(UserError, match=rf"--step {missing}: .* use one of 2, 10"):
            choose_step(run, missing)


def test_the_best_checkpoint_is_the_default(run):
    with pytest.raises(UserError, match="--step best: the best checkpoint of .* is unknown"):
        choose_step(run, "best")
    write_json(RunPaths(run).best, BEST)
    for requested in (None, "best"):
        chosen = choose_step(run, requested)
        assert (chosen.step, chosen.newest, chosen.is_best) == (2, 10, True)
        assert chosen.best == BEST
    assert (choose_step(run, "newest").step, choose_step(run, 10).step) == (10, 10)
    assert not choose_step(run, "newest").is_best
    assert choose_step(run, 2).is_best


def test_a_best_checkpoint_that_is_gone_is_replaced_by_the_newest_unless_it_was_requested(run):
    write_json(RunPaths(run).best, {**BEST, "step": 7})
    chosen = choose_step(run)
    assert (chosen.step, chosen.is_best) == (10, False)
    with pytest.raises(
        UserError, match="--step 7: .* contains no checkpoint of this step; use one of 2, 10"
    ):
        choose_step(run, "best")


def test_an_evaluation_that_chose_nothing_leaves_the_newest(run):
    nothing = {"step": 2, "accuracy": None, "set": None, "worst": None, "declines": []}
    write_json(RunPaths(run).best, nothing)
    chosen = choose_step(run)
    assert (chosen.step, chosen.is_best) == (10, False)
    assert choose_step(run, "best").step == 2


def json_with(**changes):
    """The text of a best.json with other values of some fields. ... removes a field."""
    fields = BEST | changes
    return json.dumps({name: value for name, value in fields.items() if value is not ...})


@pytest.mark.parametrize(
    "damaged",
    [
        "",
        "[]",
        *(json_with(**{name: ...}) for name in BEST),
        *(
            json_with(declines=[{k: v for k, v in DECLINE.items() if k != name}])
            for name in DECLINE
        ),
        json_with(unknown=1),
        json_with(step=1.5),
        json_with(step=True),
        *(json_with(accuracy=accuracy) for accuracy in ("high", None, 71.2, -0.1)),
        json_with(set=3),
        *(json_with(worst=worst) for worst in (4, [], {**WORST, "budget": 8})),
        json_with(worst={**WORST, "after": 50}),
        json_with(declines=4),
        json_with(declines=None),
        json_with(declines=[4]),
        json_with(declines=[{**DECLINE, "after": "low"}]),
        json_with(declines=[{**DECLINE, "before": 1.1}]),
        json_with(declines=[{**DECLINE, "problems": "64"}]),
        json_with(declines=[{**DECLINE, "is_shown": "yes"}]),
    ],
)
def test_a_damaged_best_json_is_refused_where_it_would_choose(run, damaged):
    RunPaths(run).best.write_text(damaged)
    for requested in (None, "best"):
        with pytest.raises(
            UserError,
            match=r"best\.json, which names the best checkpoint, is damaged; pass --step with "
            r"the number",
        ):
            choose_step(run, requested)
    assert (choose_step(run, 2).step, choose_step(run, "newest").step) == (2, 10)


def test_a_run_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(UserError, match="contains no finished checkpoint yet; wait until"):
        choose_step(tmp_path)


def test_the_last_checkpoint_has_the_declines_of_the_evaluation_after_training(run):
    declines = {"ledger": BEST["declines"], "gsm8k:x": []}
    summary = RunPaths(run).summary
    assert choose_step(run).declines_at_end == {}
    write_json(summary, {"steps": 10, "declines": declines})
    assert choose_step(run).declines_at_end == declines
    assert choose_step(run, 2).declines_at_end == {}
    for damaged in (
        {"steps": 10},
        {"steps": 10, "declines": {"ledger": [{"budget": "8"}]}},
        {"steps": 10, "declines": {"ledger": ["8"]}},
        {"steps": 10, "declines": {"ledger": None}},
        {"steps": 10, "declines": 3},
    ):
        write_json(summary, damaged)
        assert choose_step(run).declines_at_end == {}
