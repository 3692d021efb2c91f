"""The parts that all baselines share."""

import jax.numpy as jnp
import numpy as np

from bacr_jax.methods.baselines.baseline import Baseline, Credit, running
from methods_world import group_batch, load


def test_running_moments_by_hand():
    old = jnp.array([1.0, 0.0])
    new = jnp.array([0.0, 2.0])
    np.testing.assert_allclose(running(old, new), [0.9, 0.2], rtol=1e-6)
    np.testing.assert_allclose(running(old, new, power=2), [0.81, 0.02], rtol=1e-5)


def test_a_baseline_without_hooks_has_no_moments_and_changes_no_credit(tmp_path):
    baseline = Baseline(estimate=lambda *_: None)
    batch = group_batch(load(tmp_path, "bacr-paper"))
    ones = jnp.ones_like(batch.outcomes)
    credit = Credit(thinking=ones, answers=ones, returns=ones)
    assert baseline.init_state() == {}
    assert baseline.update({}, batch, ones, None) == {}
    assert baseline.refine({}, batch, credit) is credit
    assert baseline.metrics({}) == {}
