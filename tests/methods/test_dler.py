"""DLER: truncation, whitening over tokens, and groups without variance."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.config.settings import resolve
from bacr_jax.methods import dler, load_method
from bacr_jax.training.grading import credited
from methods_world import group_batch, load


def test_whitening_weighs_traces_by_their_tokens():
    """Mean (3 x 1 - 1 x 1) / 4 = 1/2; squares 3 x 1/4 + 9/4 = 3 over 4 - 1: a deviation of 1."""
    got = dler.whitened(jnp.array([[1.0, -1.0, 7.0]]), jnp.array([[3, 1, 0]]))
    np.testing.assert_allclose(got, [[0.5, -1.5, 6.5]], rtol=1e-6)


def test_tokens_have_mean_zero_and_deviation_one():
    rng = np.random.default_rng(0)
    advantages, tokens = rng.normal(size=(4, 8)), rng.integers(1, 30, (4, 8))
    got = np.repeat(dler.whitened(jnp.asarray(advantages), jnp.asarray(tokens)), tokens.ravel())
    np.testing.assert_allclose([got.mean(), got.std(ddof=1)], [0.0, 1.0], atol=1e-5)


def batch_of(config):
    """The first question: right, right but cut, wrong; the second: nothing that counts as right."""
    return dataclasses.replace(
        group_batch(config, outcomes=np.array([[[1.0], [1.0], [0.0]], [[1.0], [0.0], [0.0]]])),
        closed=jnp.array([[True, False, True], [False, True, True]]),
        thinking=jnp.array([[3, 12, 1], [12, 6, 6]]),
        sampled=jnp.array([[4, 12, 2], [12, 7, 7]]),  # with the closing tag
    )


def test_a_right_answer_after_a_cut_earns_nothing_and_teaches_no_answer(tmp_path):
    config = load(tmp_path, "dler", "rollout.questions=2", "rollout.group_size=3")
    method, batch = load_method(resolve(config).method), batch_of(config)
    rewards = method.rewards(None, batch)
    np.testing.assert_array_equal(rewards[..., 0], [[1, 0, 0], [0, 0, 0]])
    np.testing.assert_array_equal(method.dynamic_sampling.keep(batch), [True, False])
    credit = method.advantages(None, batch, rewards, None)
    # 6, 12 and 4 tokens with 2/3, -1/3 and -1/3; the second question has no part.
    a, n = np.array([2, -1, -1]) / 3, np.array([6, 12, 4])
    mean = (a * n).sum() / 22
    want = (a - mean) / np.sqrt((n * (a - mean) ** 2).sum() / 21)
    np.testing.assert_allclose(credit.thinking[0, :, 0], want, rtol=1e-5)
    np.testing.assert_allclose(credit.answers[0, :, 0], want * [1, 0, 1], rtol=1e-5)
    np.testing.assert_allclose(credit.baseline[0, :, 0], [1 / 3] * 3, rtol=1e-6)
    metrics = method.metrics(None, batch)
    np.testing.assert_allclose(metrics["dler/truncated_share"], 1 / 3)
    assert metrics["dler/mixed_share"] == 0.5


def test_without_dynamic_sampling_every_trace_is_in_the_whitening(tmp_path):
    config = load(tmp_path, "dler", "rollout.questions=2", "rollout.group_size=3",
                  "dapo.dynamic_sampling=false")  # fmt: skip
    method, batch = load_method(resolve(config).method), batch_of(config)
    assert method.dynamic_sampling is None
    credit = method.advantages(None, batch, method.rewards(None, batch), None)
    n = np.array([6, 12, 4, 12, 9, 9])
    tokens = np.repeat(np.asarray(credit.thinking).ravel(), n)
    np.testing.assert_allclose([tokens.mean(), tokens.std(ddof=1)], [0, 1], atol=1e-5)


@pytest.mark.parametrize("mixed", [False, True], ids=["overlong_filter", "reward.weights"])
def test_the_whitening_is_over_the_tokens_that_are_in_the_loss(tmp_path, mixed):
    more = (
        "reward.weights={correct: 1, mine.py:style: .5}" if mixed else "loss.overlong_filter=true"
    )
    config = load(tmp_path, "dler", "rollout.questions=2", "rollout.group_size=3", more)
    method, batch = load_method(resolve(config).method), batch_of(config)
    if mixed:
        style = jnp.array([[0.1, 0.7, 0.3], [0.9, 0.2, 0.4]])[..., None, None]
        scores = {"correct": batch.by_answer, "mine.py:style": style}
        batch = dataclasses.replace(batch, by_reward=scores)
    keep = np.asarray(method.dynamic_sampling.keep(batch))[:, None] & np.ones((2, 3), bool)
    paid = credited(config.reward, batch)
    credit = method.advantages(None, paid, method.rewards(None, paid), None)
    keep = keep if credit.keep is None else keep & np.asarray(credit.keep)
    n = np.where(batch.closed, batch.sampled + 2, batch.sampled)[keep]
    tokens = np.repeat(np.asarray(credit.thinking)[..., 0][keep], n)
    np.testing.assert_allclose([tokens.mean(), tokens.std(ddof=1)], [0, 1], atol=1e-5)
