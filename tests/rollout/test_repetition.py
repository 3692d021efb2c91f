"""Traces that repeat themselves at their end."""

import numpy as np
import pytest

from bacr_jax.rollout.repetition import WINDOW, ends_in_repetition

PROMPT = [7, 7, 7]


def repeats(sampled, padding=0):
    tokens = np.array([PROMPT + sampled + [0] * padding])
    return bool(ends_in_repetition(tokens, np.array([len(PROMPT)]), np.array([len(sampled)]))[0])


DIFFERENT = list(range(100, 100 + WINDOW))


@pytest.mark.parametrize(
    ("sampled", "expected"),
    [
        (DIFFERENT, False),
        (DIFFERENT + [5] * WINDOW, True),
        (DIFFERENT + [5] * (WINDOW - 1), False),
        # "The answer is 2.\n", cut within a unit
        (DIFFERENT + [1, 2, 3, 4, 5, 6] * 3, True),
        (DIFFERENT + ([1, 2, 3, 4, 5, 6] * 4)[3:20], True),
        ([1, 2, 3, 4, 5, 6, 7, 8] * 2, True),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9] * 2, False),
        ([5] * WINDOW + [6], False),
        ([5] * (WINDOW - 1), False),
        ([], False),
    ],
)
def test_a_trace_repeats_itself_if_its_last_tokens_do(sampled, expected):
    assert repeats(sampled) is expected
    assert repeats(sampled, padding=40) is expected


def test_rows_are_looked_at_one_by_one():
    rows = [DIFFERENT, [3] * WINDOW, DIFFERENT[::-1], [1, 2] * (WINDOW // 2)]
    tokens = np.array([PROMPT + row for row in rows])
    found = ends_in_repetition(tokens, np.full(4, len(PROMPT)), np.full(4, WINDOW))
    assert found.tolist() == [False, True, False, True]


def test_a_batch_narrower_than_the_window_does_not_repeat_itself():
    tokens = np.full((2, 5), 3)
    assert not ends_in_repetition(tokens, np.array([1, 1]), np.array([4, 4])).any()
