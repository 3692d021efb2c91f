"""Tests that updates with NaN are skipped and counted, and that many in a row stop the run."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.config.settings import resolve
from bacr_jax.learner import train_step
from bacr_jax.methods import load_method
from bacr_jax.questions import ledger
from bacr_jax.runs.checkpoint import read_part
from bacr_jax.training import stages
from bacr_jax.training.algorithm import iterate
from methods_world import Odd, group_batch, load, run_of
from whole_runs import WHOLE_RUN

POISON = """
import dataclasses
import jax.numpy as jnp
from bacr_jax.methods import bacr

def make(config):
    method = bacr.make(config)

    def rewards(state, group_batch):
        return jnp.where({when}, jnp.nan, method.rewards(state, group_batch))

    return dataclasses.replace(method, rewards=rewards)
"""


@pytest.fixture
def train(tmp_path):
    """Trains on rewards that are NaN at times; returns exit code and metrics."""
    from bacr_jax.train import main

    def run(when, *overrides):
        (tmp_path / "small.yaml").write_text(WHOLE_RUN)
        method = tmp_path / "poison.py"
        method.write_text(POISON.format(when=when))
        base = ["--config", str(tmp_path / "small.yaml"), f"method={method}", *overrides]
        quick = ["warmup.steps=0", "eval.samples=0", "eval.every=null", "output.tensorboard=false"]
        quick += ["output.report=false"]
        code = main([*base, f"output.dir={tmp_path / 'run'}", *quick])
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        return code, [json.loads(line) for line in lines]

    return run


@pytest.mark.slow
def test_a_batch_with_rewards_that_are_no_numbers_is_skipped_and_counted(train, tmp_path):
    code, lines = train("group_batch.fraction == 0.25")  # the second of four steps
    assert code == 0
    # Both minibatches of the step are skipped, because advantages are normalised over the batch.
    assert [line["policy/skipped"] for line in lines] == [0, 2, 2, 2]
    assert lines[1]["reward/mean"] == "nan"
    for line in (lines[0], *lines[2:]):
        assert all(np.isfinite(value) for value in line.values())


@pytest.mark.slow
def test_a_run_that_only_skips_stops_and_says_what_it_saw(train, tmp_path, capsys):
    code, lines = train(
        "group_batch.fraction >= 0.25", "train.steps=8", "train.max_skipped_updates=4"
    )
    assert code == 1 and len(lines) == 4
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(
        "error: training: stopped after step 4, because the loss or its gradient"
    )
    assert "was not finite in 4 consecutive updates" in error
    assert "optimizer.learning_rate" in error
    assert f"{tmp_path / 'run' / 'checkpoints' / '4'}" in error
    assert (tmp_path / "run" / "checkpoints" / "4" / "state").is_dir()
    # After the cause is fixed, the same command continues the run.
    code, lines = train("False", "train.steps=8", "train.max_skipped_updates=4")
    assert code == 0 and [line["policy/skipped"] for line in lines] == [0, 0, 2, 4, 4, 4, 4, 4]


@pytest.mark.slow
def test_a_broken_value_head_is_named_and_never_saved(train, tmp_path, monkeypatch, capsys):
    fit, steps = train_step.fit_value, []

    def broken(*arguments, **options):
        head, opt = fit(*arguments, **options)
        steps.append(1)
        broke = lambda leaf: leaf.at[(0,) * leaf.ndim].set(jnp.inf)
        return (jax.tree.map(broke, head) if len(steps) == 2 else head), opt

    monkeypatch.setattr(train_step, "fit_value", broken)
    code, lines = train("False", "checkpoint.every=1", "train.max_skipped_updates=2")
    assert code == 1 and len(lines) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(
        "error: training: stopped after step 2, because the parameters of the value head"
    )
    assert "lower value.learning_rate" in error and "from checkpoint 1 in" in error
    checkpoints = tmp_path / "run" / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["1"]
    saved = read_part(checkpoints / "1" / "state", "train", "head")
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(saved))


@pytest.mark.parametrize("what", ["rewards", "values", "score_norm_proxy"])
def test_what_is_no_number_leaves_the_moments_as_they_were(tmp_path, what):
    """Rewards are finite in two of three: one bad value or score would stay in a running mean."""
    config = load(tmp_path, "bacr-weighted", "budget.choices=[8, 12]")
    method, batch = load_method(resolve(config).method), group_batch(config)
    state = method.init_state(64)
    rewards, values = method.rewards(state, batch), jnp.full(batch.outcomes.shape, 0.5)
    state = stages.update_method(state, batch, rewards, values, method=method)
    given = {"rewards": rewards, "values": values, "score_norm_proxy": batch.score_norm_proxy}
    given[what] = given[what].at[0, 0, 0].set(jnp.nan)
    spoilt = dataclasses.replace(batch, score_norm_proxy=given["score_norm_proxy"])
    after = stages.update_method(state, spoilt, given["rewards"], given["values"], method=method)
    jax.tree.map(np.testing.assert_array_equal, after, state)
    good = stages.update_method(after, batch, rewards, values, method=method)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(good))
    assert any((x != y).any() for x, y in zip(jax.tree.leaves(good), jax.tree.leaves(state)))


class Broken(Odd):
    def grade(self, answers, references, *, mode, poll=None, questions=None):
        verdicts = super().grade(answers, references, mode=mode)
        verdicts[0].correct = float("nan")
        return verdicts


@pytest.mark.slow
def test_an_outcome_that_is_no_number_reaches_no_pass_rate(tmp_path):
    tokenizer = ledger.ledger_tokenizer()
    config = load(tmp_path, "hapo", "curriculum.update_every=1")
    run, state = run_of(config, (tokenizer, len(tokenizer)), Broken())
    before = jax.tree.map(np.array, state.curriculum)
    remembered = np.array(state.method_state)
    params = jax.tree.map(np.array, state.train.policy)
    state, done = iterate(run, state, 0)
    metrics = done.metrics
    assert np.isnan(metrics["reward/mean"]) and metrics["policy/skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, state.curriculum, before)
    jax.tree.map(np.testing.assert_array_equal, state.train.policy, params)
    np.testing.assert_array_equal(state.method_state, remembered)
    assert int(state.train.skipped_in_a_row) == 1 and jnp.isfinite(state.curriculum.ema_rate).all()
