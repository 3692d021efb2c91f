"""Tests the fingerprint of a warm-up, and the checks of its folder before a run starts."""

import dataclasses
import errno
import json

import numpy as np
import pytest

from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.config.settings import resolve
from bacr_jax.errors import UserError
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.runs.checkpoint import Checkpoints, read_part
from bacr_jax.runs.folder import RunPaths, WarmupPaths
from bacr_jax.training.warmup import prompt_budgets
from bacr_jax.training.warmup_folder import (
    base_record,
    check_base,
    check_warmup,
    read_warmup,
    save_warmup,
    warmup_fingerprint,
)
from methods_world import load

STYLED = ("data.ledger.variant=tradeoff", "warmup.style=at_once", "warmup.steps=10")


@pytest.mark.parametrize(
    ("settings", "budgets"),
    [
        (("conditioning.budget_input=embedding",), None),
        (("conditioning.budget_input=none",), None),
        (("conditioning.budget_input=prompt",), [4, 5, 6, 7, 8, 9, 10, 11, 12]),
        (("conditioning.budget_input=both", "eval.budgets=[12, 40]"), [*range(4, 13), 40]),
        (
            ("conditioning.budget_input=prompt", "budget.prior=choices", "budget.choices=[4, 8]"),
            [4, 8, 12],
        ),
    ],
)
def test_a_warm_up_tells_what_the_run_will_tell(tmp_path, settings, budgets):
    warmup = resolve(load(tmp_path, None, *settings)).warmup
    found = prompt_budgets(warmup)
    assert (None if found is None else found.tolist()) == budgets


def test_a_warm_up_is_another_under_another_system_message(tmp_path):
    own = ("data.train=math:x", "data.eval=['math:x']", "model.path=y")
    of = lambda *more: warmup_fingerprint(
        config_io.override(Config(), [*own, "conditioning.budget_input=none", *more])
    )
    prints = [of(), of("data.system_prompt=''"), of("data.template_variables={day: 1}")]
    # Settings of the answers, and of the text that closes truncated thinking.
    prints += [of("data.answer_column=solution"), of("data.answers=verbatim")]
    prints += [of("data.closing_text='</think>'")]
    told = lambda *more: of("conditioning.budget_input=prompt", *more)
    prints += [told(), told("conditioning.prompt_text='Use {budget} tokens.'")]
    assert len(set(prints)) == 8
    # If prompts contain no budget, the sentence with the budget has no effect.
    assert of("conditioning.prompt_text='Use {budget} tokens.'") == of()


def test_a_warm_up_with_words_is_another_than_one_without(tmp_path):
    identity = lambda *more: warmup_fingerprint(load(tmp_path, None, *STYLED, *more))
    plain = identity("conditioning.budget_input=embedding")
    # The hash of seed, model, data.ledger and warmup, as before prompts could contain budgets.
    assert len(plain) == 12 and identity("conditioning.budget_input=none", "budget.max=16") == plain
    words = identity("conditioning.budget_input=prompt")
    assert words != plain and identity("conditioning.budget_input=both") == words
    assert identity("conditioning.budget_input=prompt", "budget.max=16") not in (words, plain)


def test_runs_of_several_seeds_share_the_warm_up_of_warmup_seed(tmp_path):
    of = lambda *more: warmup_fingerprint(load(tmp_path, None, *STYLED, *more))
    own = of("seed=5")
    assert of("seed=5", "warmup.seed=5") == of("seed=6", "warmup.seed=5") == own
    assert of("seed=5", "warmup.seed=6") == of("seed=6") != own


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"warmup.json": '{"fingerprint": "x"}'}, "contains a warm-up with other settings"),
        ({"warmup.json": "OWN"}, "the weights of this warm-up are missing;"),
        ({"warmup.json": "["}, "warmup.json, which describes the warm-up, is damaged"),
        ({"warmup.json": "OWN", "weights/10/x": ""}, None),
        ({"progress/x": ""}, None),
    ],
)
def test_the_folder_of_a_warm_up_is_looked_at_before_a_run_begins(tmp_path, files, says):
    config = load(tmp_path, None, "warmup.steps=10", f"warmup.dir={tmp_path / 'warm'}")
    for name, text in files.items():
        path = tmp_path / "warm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        own = json.dumps({"fingerprint": warmup_fingerprint(config)})
        path.write_text(text.replace("OWN", own))
    run = RunPaths(tmp_path / "run")
    if says is None:
        return check_warmup(config.warmup, warmup_fingerprint(config), run)
    with pytest.raises(UserError, match=f"{tmp_path}/warm.*{says}"):
        check_warmup(config.warmup, warmup_fingerprint(config), run)
    # A run that has a checkpoint does not need the warm-up.
    (run.checkpoints / "3").mkdir(parents=True)
    return check_warmup(config.warmup, warmup_fingerprint(config), run)


