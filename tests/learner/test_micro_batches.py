"""Rows sorted into a few shapes: each once, whole, within the allowance."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bacr_jax.learner.batch import Batch
from bacr_jax.learner.micro_batches import (
    Shapes,
    empty_micro_batches,
    has_advantage,
    micro_batches,
)

P, T, M, A = 4, 12, 2, 5


def make(sampled, answered=None):
    """Rows whose tokens and advantages carry the row's number."""
    b = len(sampled)
    number = np.arange(1, b + 1)
    answered = np.full((b, M), 2) if answered is None else np.asarray(answered)
    return Batch(
        trunk=np.where(np.arange(P + T) < P + np.asarray(sampled)[:, None], number[:, None], 0),
        prompt_lengths=np.full(b, P),
        question_start=np.zeros(b, int),
        question_end=np.full(b, P),
        sampled=np.asarray(sampled),
        budgets=np.full(b, T),
        cuts=np.tile([T // 2, T], (b, 1)),
        branches=np.tile(number[:, None, None], (1, M, A)),
        context=np.full((b, M), P),
        forced=np.full((b, M), 2),
        answered=answered,
        thinking_advantages=np.tile(number[:, None].astype(np.float32), (1, T)),
        answer_advantages=np.tile(number[:, None].astype(np.float32), (1, M)),
        returns=np.zeros((b, M), np.float32),
        thinking_logprobs=np.zeros((b, T), np.float32),
        answer_logprobs=np.zeros((b, M, 3), np.float32),
    )


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, T), min_size=1, max_size=20),
    st.integers(1, 200),
    st.integers(1, 5),
    st.sampled_from([1, 2, 4]),
)
def test_every_row_comes_once_and_whole(sampled, tokens, buckets, multiple):
    batch, shapes = make(sampled), Shapes(tokens, buckets, multiple)
    seen = []
    for micro in micro_batches(batch, shapes):
        rows, width = micro.trunk.shape
        assert rows % multiple == 0
        assert rows * (width + M * A) <= max(tokens, multiple * (width + M * A))
        for row in range(rows):
            if micro.prompt_lengths[row] == 0:
                assert micro.sampled[row] == 0 and not micro.answered[row].any()
                continue
            number = int(micro.branches[row, 0, 0])
            seen.append(number)
            assert micro.sampled[row] == sampled[number - 1]
            assert (micro.trunk[row] == number).sum() == P + sampled[number - 1]
            assert (micro.thinking_advantages[row] == number).all()
            assert len(micro.thinking_advantages[row]) >= sampled[number - 1]
    assert sorted(seen) == list(range(1, len(sampled) + 1))


def test_shapes_by_hand():
    # Widths 4, 8, 12, 16 beside 10 branch positions; 60 tokens hold 4, 3, 2, 2 rows.
    batch = make([0, 12, 4, 12, 12, 0, 3])
    found = [micro.trunk.shape for micro in micro_batches(batch, Shapes(60, 4))]
    assert found == [(4, 4), (3, 8), (2, 16), (2, 16)]
    shapes = [micro.trunk.shape for micro in empty_micro_batches(batch, Shapes(60, 4))]
    assert shapes == [(4, 4), (3, 8), (2, 12), (2, 16)]
    assert not any(micro.real.any() for micro in empty_micro_batches(batch, Shapes(60, 4)))


def test_only_advantages_of_sampled_tokens_count():
    batch = make([0, 2, 2, 0], answered=[[0, 0], [0, 0], [0, 1], [0, 0]])
    zero = jax.tree.map(np.copy, batch)
    zero.thinking_advantages[1:, :2] = 0
    zero.answer_advantages[2] = 0
    np.testing.assert_array_equal(has_advantage(batch), [False, True, True, False])
    np.testing.assert_array_equal(has_advantage(zero), [False, False, False, False])


@pytest.mark.parametrize(
    ("longest", "widths"), [(16, [4, 8, 12, 16]), (10, [3, 5, 8, 10]), (2, [1, 2])]
)
def test_the_last_width_is_the_longest(longest, widths):
    assert Shapes(100, 4).widths(longest) == widths
