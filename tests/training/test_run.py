"""Tests `make_run` and the state from which a run starts."""

import numpy as np

from bacr_jax.questions import ledger
from methods_world import load, run_of


def test_groups_are_counted_and_keep_one_mean_each(tmp_path):
    tokenizer = ledger.ledger_tokenizer()
    run, state = run_of(load(tmp_path, "grpo"), (tokenizer, len(tokenizer)))
    np.testing.assert_array_equal(run.group_sizes, np.bincount(run.group_of, minlength=4))
    assert run.config.data.num_groups == 4 and state.curriculum.mu0.shape == (4,)
    assert run.sampler({}).spec.answers == run.method.answers