def test_a_record_that_can_not_be_read_is_not_called_damaged(tmp_path, monkeypatch):
    config = load(tmp_path, None, "warmup.steps=10", f"warmup.dir={tmp_path / 'warm'}")
    (tmp_path / "warm").mkdir()
    (tmp_path / "warm" / "warmup.json").write_text("{}")

    def read(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("bacr_jax.files.read_object", read)
    with pytest.raises(UserError, match=r"can't be read \(Permission denied\)") as refused:
        check_warmup(config.warmup, warmup_fingerprint(config), RunPaths(tmp_path / "run"))
    assert "delete" not in str(refused.value)


def test_weights_that_nothing_says_whose_they_are_are_replaced(tmp_path):
    config, paths = load(tmp_path, None, "warmup.steps=3"), WarmupPaths(tmp_path / "warm")
    paths.unfinished.mkdir(parents=True)
    theirs = Checkpoints(paths.weights, keep=1)
    theirs.save(3, {"w": np.zeros(2, np.float32)}, {})
    theirs.close()
    save_warmup(warmup_fingerprint(config), paths, 3, {"w": np.ones(2, np.float32)}, {})
    assert read_part(paths.weights / "3" / "state", "w").tolist() == [1, 1]
    assert json.loads(paths.identity.read_text())["steps"] == 3


@pytest.mark.parametrize(
    ("recorded", "now", "is_refused"),
    [
        ("aaa", "aaa", False),
        ("aaa", "bbb", True),
        (None, "bbb", True),
        # A warm-up on the ledger, and a check before the texts are read.
        (None, None, False),
        ("aaa", None, False),
    ],
)
def test_a_warm_up_with_other_texts_is_refused(tmp_path, recorded, now, is_refused):
    config = load(tmp_path, None, "warmup.steps=3", f"warmup.dir={tmp_path / 'warm'}")
    fingerprint = warmup_fingerprint(config)
    paths = WarmupPaths(tmp_path / "warm")
    paths.unfinished.mkdir(parents=True)
    params = {"w": np.ones(2, np.float32)}
    save_warmup(fingerprint, paths, 3, params, {}, recorded)
    assert json.loads(paths.identity.read_text()).get("texts") == recorded
    run = RunPaths(tmp_path / "run")
    checks = (
        lambda: check_warmup(config.warmup, fingerprint, run, now),
        lambda: read_warmup(config.warmup, fingerprint, paths, params, now),
    )
    for check in checks:
        if not is_refused:
            check()
            continue
        with pytest.raises(UserError) as refusal:
            check()
        assert str(refusal.value) == (
            f"warmup.dir={paths.path} contains a warm-up with other traces or answers than "
            "data.train has now; restore them, or set another warmup.dir"
        )
    (run.checkpoints / "3").mkdir(parents=True)
    check_warmup(config.warmup, fingerprint, run, now)


def test_a_warm_up_of_another_base_model_is_refused(tmp_path):
    shape = Qwen2Config(27, 16, 24, 3, 4, 2, 4, rope_theta=1e4)
    of = lambda shape, *more: base_record(
        resolve(config_io.override(Config(), ["warmup.steps=3", *more])).warmup, shape
    )
    # The config contains the shape of a custom model.
    assert of(shape) == {}
    recorded = of(shape, "model.path=base")
    now = of(dataclasses.replace(shape, rope_theta=5e5), "model.path=base")
    warmup = resolve(Config()).warmup.warmup
    paths = WarmupPaths(tmp_path / "warm")
    paths.unfinished.mkdir(parents=True)
    params = {"w": np.ones(2, np.float32)}
    save_warmup("x", paths, 3, params, {}, None, recorded)
    read = lambda model: read_warmup(warmup, "x", paths, params, None, model)
    says = "^model.path: its config.json differs .*rope_theta is 500000.0 instead of 10000.0"
    with pytest.raises(UserError, match=says):
        read(now)
    assert read(recorded)["w"].tolist() == [1, 1]
    # The record of an unfinished warm-up.
    with pytest.raises(UserError, match=says):
        check_base(warmup, {"journal": [], **recorded}, now, paths)
