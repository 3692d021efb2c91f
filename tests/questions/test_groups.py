"""Difficulty groups from levels and from measured solve rates, and the files of these rates."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bacr_jax.errors import UserError
from bacr_jax.questions.groups import (
    NO_GROUP,
    groups_from_levels,
    groups_from_solve_rate,
    read_solve_rates,
)


def test_the_papers_levels():
    # levels 1-2, 3, 4, 5; 0 and 9 are unknown and go to the hardest group
    levels = np.array([1, 2, 3, 4, 5, 0, 9])
    np.testing.assert_array_equal(groups_from_levels(levels, num_groups=4), [0, 0, 1, 2, 3, 3, 3])


@pytest.mark.parametrize(
    ("num_groups", "groups"),
    [(1, [0, 0, 0, 0, 0]), (2, [0, 0, 0, 1, 1]), (3, [0, 0, 1, 1, 2]), (5, [0, 1, 2, 3, 4])],
)
def test_other_numbers_of_groups(num_groups, groups):
    found = groups_from_levels(np.arange(1, 6), num_groups=num_groups)
    np.testing.assert_array_equal(found, groups)


def test_solve_rates_by_hand():
    # eight samples: a rate on a threshold belongs to the harder group
    rates = np.array([0, 2, 3, 4, 5, 6, 7, 8]) / 8
    np.testing.assert_array_equal(
        groups_from_solve_rate(rates, num_groups=4), [3, 3, 2, 2, 1, 1, 0, 0]
    )


@pytest.mark.parametrize("num_groups", [1, 4])
def test_a_question_without_a_solve_rate_has_no_group(num_groups):
    groups = groups_from_solve_rate(np.array([1.0, np.nan, 0.0]), num_groups=num_groups)
    np.testing.assert_array_equal(groups, [0, NO_GROUP, num_groups - 1])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.integers(1, 8))
def test_higher_rates_are_never_in_harder_groups(rates, num_groups):
    rates = np.sort(np.array(rates))
    groups = groups_from_solve_rate(rates, num_groups=num_groups)
    assert (np.diff(groups) <= 0).all()
    assert groups.min() >= 0
    assert groups.max() < num_groups


LABELS = [
    {"id": name, "avg": rate, "samples": 8}
    for name, rate in zip("edcba", (1.0, 0.75, 0.5, 0.25, 0.0))
]


def read(folder, labels):
    path = folder / "labels.jsonl"
    path.write_text(labels if isinstance(labels, str) else "\n".join(map(json.dumps, labels)))
    return read_solve_rates(path, list("abcde"))


def test_rates_come_in_the_order_of_the_set_and_other_labels_are_not_looked_at(tmp_path):
    extra = {"id": "not in the set", "avg": 1, "samples": 8}
    found = read(tmp_path, [extra, *LABELS])
    np.testing.assert_array_equal(found, [0.0, 0.25, 0.5, 0.75, 1.0])


def test_a_question_without_a_label_has_no_rate_and_may_have_a_second_id(tmp_path):
    np.testing.assert_array_equal(read(tmp_path, LABELS[1:3]), [np.nan, np.nan, 0.5, 0.75, np.nan])
    path = tmp_path / "labels.jsonl"
    found = read_solve_rates(path, ["0-d", "d", "0-x"], ["d", "c", "x"])
    np.testing.assert_array_equal(found, [0.75, 0.75, np.nan])


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        ([*LABELS, LABELS[0]], "row 6: the question id 'e' already has a label"),
        ([{"id": "a", "avg": 1.5, "samples": 8}], "row 1: found avg=1.5"),
        ([{"id": "a", "avg": True, "samples": 8}], "row 1: found avg=true"),
        ([{"id": "a", "avg": float("nan"), "samples": 8}], "row 1: found avg=nan"),
        ([{"id": "a", "avg": 1, "samples": 0}], "row 1: found samples=0"),
        (
            [{"id": "a", "rate": 1}],
            "row 1: a label must have the fields .*but this one has id, rate;",
        ),
        ("[1]", "line 1: the JSON value is a list"),
        ("{", "line 1: .*every line must"),
        ("", "labels.jsonl contains no rows"),
    ],
)
def test_bad_label_files(tmp_path, labels, says):
    with pytest.raises(UserError, match=says):
        read(tmp_path, labels)


def test_a_file_that_can_not_be_read(tmp_path):
    with pytest.raises(UserError, match=r"data\.labels=.*no file or folder .*nowhere"):
        read_solve_rates(tmp_path / "nowhere", ["a"])
    (tmp_path / "latin").write_bytes(b"{\xff")
    with pytest.raises(UserError, match="not valid UTF-8 at byte 1"):
        read_solve_rates(tmp_path / "latin", ["a"])
