"""Groups and budgets that a config asks for, by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.config import Config, io
from bacr_jax.config.settings import resolve
from bacr_jax.curriculum import init_curriculum
from bacr_jax.methods.budget_prior import budget_locations, question_weights, sample_budgets

SIZES = jnp.array([300, 100])


def of(*overrides):
    own = ("data.num_groups=2", "budget.min=256", "budget.max=4096", "rollout.group_size=3")
    config = io.override(Config(), [*own, "curriculum.mu0=1500", *overrides])
    return resolve(config).method


def state(updates=1):
    """Pass rates of a quarter and a half."""
    fresh = init_curriculum(2, mu0=1500.0)
    rates = jnp.array([0.25, 0.5])
    return dataclasses.replace(fresh, pass_rate=rates, updates=jnp.asarray(updates))


def test_locations_are_those_of_eq5_once_something_is_measured():
    config = of("curriculum.alpha=0.6", "curriculum.beta=0.3")
    # 1500 (1 - .6 / 4) + .3 (3 / 4) 4096, and with a half.
    np.testing.assert_allclose(budget_locations(config, state()), [2196.6, 1664.4], rtol=1e-6)
    np.testing.assert_array_equal(budget_locations(config, state(updates=0)), [1500.0, 1500.0])


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        # rho (1 - rho): 3/16 and 4/16.
        (["curriculum.size_weighted=false"], [3 / 7, 4 / 7]),
        (["curriculum.size_weighted=true"], [9 / 13, 4 / 13]),
        # Without the curriculum, as many of each group as there are.
        (["budget.prior=uniform"], [3 / 4, 1 / 4]),
    ],
)
def test_groups_are_weighted_by_eq6_under_the_curriculum_alone(overrides, expected):
    prior = ["budget.prior=curriculum", "curriculum.weight_epsilon=0"]
    found = question_weights(of(*prior, *overrides), state(), SIZES)
    np.testing.assert_allclose(found / found.sum(), expected, rtol=1e-6)


def test_every_prior_draws_within_its_range():
    draw = lambda *overrides: np.asarray(
        sample_budgets(of(*overrides), jax.random.key(0), state(), jnp.zeros(40, int))
    )
    assert (draw("budget.prior=fixed") == 4096).all()
    assert set(draw("budget.prior=choices", "budget.choices=[300, 700]").flat) == {300, 700}
    for prior in ("uniform", "curriculum"):
        found = draw(f"budget.prior={prior}")
        assert found.shape == (40, 3) and 256 <= found.min() < found.max() <= 4096
