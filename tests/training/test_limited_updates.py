"""Tests the counts of undone, shortened and dropped updates, and the lines that report them."""

from bacr_jax.training.limited_updates import LimitedUpdates


def counted(*steps):
    limited = LimitedUpdates()
    for metrics in steps:
        limited = limited.after(metrics)
    return limited


def test_a_run_without_bounds_has_none():
    assert counted({"reward/mean": 0.5}, {"reward/mean": 0.6}) == (0, 0, 0)
    assert list(LimitedUpdates().lines()) == []


def test_steps_that_were_undone_shortened_or_dropped_are_counted_apart():
    full = {"policy/update_kl": 0.01, "policy/update_scale": 1.0}
    short = {"policy/update_kl": 0.09, "policy/update_scale": 0.4}
    dropped = {"policy/update_kl": 0.9, "policy/update_scale": 0.0}
    not_finite = {"policy/update_kl": float("nan"), "policy/update_scale": 0.0}
    no_tokens = {"policy/update_kl": 0.0, "policy/update_scale": 0.0}
    undone = {"train/undone": 1.0}
    steps = (full, short, dropped, not_finite, no_tokens, undone, {"train/undone": 0.0})
    assert counted(*steps) == LimitedUpdates(undone=1, shortened=1, dropped=2)


def test_the_last_lines_name_the_number_and_the_keys():
    first, second, third = LimitedUpdates(undone=1200, shortened=3, dropped=2).lines()
    assert "1,200 steps" in first and "train.undo_closed_answers" in first
    assert second == "shortened the updates of 3 steps (optimizer.max_update_kl)"
    assert third.startswith("dropped the updates of 2 steps") and "optimizer.max_update_kl" in third
    assert "optimizer.learning_rate" in third
