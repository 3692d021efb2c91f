"""Every preset, from config to advantages."""

import jax
import numpy as np
import pytest
import yaml

from bacr_jax.config import io as config_io
from bacr_jax.methods.registry import built_in_methods, problems
from methods_world import NAMES, PRESETS, credit_of, load


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_a_good_config_and_gives_finite_credit(tmp_path, name):
    config = load(tmp_path, name)
    method, batch, state, rewards, credit, after = credit_of(config)
    assert rewards.shape == batch.outcomes.shape
    assert credit.thinking.shape == batch.outcomes.shape
    answers = batch.outcomes.shape if method.answers == 1 else batch.by_answer.shape
    assert credit.answers.shape in (answers, batch.by_answer.shape)
    for leaf in jax.tree.leaves((rewards, credit.thinking, credit.answers, credit.baseline)):
        assert np.isfinite(leaf).all()
    assert np.abs(credit.thinking).max() > 0
    same = jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), state, after)
    assert all(jax.tree.leaves(same))


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_also_fits_over_the_quickstart_and_the_7b_config(name):
    for base in ("quickstart", "qwen2.5-7b-math"):
        config = config_io.load([PRESETS.parent / f"{base}.yaml", PRESETS / f"{name}.yaml"])
        config_io.check(config, also=problems)


def test_every_method_has_a_preset():
    covered = {yaml.safe_load((PRESETS / f"{name}.yaml").read_text())["method"] for name in NAMES}
    assert covered == set(built_in_methods())


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_sets_the_curriculum_only_if_its_budgets_follow_it(name):
    preset = yaml.safe_load((PRESETS / f"{name}.yaml").read_text())
    if "curriculum" in preset:
        assert preset["budget"]["prior"] == "curriculum"
