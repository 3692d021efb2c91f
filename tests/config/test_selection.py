"""Which set a best checkpoint is chosen on."""

import pytest

from bacr_jax.config.selection import selection_set
from config_world import changed

SETS = {"eval": ("math500:a/test.jsonl", "gsm8k:b/test.jsonl")}


@pytest.mark.parametrize(
    ("evaluation", "chosen_on"),
    [
        ({"every": 5}, "train_holdout"),
        # One checkpoint is evaluated: nothing to choose from.
        ({}, None),
        ({"select": "gsm8k"}, "gsm8k:b/test.jsonl"),
        ({"select": "gsm8k:b/test.jsonl", "every": 5}, "gsm8k:b/test.jsonl"),
    ],
)
def test_training_questions_select_unless_a_set_is_named(evaluation, chosen_on):
    assert selection_set(changed(eval=evaluation, data=SETS)) == chosen_on
