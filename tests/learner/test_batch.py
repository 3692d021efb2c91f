"""A rollout and its advantages as the learner sees them: masks from lengths, rows left out."""

import numpy as np

from bacr_jax.learner.batch import Batch, empty_batch, make_batch, only_rows
from bacr_jax.types import Branches, Prompts, Trunks

LENGTHS, SAMPLED = np.array([3, 2]), np.array([4, 1])


def rollout():
    """Two rows of which the second ends at once: its second cut is served by its first answer."""
    rng = np.random.default_rng(0)
    ids = lambda *shape: rng.integers(6, 16, shape)
    prompts = Prompts(ids(2, 3), LENGTHS, np.array([1, 0]), LENGTHS)
    trunks = Trunks(ids(2, 8), LENGTHS, SAMPLED, SAMPLED, np.zeros(2), np.array([5, 5]), ids(2, 5))
    branches = Branches(
        tokens=ids(2, 2, 5),
        context=np.array([[5, 7], [3, 3]]),
        forced=np.array([[2, 2], [1, 1]]),
        sampled=np.array([[3, 1], [2, 2]]),
        finished=np.ones((2, 2), bool),
        source=np.array([[0, 1], [0, 0]]),
        logprobs=ids(2, 2, 3),
    )
    return prompts, trunks, branches


def batch():
    return make_batch(
        *rollout(),
        cuts=np.array([[2, 4], [1, 1]]),
        thinking_advantages=np.ones((2, 5), np.float32),
        answer_advantages=np.ones((2, 2), np.float32),
        value_targets=np.zeros((2, 2), np.float32),
    )


def test_masks_follow_lengths_and_leave_reused_answers_out():
    rows = batch()
    np.testing.assert_array_equal(rows.thinking_mask.sum(1), SAMPLED)
    np.testing.assert_array_equal(rows.answered, [[3, 1], [2, 0]])
    np.testing.assert_array_equal(rows.answer_mask.sum(2), rows.answered)
    np.testing.assert_array_equal(rows.real, [True, True])


def test_rows_left_out_have_no_sampled_tokens():
    rows = batch()
    assert only_rows(rows, np.array([True, True])) is rows
    one = only_rows(rows, np.array([False, True]))
    np.testing.assert_array_equal(one.thinking_mask.sum(1), [0, 1])
    np.testing.assert_array_equal(one.answer_mask.sum((1, 2)), [0, 2])
    np.testing.assert_array_equal(one.trunk, rows.trunk)


def test_without_any_row_no_token_has_a_part():
    none = only_rows(batch(), np.array([False, False]))
    assert not none.thinking_mask.any() and not none.answer_mask.any() and none.real.all()


def test_an_empty_batch_has_the_shapes_of_a_full_one_and_no_row():
    rows = batch()
    empty = empty_batch(2, prompt=3, thinking=5, cuts=2, suffix=2, answer=3)
    # Branches are packed, and tokens listed, for a micro-batch alone.
    alone = {"packing", "real_tokens", "scored"}
    assert all(getattr(one, name) is None for one in (empty, rows) for name in alone)
    for name in Batch.__dataclass_fields__.keys() - alone:
        assert getattr(empty, name).shape == getattr(rows, name).shape, name
    assert not empty.real.any() and not empty.thinking_mask.any()
