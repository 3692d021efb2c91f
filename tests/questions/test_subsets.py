"""Subsets of a folder that hold the same questions are not read as one set."""

import json
from pathlib import Path

import pytest

from bacr_jax.config import Config
from bacr_jax.errors import UserError
from bacr_jax.questions.loaders import load_questions
from bacr_jax.questions.subsets import check_subsets


def rows(first, last):
    return [{"question": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(first, last)]


def check(**files):
    check_subsets({Path(name): found for name, found in files.items()}, "question", "gsm8k:x")


SAME = [
    ({"main/train.parquet": rows(0, 9), "socratic/train.parquet": rows(0, 9)}, "main"),
    ({"d/main/train.jsonl": rows(0, 9), "d/socratic/train.jsonl": rows(0, 9)}, "d/main"),
    ({"main_train.jsonl": rows(0, 9), "socratic_train.jsonl": rows(0, 9)}, "main_train.jsonl"),
    ({"train.jsonl": rows(0, 9), "train.csv": rows(0, 9)}, "train.csv"),
    ({"train.jsonl": rows(0, 9), "train (1).jsonl": rows(0, 9)}, "train (1).jsonl"),
    # A part of the other, and shards of both.
    ({"all/train.jsonl": rows(0, 99), "hard/train.jsonl": rows(40, 50)}, "all"),
    (
        {
            "a/train-00000-of-00002.jsonl": rows(0, 9),
            "a/train-00001-of-00002.jsonl": rows(9, 18),
            "b/train-00000-of-00001.jsonl": rows(0, 18),
        },
        "a",
    ),
    # One row a file.
    ({f"{of}/train/{i}.json": rows(i, i + 1) for of in "ab" for i in range(4)}, "a"),
]


@pytest.mark.parametrize(("files", "choice"), SAME)
def test_the_same_questions_in_two_subsets_are_refused_with_a_choice(files, choice):
    with pytest.raises(UserError, match=r"^gsm8k:x: .* contain the same questions") as caught:
        check(**dict(sorted(files.items())))
    assert str(caught.value).endswith(f"choose one of the two, for instance gsm8k:x/{choice}")


OTHERS = [
    {"train.jsonl": rows(0, 9) * 2},
    {"algebra/train.jsonl": rows(0, 9), "geometry/train.jsonl": rows(9, 18)},
    # Few in common, as in MATH.
    {"algebra/train.jsonl": rows(0, 30), "geometry/train.jsonl": rows(28, 60)},
    # Several answers to a question, spread over the shards of one table.
    {"train-00000-of-00002.jsonl": rows(0, 9), "train-00001-of-00002.jsonl": rows(0, 9)},
    {f"train/{i}.json": rows(0, 1) for i in range(4)},
    {"a.jsonl": [{"question": ""}, {"question": None}, {}], "b.jsonl": [{"question": " "}, {}, {}]},
]


@pytest.mark.parametrize("files", OTHERS)
def test_other_questions_and_copies_within_a_table_are_read(files):
    check(**files)


def test_a_set_of_two_subsets_is_refused_and_each_of_them_is_read(tmp_path):
    for name in ("main", "socratic"):
        (tmp_path / "gsm8k" / name).mkdir(parents=True)
        text = "".join(json.dumps(row) + "\n" for row in rows(0, 9))
        (tmp_path / "gsm8k" / name / "train.jsonl").write_text(text)
    config = Config().data
    data = type(config)(dir=str(tmp_path), num_groups=1)
    with pytest.raises(UserError, match="choose one of the two, for instance gsm8k:gsm8k/main"):
        load_questions("gsm8k:gsm8k", data, 0, "train")
    assert len(load_questions("gsm8k:gsm8k/socratic", data, 0, "train")) == 9
