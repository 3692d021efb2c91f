"""Which config keys a saved policy can be asked with, in each command."""

import subprocess
import sys

import pytest

from bacr_jax.config import io as config_io
from bacr_jax.errors import UserError
from bacr_jax.evaluation.overrides import (
    ASKED_KEYS,
    BUDGET_INPUT_KEYS,
    DEFINES_POLICY,
    EVALUATED_KEYS,
    SERVED_KEYS,
    override_faults,
    server_faults,
)

SETS = {"evaluated": EVALUATED_KEYS, "asked": ASKED_KEYS, "served": SERVED_KEYS}
# Keys that define the policy, or the training that it had.
TRAINING = ("budget.max", "conditioning.gate", "model.hidden_size", "train.steps", "seed", "loss.")


def accepted(keys):
    names = config_io.schema()
    return {n for n in names if not list(override_faults([f"{n}=1"], keys, is_run=True))}


@pytest.mark.parametrize("keys", SETS.values(), ids=SETS)
def test_each_entry_names_keys_that_exist(keys):
    names = config_io.schema()
    assert all(any(name.startswith(entry) for name in names) for entry in keys)


@pytest.mark.parametrize("keys", SETS.values(), ids=SETS)
def test_every_other_key_is_refused_in_one_line(keys):
    names = accepted(keys)
    assert {"rollout.answer_tokens", "budget.levels", "data.prompt_format"} <= names
    assert not {name for name in names if name.startswith((*TRAINING, *BUDGET_INPUT_KEYS))}
    (line,) = override_faults(["train.steps=4"], keys, is_run=True)
    assert line.startswith("train.steps defines the policy") and "\n" not in line


def test_commands_that_grade_nothing_refuse_keys_of_sets_and_graders():
    graded = {"grader", "grading.workers", "data.eval", "data.answer_column"}
    assert graded <= accepted(EVALUATED_KEYS)
    assert not graded & accepted(ASKED_KEYS)
    # A served request is decoded in slots and chunks that options choose.
    assert {"rollout.chunk", "rollout.windows", "rollout.slots"} <= accepted(ASKED_KEYS)
    assert accepted(ASKED_KEYS) > accepted(SERVED_KEYS)
    assert "rollout.chunk" not in accepted(SERVED_KEYS)


def test_a_folder_may_be_told_how_its_policy_receives_the_budget():
    for key in BUDGET_INPUT_KEYS:
        assert not list(override_faults([f"{key}=x"], ASKED_KEYS, is_run=False))
        assert list(override_faults([f"{key}=x"], ASKED_KEYS, is_run=True))
    assert list(override_faults(["budget.max=4"], ASKED_KEYS, is_run=False))
    for method, count in (("selfbudgeter", 0), ("grpo", 1)):
        faults = override_faults([f"method={method}"], ASKED_KEYS, is_run=False)
        assert len(list(faults)) == count


def test_an_unknown_key_is_left_to_the_config_which_knows_one_like_it():
    assert not list(override_faults(["rollout.answer_token=3"], ASKED_KEYS, is_run=True))
    with pytest.raises(UserError, match="answer_tokens"):
        config_io.override(config_io.load([], []), ["rollout.answer_token=3"])


def test_blanks_around_a_key_change_nothing():
    (line,) = override_faults([" train.steps =4"], EVALUATED_KEYS, is_run=True, reason="x")
    assert line.startswith("train.steps x; override only keys such as ")
    (line,) = override_faults(["budget.max=4"], EVALUATED_KEYS, is_run=True, reason=DEFINES_POLICY)
    assert "defines the policy and can't be overridden in an evaluation" in line


@pytest.mark.parametrize(
    "key",
    [
        *("mesh.decode_tensor", "model.attention", "model.compute_dtype", "model.product_dtype"),
        *("rollout.attention", "rollout.chunk", "rollout.refill", "rollout.windows"),
    ],
)
def test_keys_of_our_decoder_have_no_effect_on_a_server(key):
    (line,) = server_faults([f"{key}=1", "rollout.answer_tokens=3"], "--url")
    assert line.startswith(f"{key} has no effect with --url, because the server computes")


def test_the_check_imports_no_jax():
    code = "import sys; import bacr_jax.evaluation.overrides; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("override", "refused"),
    [
        ("rollout={answer_tokens: 3}", []),
        ("data={prompt_format: boxed}", []),
        ("rollout={answer_tokens: 3, temperature: 2}", ["rollout.temperature"]),
    ],
)
def test_the_keys_of_a_section_are_checked_one_by_one(override, refused):
    faults = list(override_faults([override], ASKED_KEYS, is_run=True))
    assert [fault.split()[0] for fault in faults] == refused
