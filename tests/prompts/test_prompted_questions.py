"""Question sets and their prompts: what is held out, marked or refused when they are loaded."""

import json

import numpy as np
import pytest

from bacr_jax.config import Config, DataConfig, EvalConfig
from bacr_jax.config.settings import resolve
from bacr_jax.errors import UserError
from bacr_jax.prompts.formats import FORMATS
from bacr_jax.prompts.prompted_questions import load_all_sets
from bacr_jax.types import NO_BUDGET

STYLE = FORMATS["think_answer"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")

    def write(name, rows):
        (folder / name).write_text("\n".join(map(json.dumps, rows)))

    questions = [
        {"problem": f"What is {i} plus two?", "level": 1, "answer": "4"} for i in range(20)
    ]
    # The last question is a copy of the first.
    write("train.jsonl", [*questions, questions[0]])
    copy = {"problem": "What is 3 plus two??", "solution": "\\boxed{4}"}
    write("test.jsonl", [copy, {"problem": "How fast?", "solution": "\\boxed{9}"}])
    write("no_levels.jsonl", [{"question": "Q", "answer": "#### 1"}])
    return folder


@pytest.fixture
def load(folder, qwen):
    def sets(holdout=0, **changes):
        data = {"dir": str(folder), "train": "math:train.jsonl", "eval": ("jsonl:test.jsonl",)}
        config = Config(data=DataConfig(**{**data, **changes}), eval=EvalConfig(holdout=holdout))
        return load_all_sets(resolve(config).task, qwen, STYLE)

    return sets


def test_near_duplicates_of_training_questions_are_marked(load):
    _, _, tests = load()
    assert tests["jsonl:test.jsonl"].set.duplicates.tolist() == [True, False]


def test_held_out_questions_are_in_no_other_set(load):
    train, holdout, _ = load(holdout=2)
    assert len(holdout) == 2 == len(set(holdout.set.questions))
    assert not set(train.set.questions) & set(holdout.set.questions)
    # A held-out question is removed with its copy.
    has_copy = "What is 0 plus two?" in holdout.set.questions
    assert len(train) == 21 - 2 - has_copy


def test_sets_without_levels_are_refused_while_groups_need_them(load):
    with pytest.raises(UserError, match=r"gsm8k:no_levels.jsonl have no levels.*num_groups=1"):
        load(train="gsm8k:no_levels.jsonl")
    train, _, _ = load(train="gsm8k:no_levels.jsonl", num_groups=1)
    assert train.set.groups.tolist() == [0]


def test_a_part_has_the_prompts_of_its_questions(load):
    train, _, _ = load()
    part = train.part(np.array([3, 1]), "two")
    assert part.set.questions == [train.set.questions[3], train.set.questions[1]]
    assert part.set.name == "two" and len(part) == 2
    assert part.longest <= train.longest
    prompts = part.at(np.array([0, 1]), np.array([8, NO_BUDGET]))
    for row, index in enumerate((3, 1)):
        length = prompts.lengths[row]
        assert length == train.prompts.lengths[index]
        assert (prompts.tokens[row, :length] == train.prompts.tokens[index, :length]).all()
