"""One draw, and what it ends."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.rollout import sampling_params
from bacr_jax.rollout.decode import StepResult, count_tokens, draw_tokens
from bacr_jax.rollout.sampling import SamplingInputs
from bacr_jax.types import pytree
from rollout_world import CLOSE, EOS, VOCAB, make_rules, two_tokens

ALL = np.ones(VOCAB, bool)


@jax.jit
def draw_closing(keys, logits, active, matched, rules):
    draws = SamplingInputs(keys[0], rules, sampling_params(1.0))
    return draw_tokens(keys, logits, active, matched, rules.think_close, draws, jnp.zeros(3, int))


def draw(tokens, *, active=(True, True, True), matched=(0, 0, 0), rules=None, logits=None):
    """Draws exactly the three `tokens`, the only likely ones."""
    return draw_closing(
        jax.random.split(jax.random.key(0), 3),
        100 * np.eye(VOCAB, dtype=np.float32)[tokens] if logits is None else logits,
        np.array(active),
        np.array(matched),
        rules or make_rules(allowed_tokens=ALL),
    )


def test_a_token_closes_by_its_tag_by_the_turn_or_not_at_all():
    drawn = draw([CLOSE, EOS, 7])
    np.testing.assert_array_equal(drawn.token, [CLOSE, EOS, 7])
    np.testing.assert_array_equal(drawn.by_tag, [True, False, False])
    np.testing.assert_array_equal(drawn.by_eos, [False, True, False])
    np.testing.assert_array_equal(drawn.matched, [1, 0, 0])
    np.testing.assert_allclose(drawn.logprob, 0, atol=1e-6)


def test_the_tag_wins_where_its_last_token_ends_the_turn_too():
    rules = make_rules(two_tokens([6], [EOS]), allowed_tokens=ALL)
    drawn = draw([EOS, EOS, 7], matched=[1, 0, 1], rules=rules)
    np.testing.assert_array_equal(drawn.by_tag, [True, False, False])
    np.testing.assert_array_equal(drawn.by_eos, [False, True, False])


def test_a_row_that_is_not_due_keeps_its_state_and_ends_nothing():
    drawn = draw([CLOSE, EOS, 7], active=[False] * 3, matched=[0, 1, 0])
    assert not (drawn.live | drawn.broken | drawn.by_tag | drawn.by_eos).any()
    np.testing.assert_array_equal(drawn.matched, [0, 1, 0])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_break_the_row_and_no_other(bad):
    logits = np.zeros((3, VOCAB), np.float32)
    logits[1:, 9] = bad
    drawn = draw([0] * 3, logits=logits, active=[True, True, False])
    np.testing.assert_array_equal(drawn.broken, [False, True, False])
    np.testing.assert_array_equal(drawn.live, [True, False, False])


@pytree
class Counters:
    sampled: object
    matched: object
    ended: object
    broken: object


def test_a_row_ends_by_tag_turn_limit_or_broken_logits():
    rows = SimpleNamespace(tag=0, turn=1, limit=2, broken=3, thinking=4, before=5)
    hot = lambda *at: jnp.isin(jnp.arange(6), jnp.array(at))
    drawn = StepResult(
        token=jnp.zeros(6, int),
        logprob=jnp.zeros(6),
        live=~hot(rows.broken, rows.before),
        broken=hot(rows.broken),
        matched=jnp.arange(6),
        by_tag=hot(rows.tag),
        by_eos=hot(rows.turn),
    )
    limits = jnp.full(6, 9).at[rows.limit].set(4)
    before = Counters(jnp.full(6, 3), jnp.zeros(6, int), hot(rows.before), hot())
    after = count_tokens(before, drawn, limits)
    np.testing.assert_array_equal(after.sampled, [4, 4, 4, 3, 4, 3])
    np.testing.assert_array_equal(after.ended, [True, True, True, True, False, True])
    np.testing.assert_array_equal(after.broken, hot(rows.broken))
    np.testing.assert_array_equal(after.matched, np.arange(6))
