"""Methods by name, and what a config is refused for on their account."""

import dataclasses
import importlib
import subprocess
import sys
from types import ModuleType

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from bacr_jax.config import Config
from bacr_jax.config.checks import check
from bacr_jax.config.settings import MethodSettings, resolve
from bacr_jax.errors import UserError
from bacr_jax.methods import Advantages, grpo
from bacr_jax.methods.registry import (
    advice,
    built_in_methods,
    declares_budget,
    load_method,
    overlong_filtered,
    problems,
)
from config_world import changed, values_by_key, with_value
from methods_world import PRESETS, group_batch, load


@pytest.mark.parametrize(
    ("preset", "override", "says"),
    [
        ("dapo", "loss.aggregate=constant", "loss.aggregate=token_mean"),
        ("dapo", "loss.clip_high=0.2", "a value above loss.clip_low"),
        ("dapo", "loss.kl_coef=0.1", "loss.kl_coef=0"),
        ("dr_grpo", "loss.aggregate=token_mean", "loss.aggregate=constant"),
        ("anytime", "loss.aggregate=token_mean", "loss.aggregate=constant"),
    ],
)
def test_loss_settings_that_a_method_is_not_are_refused(tmp_path, preset, override, says):
    with pytest.raises(UserError, match=says):
        load(tmp_path, preset, override)


@pytest.mark.parametrize("preset", ["grpo", "bacr-full"])
def test_a_clip_range_for_tokens_is_advised_against_with_the_ratio_of_gspo(tmp_path, preset):
    def advice_with(*keys):
        return advice(resolve(load(tmp_path, preset, *keys)).method)

    (line,) = advice_with("loss.ratio=gspo")
    assert line.startswith("loss.clip_low=0.2 loss.clip_high=0.2: with loss.ratio=gspo")
    assert "; set loss.clip_low=3e-4 and loss.clip_high=4e-4" in line
    assert advice_with("loss.ratio=gspo", "loss.clip_low=3e-4", "loss.clip_high=4e-4") == []
    assert advice_with("loss.ratio=token") == []


@pytest.mark.parametrize(
    ("preset", "keys", "says"),
    [
        ("grpo", (), "conditioning.budget_input=none, method=grpo"),
        (
            "bacr-robust",
            ("conditioning.budget_input=both",),
            "conditioning.budget_input=both, method=bacr",
        ),
    ],
)
def test_a_policy_without_a_budget_embedding_can_not_teach_itself(tmp_path, preset, keys, says):
    with pytest.raises(UserError, match=f"distill.coef=1: .*{says}"):
        load(tmp_path, preset, "distill.coef=1", *keys)
    load(tmp_path, preset, "distill.coef=1", "distill.teacher=folder", *keys)


@pytest.mark.parametrize("name", ["cot", "self_consistency"])
def test_methods_that_train_nothing_are_refused_with_what_to_do(name, capsys):
    from bacr_jax.train import main

    assert main(["--config", str(PRESETS.parent / "quickstart.yaml"), f"method={name}"]) == 2
    error = capsys.readouterr().err
    assert "bacr evaluate" in error and error.count("\n") == 1


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "dapo", "hapo", "selfbudgeter"])
def test_methods_that_compare_rollouts_need_several(tmp_path, name):
    with pytest.raises(UserError, match=f"method={name} compares several traces"):
        load(tmp_path, name, "rollout.group_size=1")


def test_a_name_that_nobody_has_is_refused_with_the_nearest():
    (problem,) = problems(MethodSettings(method="gprpo"))
    assert "use grpo, or the path" in problem
    assert list(problems(MethodSettings(method="json.tool"))) == []


def test_only_selfbudgeter_declares_a_budget_whatever_the_loss():
    names = [name for name in built_in_methods() if declares_budget(MethodSettings(method=name))]
    assert names == ["selfbudgeter"]


