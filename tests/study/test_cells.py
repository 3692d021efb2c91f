"""Cells are read as they were written, and what would give wrong numbers is refused in one line."""

import dataclasses
import json

import numpy as np
import pytest

from bacr_jax.errors import UserError
from bacr_study.cells import correct_digits, read_cell, read_cells, write_cell
from bacr_study.spec import Arm, Variant
from cells_world import main_study, make_cell, write_cells

STUDY = main_study(arms=(Arm("anytime", "AnytimeReasoner"), Arm("grpo", "GRPO")), seeds=(0, 1))


@pytest.fixture
def cell():
    return make_cell(STUDY, "ledger", Variant("grpo"), 0, problems=12, steps=2)


def refused(folder, cell, **changes):
    path = write_cell(folder, dataclasses.replace(cell, **changes))
    with pytest.raises(UserError) as found:
        read_cell(path)
    assert "delete the file and run the study again" in str(found.value)
    return str(found.value)


def changed_entry(cell, **changes):
    entry = {**cell.sets["test"]["greedy"]["8"], **changes}
    return {"test": {"greedy": {"8": entry}}}


def test_a_cell_is_read_as_it_was_written(tmp_path, cell):
    assert read_cell(write_cell(tmp_path, cell)) == cell


def test_counts_of_right_samples_are_digits_of_base_36():
    assert correct_digits(np.array([0, 4, 10, 35])) == "04az"


def test_rates_are_shares_of_the_samples(cell):
    rates = cell.rates("test", "greedy", "8")
    assert rates.mean() == pytest.approx(cell.sets["test"]["greedy"]["8"]["accuracy"])
    assert set((4 * rates).tolist()) <= {0.0, 1.0, 2.0, 3.0, 4.0}


def test_an_id_that_says_something_else_is_refused(tmp_path, cell):
    assert "the id is 'ledger.grpo.0'" in refused(tmp_path, cell, seed=3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"accuracy": 0.9, "correct": "0" * 12}, "found a mean of 0.0000, but the accuracy is 0.9"),
        ({"correct": "9" * 12}, "a problem has more right samples than samples"),
        ({"correct": "11"}, "found 2 problems, but levels_of has 12"),
        ({"accuracy": 41.0}, "found 41.0, which is not between 0 and 1"),
        ({"mean_total_tokens": None}, "mean_total_tokens: found None, which is not a number"),
        ({"forced_share": "half"}, "which is not a number"),
    ],
)
def test_an_entry_that_contradicts_itself_is_refused(tmp_path, cell, changes, message):
    assert message in refused(tmp_path, cell, sets=changed_entry(cell, **changes))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "does not contain the results of a run"),
        ("[]", "the JSON value is a list instead of an object"),
        ("{}", "does not contain the results of a run .* missing .* 'id'"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, text, message):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_cell(path)


def test_fields_of_another_form_are_refused(tmp_path, cell):
    path = write_cell(tmp_path, cell)
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "sets": [1]}))
    with pytest.raises(UserError, match="the file does not contain the results"):
        read_cell(path)


class TestReadCells:
    def test_cells_that_are_there_are_read_and_those_of_other_studies_are_not(self, tmp_path):
        write_cells(tmp_path, STUDY, problems=6, steps=1, skip=("ledger.grpo.1",))
        (tmp_path / "cells" / "other.json").write_text("{}")
        found = list(read_cells(tmp_path, STUDY))
        assert found == [name for name in STUDY.cell_ids() if name != "ledger.grpo.1"]
        assert found[:2] == ["tradeoff.anytime.0", "tradeoff.anytime.1"]

    def test_no_cell_at_all_is_refused(self, tmp_path):
        with pytest.raises(UserError, match="no run of the study main is finished"):
            read_cells(tmp_path, STUDY)

    @pytest.mark.parametrize("field", ["problems_digest", "levels_of"])
    def test_cells_of_other_problems_are_refused(self, tmp_path, cell, field):
        write_cells(tmp_path, STUDY, problems=12, steps=2)
        other = {**getattr(cell, field), "test": "1" * 12}
        write_cell(tmp_path, dataclasses.replace(cell, **{field: other}))
        with pytest.raises(
            UserError, match="were evaluated on different problems of test"
        ) as found:
            read_cells(tmp_path, STUDY)
        assert "\n" not in str(found.value)

    def test_cells_of_another_size_are_refused(self, tmp_path, cell):
        write_cell(tmp_path, dataclasses.replace(cell, study_size="gpu"))
        with pytest.raises(
            UserError,
            match="belongs to the size 'gpu' of the study, but the size 'cpu' was requested",
        ):
            read_cells(tmp_path, STUDY)
