"""Draws follow the distribution they report."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from bacr_jax.rollout import sampling
from bacr_jax.rollout.sampling import row_keys, sample_tokens, sampling_params, truncate

sample = jax.jit(sample_tokens)
LOGITS = np.array([2.0, 1.0, 0.5, 0.0, -1.0, 3.0], np.float32)
ALLOWED = jnp.array([True] * 5 + [False])
ROWS = 20_000


def probabilities(temperature, top_p=1.0):
    """By hand: softmax over allowed tokens, then the nucleus, renormalised."""
    p = np.exp(np.array([2.0, 1.0, 0.5, 0.0, -1.0]) / temperature)
    p /= p.sum()
    keep = (np.cumsum(p) - p) < top_p
    p = np.where(keep, p, 0.0)
    return np.append(p / p.sum(), 0.0)


@pytest.mark.parametrize("numbers", [(1.0,), (0.5,), (1.0, 0.8), (2.0, 0.9), (1.0, 0.01)])
def test_frequencies_and_logprobs_match_the_distribution(numbers):
    keys = jax.random.split(jax.random.key(1), ROWS)
    tokens, logprobs = sample(
        keys,
        jnp.asarray(np.tile(LOGITS, (ROWS, 1))),
        sampling=sampling_params(*numbers),
        allowed_tokens=ALLOWED,
    )
    p = probabilities(*numbers)
    counts = np.bincount(tokens, minlength=6)
    assert (counts[p == 0] == 0).all()
    np.testing.assert_allclose(logprobs, np.log(p[tokens]), atol=1e-4)
    if (p > 0).sum() > 1:
        assert stats.chisquare(counts[p > 0], ROWS * p[p > 0]).pvalue > 1e-3


def test_temperature_zero_is_certain_of_the_best_legal_token():
    keys = jax.random.split(jax.random.key(0), 3)
    tokens, logprobs = sample(
        keys,
        jnp.asarray(np.tile(LOGITS, (3, 1))),
        sampling=sampling_params(0.0),
        allowed_tokens=ALLOWED,
    )
    np.testing.assert_array_equal(tokens, [0, 0, 0])
    np.testing.assert_array_equal(logprobs, [0, 0, 0])


def test_a_nucleus_always_holds_the_best_token_and_breaks_ties_by_id():
    scores = jnp.zeros((1, 4))
    kept = np.asarray(jax.jit(truncate)(scores, sampling_params(1.0, 0.3))) > -1e29
    np.testing.assert_array_equal(kept, [[True, True, False, False]])


def sorted_truncation(scores, top_p):
    """The same by a stable sort, in fp64: what is kept is a prefix of the sorted row."""
    kept = np.zeros(scores.shape, bool)
    for row, out in zip(scores.astype(np.float64), kept):
        order = np.argsort(-row, kind="stable")
        p = np.exp(row[order] - row.max())
        p /= p.sum()
        inside = (np.cumsum(p) - p) < top_p
        out[order[: max(inside.sum(), 1)]] = True
    return kept


def test_each_stream_has_its_own_temperature_and_top_p():
    numbers = [(1.0, 0.8), (2.0, 2.0), (0.0, 1.0)]
    keys = jax.random.split(jax.random.key(1), 60)
    streams = jnp.arange(60) % 3
    logits = jnp.asarray(np.tile(LOGITS, (60, 1)))
    temperatures, top_ps = zip(*numbers)
    together = sampling_params(temperatures, top_ps).for_rows(streams)
    tokens, logprobs = sample(keys, logits, sampling=together, allowed_tokens=ALLOWED)
    for stream, settings in enumerate(numbers):
        alone = sample(keys, logits, sampling=sampling_params(*settings), allowed_tokens=ALLOWED)
        rows = slice(stream, None, 3)
        np.testing.assert_array_equal(tokens[rows], alone[0][rows])
        np.testing.assert_allclose(logprobs[rows], alone[1][rows], atol=1e-6)


@pytest.mark.parametrize("vocab", [7, 256, 700])
@pytest.mark.parametrize("top_p", [0.9, 0.5, 0.999, 1e-6])
def test_what_is_kept_is_a_prefix_of_the_sorted_row(vocab, top_p):
    rng = np.random.default_rng(vocab)
    scores = rng.normal(0, 3, (9, vocab)).astype(np.float32)
    scores[3:6] = np.round(scores[3:6])  # many ties
    scores[6] = -1e30
    scores[6, [1, 4]] = 2.0, 0.0  # all but two are forbidden
    scores[7] = 0.0
    kept = np.asarray(jax.jit(truncate)(scores, sampling_params(1.0, top_p))) > -1e29
    want = sorted_truncation(scores, top_p) & (scores > -1e29)
    np.testing.assert_array_equal(kept, want)


def test_the_bits_of_numbers_keep_their_order():
    x = np.array([-np.inf, -1e30, -2.5, -1e-30, 0.0, 1e-30, 1.0, 3e38], np.float32)
    order = np.asarray(sampling._order(jnp.asarray(x)))
    assert (np.diff(order) > 0).all()


def test_the_tokens_of_a_seed_do_not_depend_on_the_slot_or_the_version():
    drawn = {}
    for rows in ([0, 1, 2, 3], [3, 2, 1, 0]):
        ids = sampling.RowIds(jnp.array(rows), jnp.zeros(4, int))
        keys = row_keys(jax.random.key(7), ids, jnp.zeros(4, int), 0)
        tokens, _ = sample(
            keys,
            jnp.zeros((4, 32)),
            sampling=sampling_params(1.0),
            allowed_tokens=jnp.ones(32, bool),
        )
        drawn[rows[0]] = dict(zip(rows, tokens.tolist()))
    # Pinned, because results of earlier runs contain these draws.
    assert drawn[0] == drawn[3] == {0: 14, 1: 12, 2: 27, 3: 3}


def test_keys_depend_on_row_position_and_origin_alone():
    key = jax.random.key(0)
    ids = lambda rows: sampling.RowIds(jnp.array(rows), jnp.zeros(len(rows), int))
    data = lambda rows, at, origin: jax.random.key_data(
        row_keys(key, ids(rows), jnp.array(at), origin)
    )
    base = data([1, 2], [5, 5], 0)
    np.testing.assert_array_equal(base[1], data([2], [5], 0)[0])
    for other in (data([1], [6], 0), data([3], [5], 0), data([1], [5], 1)):
        assert (base[0] != other[0]).any()


def test_a_stream_has_the_keys_of_its_own_key_at_every_origin():
    keys = jax.vmap(jax.random.key)(np.arange(3))

    def data(key, stream, origin):
        ids = sampling.RowIds(jnp.array([7]), jnp.array([stream]))
        return np.asarray(jax.random.key_data(row_keys(key, ids, jnp.array([5]), origin)))

    for stream in range(3):
        for origin in (0, 1, 2):
            np.testing.assert_array_equal(data(keys, stream, origin), data(keys[stream], 0, origin))
    assert (data(keys, 1, 0) != data(keys, 1, 1)).any()