def test_looking_for_problems_starts_no_device():
    code = (
        "from bacr_jax.config.settings import MethodSettings; "
        "from bacr_jax.methods.registry import built_in_methods, problems; "
        "[list(problems(MethodSettings(method=m))) for m in built_in_methods()]; "
        "from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


MIXED = {"correct": 1, "mine.py:brief": 0.25}
BAD_CONFIGS = [
    ({"method": "bcar"}, "'bcar' is neither a built-in method nor an importable module"),
    ({"method": "bcar"}, "use bacr, or the path of a Python file"),
    ({"method": "my.own..method"}, "method: 'my.own..method' is"),
    ({"method": ".bacr"}, "method: '.bacr' is"),
    ({"method": "cot"}, "use bacr evaluate, because this method does not train"),
    (
        {"rollout": {"group_size": 1}, "advantage": {"baseline": "residual_loo"}},
        "rollout.group_size=1: advantage.baseline=residual_loo compares several traces of the "
        "same question",
    ),
    (
        {"method": "hapo", "reward": {"weights": MIXED}},
        "reward.weights: method=hapo needs to know whether an answer is right",
    ),
    (
        {"method": "dapo", "reward": {"weights": MIXED, "normalize_each": True}},
        "reward.normalize_each=true: method=dapo does not divide rewards by the standard deviation "
        "of their group, so the rewards can't be normalized one by one; set method=grpo, or",
    ),
    (
        {"rollout": {"group_size": 1}, "method": "grpo"},
        "rollout.group_size=1: method=grpo compares several traces of the same question; set it "
        "to 2 or "
        "more",
    ),
]


@pytest.mark.parametrize(("sections", "fragment"), BAD_CONFIGS)
def test_a_setting_that_makes_no_sense_is_refused_in_one_line(sections, fragment):
    with pytest.raises(UserError) as excinfo:
        check(changed(**sections), also=problems)
    line = str(excinfo.value)
    assert fragment in line and line.isprintable()


@pytest.mark.parametrize("base", ["hapo", "s_grpo", "length", "selfbudgeter"])
def test_an_own_method_that_needs_verdicts_refuses_weights_as_the_built_in_ones_do(tmp_path, base):
    reward = tmp_path / "r.py"
    reward.write_text("def brief(question, response, gold):\n    return 1.0\n")
    own = tmp_path / "own.py"
    own.write_text(
        f"import dataclasses\nfrom bacr_jax.methods import {base}\n"
        f"def make(config):\n    return dataclasses.replace({base}.make(config), name='Own')\n"
    )
    keys = (f"method={own}", "budget.min=8", "conditioning.budget_input=none")
    load_method(resolve(load(tmp_path, None, *keys)).method)
    config = load(tmp_path, None, *keys, f"reward.weights={{correct: 1, {reward}:brief: 1}}")
    with pytest.raises(UserError, match=r"^reward.weights: method=.*own.py needs to know whether"):
        load_method(resolve(config).method)


METHOD = "from bacr_jax.methods import grpo\nmake = grpo.make\n"


def test_the_digest_of_an_own_method_is_of_the_code_that_was_imported(tmp_path, monkeypatch):
    file = tmp_path / "own_digest_method.py"
    file.write_text(METHOD)
    monkeypatch.syspath_prepend(tmp_path)
    of_file, of_module = (MethodSettings(method=name) for name in (str(file), file.stem))
    first = load_method(of_file)
    assert first.source_digest == load_method(of_module).source_digest is not None
    file.write_text(METHOD + "# changed\n")
    # Python imports a module once, and executes a file each time.
    assert load_method(of_module).source_digest == first.source_digest
    assert load_method(of_file).source_digest not in (None, first.source_digest)


def test_a_module_that_was_imported_before_has_no_digest(tmp_path, monkeypatch):
    file = tmp_path / "own_imported_method.py"
    file.write_text(METHOD)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module(file.stem)
    file.write_text(METHOD + "# changed\n")
    assert load_method(MethodSettings(method=file.stem)).source_digest is None


def test_a_method_without_a_file_of_the_user_has_no_digest(monkeypatch):
    module = ModuleType("own_method_of_a_notebook")
    module.make = grpo.make
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in (module.__name__, "grpo", "bacr"):
        assert load_method(resolve(changed(method=name)).method).source_digest is None


@pytest.mark.parametrize(
    "sections",
    [
        {"budget": {"shuffle_input": True}, "advantage": {"baseline": "value"}},
        {"budget": {"shuffle_input": True}, "advantage": {"baseline": "optimal_token"}},
        {"distill": {"coef": 1.0}, "conditioning": {"budget_input": "both"}},
        {"method": "hapo", "reward": {"weights": MIXED}},
    ],
)
def test_all_that_loading_a_method_refuses_is_among_the_problems_of_its_config(sections):
    settings = resolve(changed(**sections)).method
    with pytest.raises(UserError) as refused:
        load_method(settings)
    assert str(refused.value) in list(problems(settings))


def test_several_settings_that_a_method_does_not_support_are_reported_together():
    sections = {
        "budget": {"shuffle_input": True},
        "advantage": {"baseline": "value"},
        "distill": {"coef": 1.0},
        "conditioning": {"budget_input": "both"},
    }
    places = [line.partition(":")[0] for line in problems(resolve(changed(**sections)).method)]
    assert places == ["distill.coef=1", "budget.shuffle_input=true"]


@pytest.mark.parametrize("sections", [{}, {"rollout": {"group_size": 1}}, {"method": "json.tool"}])
def test_an_unusual_but_possible_config_passes(sections):
    assert list(problems(resolve(changed(**sections)).method)) == []


@given(values_by_key())
@settings(max_examples=25)
def test_any_typed_config_is_accepted_or_refused_never_a_crash(values):
    config = Config()
    for name, value in values.items():
        config = with_value(config, name, value)
    try:
        check(config, also=problems)
    except UserError as error:
        assert str(error).isprintable()


@pytest.mark.parametrize("own", [None, [[True, False, False, True]]])
def test_traces_that_the_budget_cut_can_be_left_out_of_the_loss_of_any_method(tmp_path, own):
    none = jnp.zeros((1, 4, 1))
    own = None if own is None else jnp.array(own)
    config = load(tmp_path, "grpo")
    method = load_method(resolve(config).method)
    credit = Advantages(none, none, none, keep=own)
    method = dataclasses.replace(method, advantages=lambda *_: credit)
    closed = jnp.array([[True, True, False, False]])
    batch = dataclasses.replace(group_batch(config), closed=closed)
    found = overlong_filtered(method).advantages(None, batch, none, None)
    np.testing.assert_array_equal(found.keep, closed if own is None else own & closed)
