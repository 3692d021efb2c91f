"""What made a state: equal for equal runs, and a line for what keeps a resume from being exact."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from bacr_jax.config import Config, DataConfig
from bacr_jax.config import io as config_io
from bacr_jax.config.io import flatten
from bacr_jax.errors import UserError
from bacr_jax.questions.question_set import QuestionSet
from bacr_jax.runs.provenance import (
    VERSIONED,
    check_same_prompts,
    check_same_questions,
    data_fingerprint,
    differences,
    provenance,
)

BLANK = np.zeros(2, np.int32)
QUESTIONS = QuestionSet("ours", ["1+1", "2+2"], ["2", "4"], BLANK, BLANK, ["a", "b"])


def made_from(config, *inputs, **prompts):
    """The provenance of a run with this config."""
    return provenance(config_io.flatten(config), config_io.fingerprint(config), *inputs, **prompts)


def test_it_is_json_and_names_seed_software_and_devices():
    made = made_from(Config(seed=7), QUESTIONS, None)
    assert json.loads(json.dumps(made)) == made
    assert made["seed"] == made["config"]["seed"] == 7
    assert set(made["versions"]) == set(VERSIONED) and made["versions"]["jax"] == jax.__version__
    assert made["devices"][0] == jax.device_count() and made["mesh"] == {}


def test_a_mesh_is_told_by_its_axes():
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "fsdp"))
    assert made_from(Config(), QUESTIONS, mesh)["mesh"] == {"data": 1, "fsdp": 1}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ids", ["a", "c"]),
        ("questions", ["1+1", "2 + 2"]),
        ("answers", ["2", "5"]),
        ("groups", np.array([0, 1])),
    ],
)
def test_data_are_known_by_ids_questions_answers_and_groups(field, value):
    print_of = lambda questions: made_from(Config(), questions, None)["data_fingerprint"]
    assert print_of(dataclasses.replace(QUESTIONS, **{field: value})) != print_of(QUESTIONS)
    assert print_of(dataclasses.replace(QUESTIONS, name="theirs")) == print_of(QUESTIONS)


def made_with_sets(train, *evaluated, folder=""):
    """Returns the provenance of a run whose `data.eval` has one table for each evaluation set."""
    entries = tuple(f"jsonl:{folder}{index}.jsonl" for index in range(len(evaluated)))
    config = dataclasses.replace(Config(), data=DataConfig(eval=entries))
    return made_from(config, train, None, evaluated)


def test_other_questions_are_refused():
    others = dataclasses.replace(QUESTIONS, answers=["2", "5"])
    made = lambda train, *evaluated: made_with_sets(train, *evaluated)
    check = lambda then, now: check_same_questions(then, now, "ledger", Path("run"))
    check(made(QUESTIONS, QUESTIONS), made(QUESTIONS, QUESTIONS))
    with pytest.raises(UserError, match="data.train=ledger: the questions differ from"):
        check(made(QUESTIONS), made(others))
    for now in ((), (others,), (QUESTIONS, dataclasses.replace(QUESTIONS, name="more"))):
        with pytest.raises(
            UserError,
            match="data.eval: the questions of (ours|more) have changed since the last evaluation "
            "of the run in ",
        ):
            check(made(QUESTIONS, QUESTIONS), made(QUESTIONS, *now))


FIRST = QUESTIONS
SECOND = dataclasses.replace(QUESTIONS, answers=["2", "5"])
OTHER = dataclasses.replace(QUESTIONS, answers=["3", "5"])


def check_sets(then, now):
    check_same_questions(then, now, "ledger", Path("runs/a"))


def test_each_of_several_sets_with_equal_names_is_compared():
    then = made_with_sets(QUESTIONS, FIRST, SECOND)
    assert list(then["evaluated_fingerprints"]) == ["jsonl:0.jsonl", "jsonl:1.jsonl"]
    check_sets(then, made_with_sets(QUESTIONS, FIRST, SECOND))
    for now in ((OTHER, SECOND), (SECOND, SECOND), (SECOND, FIRST)):
        with pytest.raises(UserError, match="the questions of jsonl:0.jsonl have changed"):
            check_sets(then, made_with_sets(QUESTIONS, *now))
    with pytest.raises(UserError, match="the questions of jsonl:1.jsonl have changed"):
        check_sets(then, made_with_sets(QUESTIONS, FIRST, OTHER))
    # Only sets with equal names are known by their entries.
    named = dataclasses.replace(OTHER, name="theirs")
    mixed = made_with_sets(QUESTIONS, FIRST, SECOND, named)["evaluated_fingerprints"]
    assert list(mixed) == ["jsonl:0.jsonl", "jsonl:1.jsonl", "theirs"]


def test_moved_files_with_the_same_questions_are_accepted():
    then = made_with_sets(QUESTIONS, FIRST, SECOND)
    check_sets(then, made_with_sets(QUESTIONS, FIRST, SECOND, folder="moved/"))
    with pytest.raises(UserError, match="the questions of jsonl:0.jsonl have changed"):
        check_sets(then, made_with_sets(QUESTIONS, OTHER, SECOND, folder="moved/"))


def test_an_older_checkpoint_has_only_the_last_of_several_sets_with_equal_names():
    now = made_with_sets(QUESTIONS, FIRST, SECOND)
    then = now | {"evaluated_fingerprints": {"ours": data_fingerprint(SECOND)}}
    check_sets(then, now)
    with pytest.raises(UserError, match="the questions of ours have changed"):
        check_sets(then, made_with_sets(QUESTIONS, FIRST, OTHER))


def test_a_changed_file_of_a_method_is_refused_and_another_file_is_not():
    made = lambda **files: made_from(Config(), QUESTIONS, None) | {"method_fingerprints": files}
    check_sets(made(**{"method=own.py": "11"}), made(**{"method=own.py": "11"}))
    check_sets(made(**{"method=own.py": "11"}), made(**{"method=other.py": "22"}))
    with pytest.raises(
        UserError, match="^method=own.py: the code of the method was changed after the run in"
    ) as said:
        check_sets(made(**{"method=own.py": "11"}), made(**{"method=own.py": "22"}))
    assert str(said.value).endswith("another name and pass --allow-change method")
    # An older checkpoint contains no digest of a method.
    old = made()
    del old["method_fingerprints"]
    check_sets(old, made(**{"method=own.py": "11"}))


def test_another_content_of_a_file_that_grades_is_refused_and_another_file_is_not():
    files = {"grader=mine.py:check": "11", "reward.weights=mine.py:brief": "22"}
    made = lambda files: made_from(Config(), QUESTIONS, None, (), files)
    check = lambda then, now: check_same_questions(then, now, "ledger", Path("runs/a"))
    check(made(files), made(files))
    check(made(files), made({"reward.weights=other.py:brief": "33"}))
    with pytest.raises(
        UserError, match="^reward.weights=mine.py:brief: the code that grades"
    ) as said:
        check(made(files), made(files | {"reward.weights=mine.py:brief": "33"}))
    assert str(said.value).endswith("another name and pass --allow-change reward.weights")
    # A checkpoint from before there were several holds the digest of the grader's file alone.
    old = made({}) | {"config": {"grader": "mine.py:check"}, "verifier_fingerprint": "12"}
    del old["verifier_fingerprints"]
    with pytest.raises(UserError, match="--allow-change grader"):
        check(old, made(files))
    check(old | {"verifier_fingerprint": "11"}, made(files))


def test_a_resume_that_is_not_exact_says_what_changed():
    then = made_from(Config(), QUESTIONS, None)
    assert list(differences(then, then)) == []
    # What the config says is not looked at here: a resume refuses another one.
    now = {**then, "seed": 1, "versions": {"jax": "0.1"}, "devices": [8, "H100"]}
    of_versions, of_devices = differences(then, now)
    assert of_versions.startswith("note: versions were {") and "'jax': '0.1'" in of_versions
    assert "devices were [" in of_devices and "are now [8, 'H100']" in of_devices
    assert all("not be bit-identical" in line for line in (of_versions, of_devices))


PROMPTS = {"tokenizer": "a", "template": "b", "data.train": "c", "ours": "d"}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tokenizer", "the vocabulary of its tokenizer differs"),
        ("template", "its chat template differs from the one"),
        ("data.train", "the prompts of data.train have different token ids"),
        ("ours", "the prompts of ours have different token ids"),
    ],
)
def test_another_tokenizer_template_or_prompt_is_refused(name, says):
    then = made_from(Config(), QUESTIONS, None, prompts=PROMPTS)
    check = lambda now, *changed: check_same_prompts(
        then, now, flatten(config_io.override(Config(), changed)), Path("runs/a")
    )
    check(PROMPTS)
    # A policy is opened without the prompts of its training.
    check({"tokenizer": "a"})
    with pytest.raises(UserError, match=rf"^model.path=None: .*{says}.* runs/a\b"):
        check(PROMPTS | {name: "x"})
    # What was changed on purpose changes prompts, and no tokenizer.
    brief = "data.system_prompt=Be brief."
    if name == "tokenizer":
        with pytest.raises(UserError, match=says):
            check(PROMPTS | {name: "x"}, brief)
    else:
        check(PROMPTS | {name: "x"}, brief)


def test_a_checkpoint_without_digests_of_its_prompts_is_opened_with_a_note():
    then = made_from(Config(), QUESTIONS, None)
    del then["prompt_fingerprints"]
    check_same_prompts(then, PROMPTS, flatten(Config()), Path("runs/a"))
    (note,) = differences(then, made_from(Config(), QUESTIONS, None, prompts=PROMPTS))
    assert note.startswith("note: the checkpoint does not contain a digest of its prompts")
