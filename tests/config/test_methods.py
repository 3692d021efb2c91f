"""Settings of methods that make no sense: one line each."""

import importlib

import pytest
from hypothesis import given, settings

from bacr_jax.config import Config
from bacr_jax.config.checks import check
from bacr_jax.config.methods import built_in_methods, problems
from bacr_jax.errors import UserError
from config_world import changed, values_by_key, with_value

BAD_CONFIGS = [
    ({"method": "bcar"}, "method: found 'bcar', neither a method here nor an importable module"),
    ({"method": "bcar"}, "write bacr, or the path of a Python file"),
    ({"method": "my.own..method"}, "method: found 'my.own..method'"),
    ({"method": ".bacr"}, "method: found '.bacr'"),
    ({"method": "cot"}, "method=cot: trains nothing; write python -m bacr_jax.evaluate"),
    (
        {"rollout": {"group_size": 1}, "advantage": {"baseline": "residual_loo"}},
        "rollout.group_size=1: advantage.baseline=residual_loo compares the rollouts of a question",
    ),
    (
        {"rollout": {"group_size": 1}, "method": "grpo"},
        "rollout.group_size=1: method=grpo compares the rollouts of a question; write 2 or more",
    ),
]


@pytest.mark.parametrize(("sections", "fragment"), BAD_CONFIGS)
def test_a_setting_that_makes_no_sense_is_refused_in_one_line(sections, fragment):
    with pytest.raises(UserError) as excinfo:
        check(changed(**sections), also=problems)
    line = str(excinfo.value)
    assert fragment in line and line.isprintable()


@pytest.mark.parametrize("sections", [{}, {"rollout": {"group_size": 1}}, {"method": "json.tool"}])
def test_an_unusual_but_possible_config_passes(sections):
    assert list(problems(changed(**sections))) == []


def test_every_built_in_method_can_be_made():
    assert {"bacr", "grpo", "dapo", "anytime"} < set(built_in_methods())
    for name in built_in_methods():
        module = importlib.import_module(f"bacr_jax.methods.{name}")
        assert callable(module.make)


@given(values_by_key())
@settings(max_examples=100, deadline=None)
def test_any_typed_config_is_accepted_or_refused_never_a_crash(values):
    config = Config()
    for name, value in values.items():
        config = with_value(config, name, value)
    try:
        check(config, also=problems)
    except UserError as error:
        assert str(error).isprintable()
