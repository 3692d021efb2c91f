"""A grace window: to the next line break after the budget, to the token, and nowhere else."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bacr_jax.types import CLOSED_BY_BUDGET, CLOSED_BY_TAG, NO_BUDGET
from rollout_world import CLOSE, EOS, LEGAL, VOCAB, make_prompts, make_rules, no_cuts, quarters

BREAKS = np.isin(np.arange(VOCAB), [7, 12])
RULES = dataclasses.replace(make_rules(), line_breaks=BREAKS)
ROWS = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 12)), min_size=1, max_size=8)


@pytest.fixture(scope="module")
def roll(world):
    def roll(prompts, budgets, grace, **options):
        spec = world.spec(grace=grace)
        options = {"temperature": 4.0, **options}
        return world.roll(prompts, budgets, spec=spec, rules=RULES, **options)

    return roll


@pytest.mark.slow
@settings(max_examples=4)
@given(ROWS, st.integers(0, 10_000))
def test_a_trace_ends_at_the_first_line_break_from_its_budget_on(roll, rows, key):
    lengths, budgets = map(np.array, zip(*rows))
    prompts = make_prompts(lengths, 5)
    found = roll(prompts, budgets, 3, key=key)
    plain = roll(prompts, budgets, 0, key=key)
    t, p = found.trunks, plain.trunks
    for i, b in enumerate(budgets):
        text = t.tokens[i, lengths[i] : lengths[i] + t.sampled[i]]
        # Up to the budget it says what it says without grace.
        np.testing.assert_array_equal(text[:b], p.tokens[i, lengths[i] :][: p.sampled[i]])
        ends = np.flatnonzero(np.isin(text, [CLOSE, EOS]))
        if t.close[i] != CLOSED_BY_BUDGET:
            assert list(ends) == [t.sampled[i] - 1] and t.thinking[i] == t.sampled[i] - 1
            assert not BREAKS[text[max(b - 1, 0) : -1]].any()
            assert t.thinking[i] < b + 3
            continue
        assert not len(ends) and t.thinking[i] == t.sampled[i]
        breaks = [n for n in range(b, b + 3) if n and n <= len(text) and BREAKS[text[n - 1]]]
        expected = 0 if b == 0 else min([*breaks, b + 3])
        assert t.thinking[i] == expected
        # The last cut is the end of the trace, wherever that is.
        assert found.branches.context[i, -1] == lengths[i] + expected
    assert found.counters["excess_mean"] == np.maximum(t.thinking - budgets, 0).mean() <= 3
    # Cuts before the budget hang where they hung, and say the same.
    early = quarters(budgets) < np.minimum(p.thinking, budgets)[:, None]
    for name in ("tokens", "context", "sampled", "finished"):
        here, there = getattr(found.branches, name), getattr(plain.branches, name)
        np.testing.assert_array_equal(here[early], there[early])


def test_some_use_all_of_the_window_and_some_end_in_it(roll):
    budgets = np.full(64, 4)
    t = roll(make_prompts([3] * 64, 5), budgets, 3, cuts=no_cuts(64), temperature=50.0).trunks
    forced = t.thinking[t.close == CLOSED_BY_BUDGET]
    assert set(forced) == {4, 5, 6, 7}
    assert (t.thinking[t.close == CLOSED_BY_TAG] > 4).any()


def test_without_a_budget_the_limit_is_the_one_given_and_nothing_is_told(world):
    prompts = make_prompts([3] * 16, 5)
    limits = np.full(16, 6)
    none, plain = (
        world.roll(
            prompts, told, cuts=limits[:, None], temperature=0.0, limits=limits, phi_of=phi_of
        )
        for told, phi_of in ((np.full(16, NO_BUDGET), world.phi_of), (limits, None))
    )
    np.testing.assert_array_equal(none.trunks.thinking, plain.trunks.thinking)
    np.testing.assert_array_equal(none.trunks.tokens, plain.trunks.tokens)
    np.testing.assert_array_equal(none.branches.tokens, plain.branches.tokens)
    assert none.trunks.thinking.max() == 6


def test_caches_that_grow_have_room_for_the_grace_window(world):
    """Without end tokens and line breaks, every trace uses all of its window.

    Caches have 10 or 20 positions. Prompts and budgets fit into 10, but not with three more tokens.
    """
    prompts, budgets = make_prompts([3, 5, 3, 2], 5), np.array([6, 4, 6, 6])
    allowed = LEGAL & ~BREAKS & ~np.isin(np.arange(VOCAB), [CLOSE, EOS])
    rules = dataclasses.replace(RULES, allowed_tokens=allowed)
    options = {"rules": rules, "cuts": no_cuts(4)}
    growing = world.roll(prompts, budgets, spec=world.tight(grace=3), **options).trunks
    whole = world.roll(prompts, budgets, spec=world.spec(grace=3), **options).trunks
    np.testing.assert_array_equal(growing.thinking, budgets + 3)
    np.testing.assert_array_equal(growing.tokens, whole.tokens)
    np.testing.assert_allclose(growing.logprobs, whole.logprobs, atol=1e-5)
