"""Tests `make_run`, the state from which a run starts, and the completed fraction of training."""

import dataclasses
from fractions import Fraction

import numpy as np
import pytest

from bacr_jax.curriculum import stage_limit
from bacr_jax.questions import ledger
from bacr_jax.training.run import completed_fraction
from methods_world import load, run_of


def test_groups_are_counted_and_keep_one_mean_each(tmp_path):
    tokenizer = ledger.ledger_tokenizer()
    run, state = run_of(load(tmp_path, "grpo"), (tokenizer, len(tokenizer)))
    np.testing.assert_array_equal(run.group_sizes, np.bincount(run.group_of, minlength=4))
    assert run.config.data.num_groups == 4 and state.curriculum.mu0.shape == (4,)
    assert run.sampler({}).spec.answers == run.method.answers


def run_with(tmp_path, *keys):
    tokenizer = ledger.ledger_tokenizer()
    return run_of(load(tmp_path, "grpo", *keys), (tokenizer, len(tokenizer)))[0]


def test_without_a_token_limit_schedules_follow_the_steps_bit_for_bit(tmp_path):
    run = run_with(tmp_path)
    for total in (1, 3, 7, 49, 2000):
        run = dataclasses.replace(run, total_steps=total)
        for step in range(total):
            fraction = completed_fraction(run, step, 10**12)
            assert np.float32(float(fraction)) == np.float32(step / total)
            for stages in ((1.0, 0.5), (1.0, 0.75, 0.5), np.linspace(1, 0.1, 7).tolist()):
                of_steps = stage_limit(stages, step=step, total_steps=total, b_max=999)
                parts = {"step": fraction.numerator, "total_steps": fraction.denominator}
                assert stage_limit(stages, **parts, b_max=999) == of_steps


@pytest.mark.parametrize(
    ("step", "tokens", "fraction"),
    [
        (0, 0, Fraction(0)),
        (48, 150_000, Fraction(1, 2)),  # tokens end the run long before its 2,000 steps
        (48, 299_999, Fraction(299_999, 300_000)),
        (48, 303_000, Fraction(1)),
        (1000, 3000, Fraction(1, 2)),  # steps end it
    ],
)
def test_schedules_follow_the_limit_that_ends_the_run(tmp_path, step, tokens, fraction):
    run = run_with(tmp_path, "train.steps=2000", "train.max_generated_tokens=300000")
    assert completed_fraction(run, step, tokens) == fraction
