"""Sets by their names in a config, and the ledger's."""

import numpy as np
import pytest

from bacr_jax.config import DataConfig, LedgerConfig
from bacr_jax.errors import UserError
from bacr_jax.questions import loaders, math_sets
from bacr_jax.questions.loaders import load_questions


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

    def test_a_path_is_refused(self):
        with pytest.raises(UserError, match="generated and not read"):
            load_questions("ledger:/some/file", self.CONFIG, 0, "train")


class TestUnknownNames:
    @pytest.mark.parametrize(("split", "key"), [("train", "data.train"), ("test", "data.eval")])
    def test_name_the_key_and_the_nearest_name(self, split, key):
        with pytest.raises(UserError, match=f"{key}: 'legder:x' does not begin .*'ledger'"):
            load_questions("legder:x", DataConfig(), 0, split)

    def test_a_name_far_from_all_still_gets_a_suggestion(self):
        with pytest.raises(UserError, match="most similar known name is '(.*)'") as error:
            load_questions("zzz", DataConfig(), 0, "train")
        known = (*loaders._PACKAGES, *math_sets.LAYOUTS, *math_sets.TABLES)
        assert str(error.value).split("'")[-2] in known
