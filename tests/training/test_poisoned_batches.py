"""What is no number is skipped and counted; training goes on, and stops when nothing else comes."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.data import ledger
from bacr_jax.training.algorithm import iterate
from methods_world import Odd, load, run_of
from test_train import SMALL

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
        (tmp_path / "small.yaml").write_text(SMALL)
        method = tmp_path / "poison.py"
        method.write_text(POISON.format(when=when))
        base = ["--config", str(tmp_path / "small.yaml"), f"method={method}", *overrides]
        quick = ["warmup.steps=0", "eval.samples=0", "eval.every=null", "output.tensorboard=false"]
        quick += ["output.report=false"]
        code = main([*base, f"output.dir={tmp_path / 'run'}", *quick])
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        return code, [json.loads(line) for line in lines]

    return run


def test_a_batch_with_rewards_that_are_no_numbers_is_skipped_and_counted(train, tmp_path):
    code, lines = train("group_batch.fraction == 0.25")  # the second of four steps
    assert code == 0
    # Two minibatches, both spoilt: advantages are normalised over the whole batch.
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
    assert error.startswith("error: training: stopped after step 4, since the loss or its gradient")
    assert "was not finite in 4 updates in a row" in error
    assert "optimizer.learning_rate" in error
    assert f"{tmp_path / 'run' / 'checkpoints' / '4'}" in error
    assert (tmp_path / "run" / "checkpoints" / "4" / "state").is_dir()


class Broken(Odd):
    def grade(self, answers, references, *, mode, poll=None, questions=None):
        verdicts = super().grade(answers, references, mode=mode)
        verdicts[0].correct = float("nan")
        return verdicts


@pytest.mark.parametrize("overrides", [(), ("curriculum.difficulty=continuous",)])
def test_an_outcome_that_is_no_number_reaches_no_pass_rate(tmp_path, overrides):
    tokenizer = ledger.ledger_tokenizer()
    config = load(tmp_path, "hapo", "curriculum.update_every=1", *overrides)
    run, state = run_of(config, (tokenizer, len(tokenizer)), Broken())
    before = jax.tree.map(np.array, (state.curriculum, state.difficulty))
    remembered = np.array(state.method_state)
    params = jax.tree.map(np.array, state.train.policy)
    state, done = iterate(run, state, 0)
    metrics = done.metrics
    assert np.isnan(metrics["reward/mean"]) and metrics["policy/skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, (state.curriculum, state.difficulty), before)
    jax.tree.map(np.testing.assert_array_equal, state.train.policy, params)
    np.testing.assert_array_equal(state.method_state, remembered)
    assert int(state.train.skipped_in_a_row) == 1 and jnp.isfinite(state.curriculum.ema_rate).all()
