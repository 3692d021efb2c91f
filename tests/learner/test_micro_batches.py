"""Rows sorted into a few shapes: each once, whole, within the allowance."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bacr_jax.config import io as config_io
from bacr_jax.learner.batch import Batch, empty_batch
from bacr_jax.learner.micro_batches import (
    Shapes,
    empty_micro_batches,
    micro_batches,
    planned_parts,
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
        value_targets=np.zeros((b, M), np.float32),
        thinking_logprobs=np.zeros((b, T), np.float32),
        answer_logprobs=np.zeros((b, M, 3), np.float32),
    )


def branch_tokens(answered):
    """Indices of the tokens of branches that matter: two forced ones, then the answer."""
    return [m * A + a for m in range(M) if answered[m] for a in range(2 + answered[m])]


@settings(max_examples=30)
@given(
    st.lists(st.integers(0, T), min_size=1, max_size=20),
    st.integers(1, 200),
    st.integers(1, 5),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 10),
)
def test_every_row_comes_once_and_whole(sampled, tokens, buckets, multiple, seed):
    # Answers of 0 to 3 tokens: a row's branches have 0 to 10 tokens, of which 3 are a quarter.
    answered = np.random.default_rng(seed).choice([0, 0, 1, 3], (len(sampled), M))
    batch, shapes = make(sampled, answered), Shapes(tokens, buckets, multiple)
    seen = []
    for micro in micro_batches(batch, shapes):
        rows, width = micro.trunk.shape
        positions = width + (M * A if micro.packing is None else micro.packing.shape[1])
        assert rows % multiple == 0
        assert rows * positions <= max(tokens, multiple * positions)
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
            if micro.packing is not None:
                kept = micro.packing[row][micro.packing[row] >= 0]
                assert kept.tolist() == branch_tokens(micro.answered[row])
    assert sorted(seen) == list(range(1, len(sampled) + 1))


def shapes_of(micros):
    """Rows, trunk width and branch positions of each micro-batch."""
    positions = lambda x: M * A if x.packing is None else x.packing.shape[1]
    return [(*micro.trunk.shape, positions(micro)) for micro in micros]


def test_shapes_by_hand():
    # Widths 2, 4, 8, 16 beside 10 branch positions; 60 tokens hold 5, 4, 3, 2 rows.
    batch = make([0, 12, 4, 12, 12, 0, 3])
    found = shapes_of(micro_batches(batch, Shapes(60, 4)))
    # Longest first: three of 16, with a shorter one to fill up, then one of 8 and the two of 4.
    assert found == [(3, 8, 10), (2, 16, 10), (2, 16, 10)]
    empty = list(empty_micro_batches(batch, Shapes(60, 4)))
    wide = [(5, 2, 10), (4, 4, 10), (3, 8, 10), (2, 16, 10)]
    packed = [(12, 2, 3), (8, 4, 3), (5, 8, 3), (3, 16, 3)]
    assert shapes_of(empty) == [shape for pair in zip(packed, wide) for shape in pair]
    assert not any(micro.real.any() for micro in empty)


def test_rows_with_short_branches_go_together():
    # Three tokens fit a quarter of the positions: one answer of one token, or none.
    batch = make([12] * 6, [[1, 0], [3, 3], [0, 0], [0, 1], [3, 1], [0, 0]])
    found = list(micro_batches(batch, Shapes(76, 1)))
    assert shapes_of(found) == [(4, 16, 3), (2, 16, 10)]
    assert found[0].packing.tolist() == [[0, 1, 2], [-1] * 3, [5, 6, 7], [-1] * 3]
    assert found[1].packing is None


def math_like(seed, rows=256):
    """Lengths of an update: prompts of 135 tokens on average, budgets N(1500, 512) all used up.

    Answers at four cuts, of 8 forced and 18 sampled tokens in the middle; one in thirty runs on.
    """
    rng = np.random.default_rng(seed)
    prompts = np.repeat(np.minimum(60 + rng.lognormal(4.1, 0.6, rows // 8), 1024).astype(int), 8)
    budgets = rng.normal(1500, 512, 4 * rows)
    budgets = budgets[(budgets >= 256) & (budgets <= 4096)][:rows].astype(int)
    answers = np.minimum(rng.lognormal(np.log(18), 0.5, (rows, 4)), 128).astype(int)
    answers[rng.random((rows, 4)) < 1 / 30] = 128
    empty = empty_batch(rows, prompt=1024, thinking=4096, cuts=4, suffix=8, answer=128)
    lengths = {"prompt_lengths": prompts, "sampled": budgets, "answered": answers}
    return dataclasses.replace(empty, forced=np.full((rows, 4), 8), **lengths)


@pytest.mark.parametrize("config", ["1.5b", "7b", "14b"])
def test_four_fifths_of_the_positions_are_real_in_the_configs_of_the_paper(config):
    train = config_io.load([f"qwen2.5-{config}-math"]).train
    shapes = Shapes(train.micro_batch_tokens, train.length_buckets, multiple=8)
    real = computed = 0
    for seed in range(4):
        batch = math_like(seed)
        real += (batch.prompt_lengths + batch.sampled).sum() + batch.branch_lengths.sum()
        computed += sum(part.positions for part in planned_parts(batch, shapes))
    assert real / computed >= 0.8


@pytest.mark.parametrize(
    ("longest", "widths"),
    [(16, [2, 4, 8, 16]), (10, [2, 3, 5, 10]), (2, [1, 2]), (5120, [640, 1280, 2560, 5120])],
)
def test_the_last_width_is_the_longest(longest, widths):
    assert Shapes(100, 4).widths(longest) == widths
