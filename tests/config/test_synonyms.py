"""Names and options of other trainers are answered with ours."""

import re

import pytest

from bacr_jax.config import io as config_io
from bacr_jax.config.synonyms import RENAMED, SYNONYMS, check_options, synonym
from bacr_jax.errors import UserError


def test_every_synonym_names_a_key_of_ours():
    for name, instead in SYNONYMS.items():
        words = instead.replace("=", " ").replace(",", " ").split()
        assert any(word in config_io.settings() for word in words), name


@pytest.mark.parametrize(
    ("key", "instead"),
    [
        ("lr", "optimizer.learning_rate"),
        ("actor_rollout_ref.rollout.n", "rollout.group_size"),
        ("trainer.total-epochs", "train.epochs"),
        ("nothing", None),
    ],
)
def test_only_the_last_part_of_a_name_counts(key, instead):
    assert synonym(key) == instead


@pytest.mark.parametrize("earlier", sorted(RENAMED))
def test_an_earlier_name_of_a_key_is_refused_with_the_current_one(tmp_path, earlier):
    section, _, key = earlier.partition(".")
    path = tmp_path / "mine.yaml"
    path.write_text(f"{section}: {{{key}: 1}}\n")
    expected = f"{re.escape(earlier)}: there is no such key; use {re.escape(RENAMED[earlier])}$"
    with pytest.raises(UserError, match=expected):
        config_io.load([path])


def test_a_name_that_both_have_is_answered_with_both():
    with pytest.raises(
        UserError, match="beta: there is no such key; use curriculum.beta or loss.kl_coef"
    ):
        config_io.load([], ["beta=0.1"])


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        (
            "reward_funcs=mine.py:f",
            "grader=FILE.py:function to grade correctness, or reward.weights",
        ),
        ("custom_reward_function.path=mine.py", "grader=FILE.py:function to grade correctness"),
        ("reward_model.model.path=x", "grader=FILE.py:function to grade correctness"),
        ("reward=mine.py:f", "grader=FILE.py:function to grade correctness"),
        ("verifier=mine.py:f", "grader=FILE.py:function to grade correctness"),
        ("budgets=[64,128]", "eval.budgets for the budgets"),
        ("budget=512", "eval.budgets for the budgets"),
        ("max_new_tokens=512", "eval.budgets and budget.max for thinking"),
        ("model=Qwen/Qwen2.5-1.5B", "model.path"),
        ("model_path=Qwen/Qwen2.5-1.5B", "model.path"),
        ("actor_rollout_ref.model.name=x", "model.path"),
        ("data_path=train.jsonl", "data.train"),
        ("data.path=train.jsonl", "data.train"),
        ("data.eval_files=[test.jsonl]", "data.eval"),
        ("eval.data=[test.jsonl]", "data.eval"),
    ],
)
def test_names_of_other_trainers_lead_to_a_key_and_not_to_a_similar_name(override, instead):
    with pytest.raises(UserError) as error:
        config_io.load([], [override])
    (line,) = error.value.lines
    advice = line.partition("; use ")[2]
    assert re.match(rf"{re.escape(instead)}(?![\w.])", advice)


@pytest.mark.parametrize("name", sorted(SYNONYMS))
def test_no_name_of_another_trainer_is_answered_with_a_section_only(name):
    if name in config_io.settings():
        return
    with pytest.raises(UserError) as error:
        config_io.load([], [f"{name}=1"])
    words = re.split(r"[ ,;=:]+", error.value.lines[0].partition("; use ")[2])
    assert any(word in config_io.settings() for word in words)


def refused(*words):
    with pytest.raises(UserError) as error:
        check_options(words, config_io.settings())
    return list(error.value.lines)


def test_options_for_keys_are_answered_with_the_key_and_its_value():
    assert refused("--config", "quickstart", "--train.steps", "5", "--seed=1") == [
        "command line: --train.steps: config keys have no dashes; use train.steps=5",
        "command line: --seed=1: config keys have no dashes; use seed=1",
    ]
    assert refused("--lr", "1e-5", "--num-generations") == [
        "command line: --lr: there is no such option, and config keys have no dashes; use "
        "optimizer.learning_rate=1e-5",
        "command line: --num-generations: there is no such option, and config keys have no "
        "dashes; use rollout.group_size=...",
    ]


def test_sections_as_options_are_answered_with_the_key_that_is_meant():
    assert refused("--model", "Qwen/Qwen2.5-1.5B", "--data=train.jsonl") == [
        "command line: --model: there is no such option, and config keys have no dashes; use "
        "model.path=Qwen/Qwen2.5-1.5B",
        "command line: --data=train.jsonl: there is no such option, and config keys have no "
        "dashes; use data.train=train.jsonl",
    ]


def test_options_of_other_commands_are_answered_with_ours():
    assert refused("-c", "quickstart", "--dry_run", "seed=1") == [
        "command line: -c: there is no such option; use --config quickstart",
        "command line: --dry_run: there is no such option; use --check",
    ]


def test_our_own_options_and_what_follows_two_dashes_are_left_to_argparse():
    words = ["--config", "quickstart", "-h", "--resume", "auto", "--check", "--", "--lr"]
    check_options(words, config_io.settings())
