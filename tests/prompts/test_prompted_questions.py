"""Question sets and their prompts: what is held out, marked or refused when they are loaded."""

import json

import numpy as np
import pytest

from bacr_jax.config import ConditioningConfig, Config, DataConfig, EvalConfig
from bacr_jax.config.settings import resolve
from bacr_jax.errors import UserError
from bacr_jax.prompts.formats import FORMATS, format_for
from bacr_jax.prompts.prompted_questions import load_all_sets, load_sets, load_training_texts
from bacr_jax.questions.loaders import own_tokenizer
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


class TestLabels:
    """Labels of the training questions, as `bacr evaluate --split train` makes them."""

    @pytest.fixture
    def task(self, tmp_path):
        rows = [{"question": f"{i}+2", "answer": "4"} for i in range(12)]
        long = {"question": "1+" * 40 + "1", "answer": "41"}
        for name, more in (("a", [long]), ("b", [])):
            path = tmp_path / f"{name}.jsonl"
            path.write_text("\n".join(map(json.dumps, [*rows, *more])))

        def of(**changes):
            data = {"dir": str(tmp_path), "train": "jsonl:a.jsonl", "eval": ("jsonl:b.jsonl",)}
            data |= {"prompt_format": "characters", "max_prompt_tokens": 20}
            config = Config(
                data=DataConfig(**{**data, **changes}),
                eval=EvalConfig(holdout=0),
                conditioning=ConditioningConfig(budget_input="none"),
            )
            return resolve(config).task

        return of

    def labeled(self, task, path):
        """Writes labels for the questions that an evaluation of the training set samples."""
        settings = task(eval=("jsonl:a.jsonl",))
        sets = load_sets(settings, own_tokenizer(settings.data), split="train")
        ids = sets["jsonl:a.jsonl"].set.ids
        lines = [json.dumps({"id": one, "avg": i / 12, "samples": 8}) for i, one in enumerate(ids)]
        path.write_text("\n".join(lines))
        return ids

    def load(self, settings):
        return load_all_sets(settings, own_tokenizer(settings.data), format_for(settings.data))

    def test_are_not_needed_for_questions_with_long_prompts(self, task, tmp_path):
        path = tmp_path / "labels.jsonl"
        ids = self.labeled(task, path)
        assert len(ids) == 12
        settings = task(groups="solve_rate", labels=str(path), num_groups=4)
        train, _, _ = self.load(settings)
        assert train.set.ids == ids and len(train.set.left_out) == 1
        assert train.set.groups.tolist() == [3] * 4 + [2] * 3 + [1] * 3 + [0] * 2

    @pytest.mark.parametrize("missing", [0, 5, 11])
    def test_are_needed_for_all_others(self, task, tmp_path, missing):
        path = tmp_path / "labels.jsonl"
        self.labeled(task, path)
        lines = path.read_text().splitlines()
        del lines[missing]
        path.write_text("\n".join(lines))
        settings = task(groups="solve_rate", labels=str(path), num_groups=4)
        with pytest.raises(UserError, match=f"no label for 1 of 12 .*'jsonl-train-{missing}';"):
            self.load(settings)

    def test_of_a_run_are_not_needed_to_evaluate_or_compare_other_sets(self, task, tmp_path):
        path = tmp_path / "labels.jsonl"
        self.labeled(task, path)
        lines = path.read_text().splitlines()
        path.write_text(lines[0])
        settings = task(groups="solve_rate", labels=str(path), num_groups=4)
        for split in ("train", "test"):
            (questions,) = load_sets(settings, own_tokenizer(settings.data), split=split).values()
            assert len(questions) == 12
        path.unlink()
        assert len(load_training_texts("jsonl:b.jsonl", settings.data, 0)) == 12
        (questions,) = load_sets(settings, own_tokenizer(settings.data), split="train").values()
        assert len(questions) == 12
