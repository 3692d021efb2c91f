"""BACR: every combination of its parts, from config to advantages, and what it refuses."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax import curriculum
from bacr_jax.config.settings import resolve
from bacr_jax.methods import load_method
from methods_world import credit_of, load


@pytest.mark.parametrize(
    "parts",
    itertools.product([True, False], repeat=4),
    ids=lambda parts: "".join("ny"[p] for p in parts),
)
def test_all_sixteen_combinations_of_the_four_parts_give_finite_credit(tmp_path, parts):
    told, curriculum, dense, value = parts
    config = load(
        tmp_path,
        "bacr-full",
        f"conditioning.budget_input={'embedding' if told else 'none'}",
        f"budget.prior={'curriculum' if curriculum else 'uniform'}",
        f"reward.dense={str(dense).lower()}",
        f"advantage.baseline={'value' if value else 'group'}",
    )
    method, batch, _, rewards, credit, _ = credit_of(config)
    assert (method.conditioned, method.uses_value) == (told, value)
    step = np.diff(batch.outcomes, axis=-1, prepend=0.0)
    expected = batch.outcomes + (0.3 if dense else 0.0) * step
    np.testing.assert_allclose(rewards, expected, atol=1e-6)
    if not value:
        np.testing.assert_allclose(credit.thinking.sum(1), 0.0, atol=1e-5)
    assert np.isfinite(credit.thinking).all() and np.isfinite(credit.answers).all()


def test_a_trace_has_one_advantage_and_each_of_its_answers_has_it_once(tmp_path):
    """A natural end before the last cuts leaves them one answer."""
    config = load(tmp_path, "bacr-paper")
    _, batch, _, _, credit, _ = credit_of(config)
    np.testing.assert_array_equal(credit.thinking, credit.thinking[..., :1] * np.ones(4))
    reached = np.minimum(batch.cuts, np.asarray(batch.thinking)[..., None])
    first = np.diff(reached, axis=-1, prepend=-1) > 0
    assert not first.all()
    np.testing.assert_array_equal(credit.answers, np.where(first, credit.thinking, 0.0))


def test_budgets_come_from_the_list_of_choices(tmp_path):
    config = load(tmp_path, "bacr-full", "budget.prior=choices", "budget.choices=[8, 12]")
    method = load_method(resolve(config).method)
    state = curriculum.init_curriculum(4, mu0=10.0)
    budgets = method.sample_budgets(jax.random.key(0), state, jnp.arange(4))
    assert budgets.shape == (4, config.rollout.group_size)
    assert set(np.unique(budgets)) == {8, 12}
    # No curriculum: questions are asked as often as there are of each group.
    sizes = jnp.array([1, 2, 3, 4])
    np.testing.assert_allclose(method.question_weights(state, sizes), sizes / 10, rtol=1e-6)


@pytest.mark.parametrize("baseline", ["value", "group", "residual_loo", "shrink"])
@pytest.mark.parametrize("normalise", ["batch_rms", "group", "none"])
def test_a_group_of_equal_outcomes_gives_finite_advantages(tmp_path, baseline, normalise):
    config = load(
        tmp_path,
        "bacr-full",
        f"advantage.baseline={baseline}",
        f"advantage.normalise={normalise}",
    )
    outcomes = np.ones((4, 4, 4))
    _, _, _, _, credit, _ = credit_of(config, outcomes=outcomes)
    assert np.isfinite(credit.thinking).all()
    assert np.abs(credit.thinking).max() <= 1.3 / 0.1
