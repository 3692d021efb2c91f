"""Measured difficulty is the mean of a problem's samples, in a file that data.labels reads."""

import json

import numpy as np
import pytest

from bacr_jax.data.groups import groups_from_solve_rate, read_solve_rates
from bacr_jax.errors import UserError
from bacr_jax.evaluation.labels import write_labels
from evaluation_world import drawn

# 4, 3, 2, 1 and 0 of 4 samples right
ROWS = [["4"] * right + ["1"] * (4 - right) for right in (4, 3, 2, 1, 0)]


def test_each_problem_gets_the_share_of_its_samples_that_are_right(tmp_path):
    counts = write_labels(tmp_path / "labels.jsonl", drawn(ROWS))
    lines = [json.loads(line) for line in (tmp_path / "labels.jsonl").read_text().splitlines()]
    assert lines[1] == {"id": "p1", "avg": 0.75, "samples": 4}
    assert [line["avg"] for line in lines] == [1.0, 0.75, 0.5, 0.25, 0.0]
    # A rate on a threshold belongs to the harder group.
    assert counts == {
        "above .75": 1,
        "above .5, up to .75": 1,
        "above .25, up to .5": 1,
        "up to .25": 2,
    }


def test_what_is_written_is_what_data_groups_reads(tmp_path):
    counts = write_labels(tmp_path / "labels.jsonl", drawn(ROWS))
    rates = read_solve_rates(tmp_path / "labels.jsonl", ["p4", "p0"])
    np.testing.assert_array_equal(rates, [0.0, 1.0])
    every = read_solve_rates(tmp_path / "labels.jsonl", [f"p{i}" for i in range(5)])
    sizes = np.bincount(groups_from_solve_rate(every), minlength=4)
    assert list(counts.values()) == sizes.tolist()


def test_a_file_that_can_not_be_written_is_one_line(tmp_path):
    with pytest.raises(UserError, match="nowhere/labels.jsonl: can't be written"):
        write_labels(tmp_path / "nowhere" / "labels.jsonl", drawn(ROWS))
