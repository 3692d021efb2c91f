"""A command takes a run's best checkpoint, unless there is none or another one is named."""

import pytest

from bacr_jax.errors import UserError
from bacr_jax.files import write_json
from bacr_jax.runs.chosen_step import choose_step
from bacr_jax.runs.folder import RunPaths

BEST = {
    "step": 2,
    "accuracy": 0.5,
    "set": "ledger",
    "worst": {"budget": "8", "before": 0.5, "after": 0.1},
    "declines": [
        {"mode": "greedy", "budget": "8", "measure": "accuracy", "before": 0.5, "after": 0.1}
    ],
}


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
    write_json(RunPaths(run).best, {"step": 2, "accuracy": None, "set": None})
    chosen = choose_step(run)
    assert (chosen.step, chosen.is_best) == (10, False)
    assert choose_step(run, "best").step == 2


def test_best_json_of_older_versions_has_no_worst_budget(run):
    write_json(RunPaths(run).best, {"step": 2, "accuracy": 0.5, "set": "ledger"})
    assert choose_step(run).best == {**BEST, "worst": None, "declines": []}


@pytest.mark.parametrize(
    "damaged",
    [
        "",
        "[]",
        '{"step": 1.5}',
        '{"step": 2, "set": "ledger"}',
        '{"step": 2, "set": "ledger", "accuracy": "high"}',
        '{"step": 2, "set": 3, "accuracy": 0.5}',
        '{"step": 2, "set": "ledger", "accuracy": 71.2}',
        '{"step": 2, "worst": 4}',
        '{"step": 2, "worst": {"budget": 8, "before": 0.5, "after": 0.1}}',
        '{"step": 2, "declines": [{"budget": "8", "before": 0.5, "after": 0.1}]}',
        '{"step": 2, "declines": [{"mode": "greedy", "budget": "8", "measure": "accuracy", '
        '"before": 0.5, "after": 0.1, "problems": "64", "is_shown": true}]}',
        '{"step": 2, "declines": [{"mode": "greedy", "budget": "8", "measure": "accuracy", '
        '"before": 0.5, "after": 0.1, "problems": 64, "is_shown": "yes"}]}',
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
