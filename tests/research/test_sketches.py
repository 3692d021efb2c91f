"""Sketches keep inner products, and sketched scores add up to the gradient of the loss."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.advantages import scatter_segments
from bacr_jax.config import LossConfig
from bacr_jax.learner.objective import Minibatch, loss_normalizers
from bacr_jax.learner.train_step import gradients
from learner_world import CUTS, ROWS, RULES, SPEC, THINKING, WORLD, make_batch_by_hand, state_of
from research.variance import sketches

SPEC = dataclasses.replace(SPEC, loss=LossConfig(entropy_coef=0.0), value=None, remat="none")


def test_a_sketch_is_linear_and_keeps_inner_products():
    rng = np.random.default_rng(0)
    like = {"a": np.zeros((300, 70), np.float32), "b": np.zeros(11, np.float32)}
    sketch = sketches.count_sketch(1, like, 4096)
    one, other = ({k: rng.normal(size=x.shape) for k, x in like.items()} for _ in range(2))
    flat = lambda tree: np.concatenate([tree[k].reshape(-1) for k in sorted(tree)])
    as_jax = lambda tree: jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)
    y1, y2 = (np.asarray(sketch(as_jax(tree))) for tree in (one, other))
    both = sketch(as_jax({k: one[k] - 2 * other[k] for k in like}))
    np.testing.assert_allclose(both, y1 - 2 * y2, atol=1e-3)
    norm = flat(one) @ flat(one)
    # Four standard deviations of sqrt(2 / width).
    assert abs(y1 @ y1 / norm - 1) < 4 * np.sqrt(2 / 4096)
    assert abs(y1 @ y2 - flat(one) @ flat(other)) / norm < 4 / np.sqrt(4096)


@pytest.mark.slow  # one gradient a trace
def test_scores_weighted_by_advantages_add_up_to_the_gradient_of_the_loss():
    rng = np.random.default_rng(2)
    batch = make_batch_by_hand()
    a, answers = rng.normal(size=(2, ROWS, CUTS)).astype(np.float32)
    batch = dataclasses.replace(
        batch,
        thinking_advantages=np.asarray(
            scatter_segments(jnp.asarray(a), jnp.asarray(batch.cuts), THINKING)
        ),
        answer_advantages=answers,
    )
    sketch = sketches.count_sketch(0, WORLD.params, 256)
    normalizers = loss_normalizers(batch, spec=SPEC)
    whole = jax.jit(gradients, static_argnames="spec")(
        state_of(None), Minibatch(batch), normalizers, RULES.allowed_tokens, spec=SPEC
    ).policy
    segments = sketches.segment_weights(batch, batch.cuts)
    branches = sketches.answer_weights(batch, np.ones((ROWS, CUTS, 1), np.float32))[:, :CUTS]
    weights = (
        np.concatenate([segments, np.zeros_like(segments)], 1),
        np.concatenate([np.zeros_like(branches), branches], 1),
    )
    found = sketches.score_sketches(
        WORLD.params, batch, *weights, RULES.allowed_tokens, sketch, spec=SPEC
    )
    added = np.einsum("bv,bvk->k", np.concatenate([a, answers], 1), found)
    np.testing.assert_allclose(-added / normalizers.tokens, sketch(whole), rtol=1e-3, atol=1e-5)


class TestWeights:
    def test_tokens_belong_to_one_segment_each(self):
        batch = make_batch_by_hand()
        weights = sketches.segment_weights(batch, batch.cuts)
        inside = np.asarray(batch.thinking_mask) & (np.arange(1, 9) <= batch.cuts[:, -1:])
        np.testing.assert_array_equal(weights.sum(1), inside)

    def test_answers_split_into_what_was_right_and_all(self):
        batch = make_batch_by_hand()
        right = np.array([[[1.0], [0.0]]] * ROWS, np.float32)
        x, y = np.split(sketches.answer_weights(batch, right), 2, axis=1)
        np.testing.assert_array_equal(x[:, 1], 0.0)
        np.testing.assert_array_equal(x[:, 0], y[:, 0])
        np.testing.assert_array_equal(y.sum(1), batch.answer_mask)
