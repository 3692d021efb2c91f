import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bacr_jax.config import DataConfig, LedgerConfig
from bacr_jax.data import questions
from bacr_jax.data.questions import (
    QuestionSet,
    groups_from_levels,
    groups_from_solve_rate,
    load_questions,
)
from bacr_jax.errors import UserError


def small_set():
    return QuestionSet(
        name="s",
        questions=["q0", "q1", "q2"],
        answers=["0", "1", "2"],
        levels=np.array([1, 3, 5], np.int32),
        groups=np.array([0, 1, 3], np.int32),
        ids=["a", "b", "c"],
    )


class TestGroups:
    def test_the_papers_levels(self):
        # levels 1-2, 3, 4, 5; 0 and 9 are unknown and go to the hardest group
        levels = np.array([1, 2, 3, 4, 5, 0, 9])
        np.testing.assert_array_equal(groups_from_levels(levels), [0, 0, 1, 2, 3, 3, 3])

    @pytest.mark.parametrize(
        ("num_groups", "groups"),
        [(1, [0, 0, 0, 0, 0]), (2, [0, 0, 0, 1, 1]), (3, [0, 0, 1, 1, 2]), (5, [0, 1, 2, 3, 4])],
    )
    def test_other_numbers_of_groups(self, num_groups, groups):
        found = groups_from_levels(np.arange(1, 6), num_groups=num_groups)
        np.testing.assert_array_equal(found, groups)

    @pytest.mark.parametrize("num_groups", [0, 6])
    def test_more_groups_than_levels(self, num_groups):
        with pytest.raises(UserError, match=r"1\.\.5"):
            groups_from_levels(np.array([1]), num_groups=num_groups)

    def test_solve_rates_by_hand(self):
        # eight samples: a rate on a threshold belongs to the harder group
        rates = np.array([0, 2, 3, 4, 5, 6, 7, 8]) / 8
        np.testing.assert_array_equal(groups_from_solve_rate(rates), [3, 3, 2, 2, 1, 1, 0, 0])

    @given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.integers(1, 8))
    def test_higher_rates_are_never_in_harder_groups(self, rates, num_groups):
        rates = np.sort(np.array(rates))
        groups = groups_from_solve_rate(rates, num_groups=num_groups)
        assert (np.diff(groups) <= 0).all()
        assert groups.min() >= 0
        assert groups.max() < num_groups

    @pytest.mark.parametrize("rate", [-0.1, 1.5, float("nan")])
    def test_a_rate_that_is_none_by_its_row(self, rate):
        with pytest.raises(UserError, match="solve rate 1"):
            groups_from_solve_rate(np.array([0.5, rate]))

    def test_no_group(self):
        with pytest.raises(UserError, match="num_groups"):
            groups_from_solve_rate(np.array([0.5]), num_groups=0)


class TestQuestionSet:
    def test_rows_stay_together(self):
        taken = small_set().take([2, 0])
        assert (taken.questions, taken.answers, taken.ids) == (["q2", "q0"], ["2", "0"], ["c", "a"])
        assert (taken.levels.tolist(), taken.groups.tolist()) == ([5, 1], [3, 0])

    def test_rows_can_be_left_out(self):
        assert small_set().without(np.array([1])).ids == ["a", "c"]
        assert small_set().without(np.array([], np.int64)).ids == ["a", "b", "c"]

    def test_fields_of_different_lengths_are_refused(self):
        with pytest.raises(ValueError, match="different lengths"):
            dataclasses.replace(small_set(), answers=["0"])


class TestLedger:
    CONFIG = DataConfig(ledger=LedgerConfig(train_size=100))

    def test_train_and_test_sets(self):
        train = load_questions("ledger", self.CONFIG, 0, "train")
        test = load_questions("ledger", self.CONFIG, 0, "test")
        assert (len(train), len(test)) == (100, 2000)
        assert set(train.questions).isdisjoint(test.questions)
        assert len(set(test.ids)) == 2000
        np.testing.assert_array_equal(np.bincount(test.levels), [0, 400, 400, 400, 400, 400])
        np.testing.assert_array_equal(np.bincount(train.groups), [40, 20, 20, 20])
        for question, answer in zip(test.questions, test.answers):
            assert answer == str((int(question[0]) + sum(map(int, question[2::2]))) % 10)

    def test_seeds_make_different_sets(self):
        first, second = (load_questions("ledger", self.CONFIG, s, "train") for s in (0, 1))
        assert first.questions != second.questions

    @pytest.mark.parametrize(
        ("spec", "change", "what"),
        [
            ("ledger:/some/file", {}, "made, not read"),
            ("ledger", {"groups": "solve_rate"}, "write level"),
            ("ledger", {"ledger": LedgerConfig(train_size=0)}, "train_size"),
            ("ledger", {"ledger": LedgerConfig(max_operand=12)}, "max_operand"),
            ("ledger", {"num_groups": 7}, "num_groups"),
        ],
    )
    def test_settings_it_can_not_follow(self, spec, change, what):
        config = dataclasses.replace(self.CONFIG, **change)
        with pytest.raises(UserError, match=what):
            load_questions(spec, config, 0, "train")


class TestUnknownNames:
    @pytest.mark.parametrize(("split", "key"), [("train", "data.train"), ("test", "data.eval")])
    def test_name_the_key_and_the_nearest_name(self, split, key):
        with pytest.raises(UserError, match=f"{key}: found 'legder:x'.*'ledger'"):
            load_questions("legder:x", DataConfig(), 0, split)

    def test_a_name_far_from_all_still_gets_a_suggestion(self):
        with pytest.raises(UserError, match="nearest known name is '(.*)'") as error:
            load_questions("zzz", DataConfig(), 0, "train")
        assert str(error.value).split("'")[-2] in questions.LOADERS

    def test_every_known_name_has_a_loader(self):
        assert all(callable(loader) for loader in questions.LOADERS.values())
