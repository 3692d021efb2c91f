"""Tests the counts of undone and shortened updates, and the lines that report them after a run."""

from bacr_jax.training.limited_updates import LimitedUpdates


def counted(*steps):
    limited = LimitedUpdates()
    for metrics in steps:
        limited = limited.after(metrics)
    return limited


def test_a_run_without_bounds_has_none():
    assert counted({"reward/mean": 0.5}, {"reward/mean": 0.6}) == (0, 0)
    assert list(LimitedUpdates().lines()) == []


def test_steps_that_were_undone_or_shortened_are_counted():
    full = {"policy/update_kl": 0.01, "policy/update_scale": 1.0}
    short = {"policy/update_kl": 0.09, "policy/update_scale": 0.4}
    dropped = {"policy/update_kl": float("nan"), "policy/update_scale": 0.0}
    no_tokens = {"policy/update_kl": 0.0, "policy/update_scale": 0.0}
    limited = counted(full, short, dropped, no_tokens, {"train/undone": 1.0}, {"train/undone": 0.0})
    assert limited == (1, 2)


def test_the_last_lines_name_the_number_and_the_keys():
    first, second = LimitedUpdates(undone=1200, shortened=3).lines()
    assert "1,200 steps" in first and "train.undo_closed_answers" in first
    assert second == "shortened the updates of 3 steps (optimizer.max_update_kl)"
