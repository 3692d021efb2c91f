"""The running mean of earlier batches, against decayed sums by hand."""

import numpy as np

from methods_world import credit_of, load


def test_a_constant_baseline_is_the_running_mean_of_earlier_batches(tmp_path):
    own = ["advantage.baseline=constant", "advantage.normalise=none", "reward.dense=false"]
    config = load(tmp_path, "bacr-full", *own)
    method, batch, before, rewards, first, state = credit_of(config)
    assert not method.uses_value
    # Nothing is known yet: the other questions of the batch.
    r = np.asarray(batch.outcomes)
    others = (r.sum(0) - r) / (len(r) - 1)
    expected = r - others.mean(1, keepdims=True)
    w = np.full(4, 0.25) if config.cuts.weights == "uniform" else np.array(config.cuts.weights)
    to_go = lambda x: np.flip(np.cumsum(np.flip(w * x, -1), -1), -1)
    np.testing.assert_allclose(first.thinking, to_go(expected), atol=1e-6)
    second = method.advantages(state, batch, rewards, None)
    np.testing.assert_allclose(second.thinking, to_go(r - r.mean((0, 1))), atol=1e-6)
    np.testing.assert_allclose(second.answers, w * (r - r.mean((0, 1))), atol=1e-6)
    other = method.update(state, batch, 0 * rewards, None)
    third = method.advantages(other, batch, rewards, None)
    mean = 0.9 * r.mean((0, 1)) / 1.9  # two batches, the older one weighted .9
    np.testing.assert_allclose(third.answers, w * (r - mean), atol=1e-6)
