"""Which problems there are, and which of them are held out for good."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bacr_jax.questions import ledger
from ledger_world import operations


def splitmix64(seed):
    """First output of the generator of that name, in whole numbers."""
    mask = 2**64 - 1
    x = (seed + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def test_the_hash_is_the_published_one():
    # a published output of splitmix64 for this seed
    assert splitmix64(1234567) == 6457827717110365317


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), split=st.sampled_from(["train", "test"]))
def test_questions_are_well_formed_and_answers_right(seed, split):
    for problem in ledger.make_problems(seed, 50, max_operand=3, split=split):
        start, wanted = operations(problem.question)
        assert len(problem.question) == 1 + 2 * problem.level
        assert "".join(label for label, _ in wanted) == "abcde"[: problem.level]
        assert {int(n) for _, n in wanted} <= {1, 2, 3}
        assert int(problem.answer) == (start + sum(int(n) for _, n in wanted)) % 10


def test_a_seed_always_gives_the_same_set():
    make = lambda seed: ledger.make_problems(seed, 64, max_operand=3)
    assert make(3) == make(3)
    assert make(3) != make(4)


@pytest.mark.parametrize("max_operand", [1, 3, 9])
def test_no_seed_trains_on_what_another_is_tested_on(max_operand):
    make = lambda seed, split: {
        p.question for p in ledger.make_problems(seed, 5000, max_operand=max_operand, split=split)
    }
    trained = make(0, "train") | make(1, "train")
    tested = make(0, "test") | make(2, "test")
    assert trained.isdisjoint(tested)
    assert {len(q) for q in tested} == {len(q) for q in trained} == {3, 5, 7, 9, 11}


@pytest.mark.parametrize("level", range(1, 6))
def test_a_fifth_of_every_level_is_held_out(level):
    train = ledger.split_codes(level, 3, "train")
    test = ledger.split_codes(level, 3, "test")
    total = 10 * 3**level
    assert len(test) == total // 5
    assert sorted([*train, *test]) == list(range(total))


@pytest.mark.parametrize("level", [1, 2, 3])
def test_the_split_is_the_documented_one(level):
    # Fixed for good: a changed split would train new runs on what old ones were tested on.
    codes = sorted(range(10 * 3**level), key=lambda code: splitmix64(code + (level << 32)))
    held_out = ledger.split_codes(level, 3, "test").tolist()
    assert held_out == codes[: len(codes) // 5]


def test_codes_count_the_start_digit_and_the_operands_in_mixed_radix():
    # 7 + 10 * (2 + 3 * 1): start 7, operands 3 and 2
    assert ledger.problem_of(57, 2, 3) == ledger.Problem("7a3b2", "2", 2)


def test_sets_are_even_over_levels_and_over_problems():
    made = ledger.make_problems(0, 2003, max_operand=3, split="test")
    levels = np.bincount([p.level for p in made])[1:]
    np.testing.assert_array_equal(levels, [401, 401, 401, 400, 400])
    easy = [p.question for p in made if p.level == 1]
    counts = {easy.count(question) for question in set(easy)}
    assert len(set(easy)) == 6
    assert counts == {66, 67}


def test_levels_can_be_chosen():
    made = ledger.make_problems(0, 30, max_operand=3, levels=(2, 4))
    assert [sum(p.level == level for p in made) for level in range(1, 6)] == [0, 15, 0, 15, 0]


def test_all_held_out_digits_are_not_alike():
    # The hash must not hold out the same start digits on every level.
    starts = [frozenset(ledger.split_codes(n, 3, "test")[:6] % 10) for n in range(1, 6)]
    assert len(set(starts)) > 1
