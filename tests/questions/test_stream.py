"""Every question of a group once before any again, from any place, after any interruption."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("grain", reason="Grain is not installed")

from bacr_jax.questions.stream import QuestionStream

OF = np.array([0, 1, 0, 3, 1, 0, 0, 3, 0, 1])


@functools.cache
def stream(seed=0, process=0):
    """A stream; another process makes its own."""
    return QuestionStream(OF, num_groups=4, seed=seed)


def run(of, asked, cursors=None):
    cursors = np.zeros(4, np.int32) if cursors is None else cursors
    found, cursors = of.draw(cursors, np.asarray(asked))
    return found.tolist(), cursors


@settings(max_examples=40)
@given(st.lists(st.sampled_from([0, 1, 3]), max_size=40), st.integers(0, 3))
def test_questions_are_of_the_group_asked_for_and_passes_are_complete(asked, seed):
    found, cursors = run(stream(seed), asked)
    assert OF[found].tolist() == asked
    for group in (0, 1, 3):
        members = set(np.flatnonzero(group == OF).tolist())
        mine = [row for row in found if OF[row] == group]
        assert cursors[group] == len(mine)
        for start in range(0, len(mine), len(members)):
            one_pass = mine[start : start + len(members)]
            assert len(set(one_pass)) == len(one_pass)


@settings(max_examples=12)
@given(st.lists(st.sampled_from([0, 1, 3]), max_size=30), st.integers(0, 30))
def test_cursors_are_all_that_a_resumed_stream_needs(asked, stop):
    whole, end = run(stream(), asked)
    first, cursors = run(stream(), asked[:stop])
    second, resumed_end = run(stream(process=1), asked[stop:], np.array(cursors.tolist()))
    assert first + second == whole
    np.testing.assert_array_equal(end, resumed_end)


def test_drawing_changes_no_argument():
    of = stream()
    cursors = np.zeros(4, np.int32)
    of.draw(cursors, [0, 0])
    assert cursors.tolist() == [0, 0, 0, 0]


def test_passes_and_seeds_have_orders_of_their_own():
    many = QuestionStream(np.zeros(50, int), num_groups=1, seed=0)
    other = QuestionStream(np.zeros(50, int), num_groups=1, seed=1)
    found, _ = run(many, [0] * 100)
    assert found[:50] != found[50:]
    assert found[:50] != sorted(found[:50])
    assert run(other, [0] * 50)[0] != found[:50]
