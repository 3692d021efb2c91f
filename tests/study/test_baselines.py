"""Arms of the variance study: which are unbiased, by listing every group, and what they read."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.config import Config, CutsConfig
from bacr_jax.study.baselines import ARMS, BY_NAME, Groups, Setting, drawn_answers, settled_state
from bacr_jax.study.control_variates import Regression, regressors

GROUP, CUTS = 2, 2
CONFIG = dataclasses.replace(Config(), cuts=CutsConfig(count=CUTS))
FIRST, SECOND = np.array([0.4, 0.6]), np.array([0.3, 0.7])
# Probability of a right answer after one token, and after two; the second token 0 ends the trace.
RIGHT_1 = np.array([0.2, 0.7])
RIGHT_2 = np.array([[0.2, 0.4], [0.7, 0.95]])


def traces():
    """Every (z_1, z_2, two answers at each cut): probability, scores and fields of `Groups`."""
    cases = np.array(list(itertools.product(range(2), repeat=6)))
    z1, z2, answers = cases[:, 0], cases[:, 1], cases[:, 2:].reshape(-1, CUTS, 2)
    right = np.stack([RIGHT_1[z1], RIGHT_2[z1, z2]], -1)[..., None]
    chance = np.where(answers == 1, right, 1 - right).prod((1, 2))
    probability = FIRST[z1] * SECOND[z2] * chance
    scores = np.stack([np.eye(2)[z1] - FIRST, np.eye(2)[z2] - SECOND], 1)
    return probability, scores, answers.astype(np.float32), 1 + z2


def setting():
    """Moments and slopes that have nothing to do with these traces."""
    state = {"sigma2": 0.2, "error2": 0.05, "slope_xy": [0.1, 0.3], "slope_xx": [0.5, 0.6]}
    square, product = [[[0.2, 0.1], [0.1, 0.1]]] * CUTS, [[0.1, 0.03], [-0.08, 0.02]]
    state |= {"optimal_square": square, "optimal_product": product}
    state = {name: jnp.asarray(x, jnp.float32) for name, x in state.items()}
    names = [f"{arm.name}/{reading}" for arm in ARMS for reading in ("one", "several", "pooled")]
    slopes = {
        f"{arm.name}/{reading}": Regression(
            np.linspace(-0.5, 0.8, CUTS * len(arm.options["features"])).reshape(CUTS, -1)
        )
        for arm in ARMS
        if "features" in arm.options
        for reading in ("one", "several", "pooled")
    }
    return Setting(CONFIG, dict.fromkeys(names, state), slopes)


PROBABILITY, SCORES, ANSWERS, THINKING = traces()
INDEX = np.array(list(itertools.product(range(len(PROBABILITY)), repeat=GROUP)))
CHANCE = PROBABILITY[INDEX].prod(-1)


@pytest.fixture(scope="module")
def groups():
    shape = (*INDEX.shape, CUTS)
    value = lambda *p: np.broadcast_to(np.array(p, np.float32), shape)
    return Groups(
        by_answer=ANSWERS[INDEX],
        cuts=np.broadcast_to(np.array([1, 2]), shape),
        thinking=THINKING[INDEX],
        budgets=np.full(INDEX.shape, 2),
        tokens=np.ones(shape, int),
        surprise=np.ones(shape),
        values={
            "saved": value(0.1, 0.9),
            "cut": value(0.4, 0.4),
            "trace_and_cut": value(0.3, 0.6),
            "oracle": value(0.5, 0.66),
        },
        weighted=np.broadcast_to([0.1, -0.2], (len(INDEX), CUTS)),
    )


def expectation(groups, arm, reading):
    credit = np.asarray(arm.credit(setting(), groups, reading).thinking, np.float64)
    weighed = CHANCE[:, None, None, None] * SCORES[INDEX] * credit[..., None]
    return weighed.sum(0).mean(0)


def true_gradient():
    u = Setting(CONFIG).weights
    to_go = np.flip(np.cumsum(np.flip(u * ANSWERS.mean(-1), -1), -1), -1)
    return (PROBABILITY[:, None, None] * SCORES * to_go[..., None]).sum(0)


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_every_arm_has_the_expected_gradient_that_it_says(groups, arm):
    want = arm.factors(GROUP, CUTS)[:, None] * true_gradient()
    np.testing.assert_allclose(expectation(groups, arm, "several"), want, atol=2e-6)


@pytest.mark.parametrize("reading", ["one", "pooled"])
@pytest.mark.parametrize("name", ["brpo", "history", "everything"])
def test_sharing_answers_past_the_natural_end_changes_no_expectation(groups, name, reading):
    arm = BY_NAME[name]
    want = arm.factors(GROUP, CUTS)[:, None] * true_gradient()
    np.testing.assert_allclose(expectation(groups, arm, reading), want, atol=2e-6)


def test_only_arms_that_hold_their_own_reward_shrink_the_gradient():
    shrinking = {arm.name for arm in ARMS if (arm.factors(8, 4) != 1).any()}
    assert shrinking == {"group_mean", "brpo"}
    np.testing.assert_allclose(BY_NAME["brpo"].factors(8, 4), [0.875, 0.90625, 0.9375, 0.96875])


class TestReadings:
    GROUPS = Groups(
        by_answer=np.array([[[[1, 0], [0, 0]], [[1, 1], [0, 1]]]], np.float32),
        cuts=np.array([[[4, 8], [4, 8]]]),
        thinking=np.array([[8, 3]]),
        budgets=np.array([[8, 8]]),
        tokens=np.array([[[4, 4], [4, 0]]]),
        surprise=np.ones((1, 2, 2)),
        values={},
    )

    def test_by_hand(self):
        np.testing.assert_allclose(self.GROUPS.outcomes("one"), [[[1, 0], [1, 1]]])
        np.testing.assert_allclose(self.GROUPS.outcomes("several"), [[[0.5, 0], [1, 0.5]]])
        np.testing.assert_allclose(self.GROUPS.outcomes("pooled"), [[[0.5, 0], [0.75, 0.75]]])

    def test_tokens_of_branches(self):
        sampled = np.array([[[[1, 2], [3, 4]], [[5, 6], [7, 8]]]])
        np.testing.assert_array_equal(drawn_answers(self.GROUPS, sampled, "one"), [[4, 5]])
        np.testing.assert_array_equal(drawn_answers(self.GROUPS, sampled, "pooled"), [[10, 26]])


def test_regression_finds_the_slopes_that_are_there():
    rng = np.random.default_rng(0)
    given = rng.normal(size=(50, 4, 3, 2))
    slopes = np.array([[1.0, -2.0], [0.5, 0.0], [0.0, 3.0]])
    weights = rng.integers(0, 5, (50, 4, 3))
    found = Regression.fitted(given, np.einsum("rgmf,mf->rgm", given, slopes), weights)
    np.testing.assert_allclose(found.slopes, slopes, atol=0.01)


def test_regressors_by_hand():
    outcomes, predicted = np.array([[[1.0, 0.0], [0.0, 1.0]]]), np.full((1, 2, 2), 0.5)
    residual, given = regressors(
        outcomes, predicted, np.array([1.0, 2.0]), ("previous", "others", "doubt", "level", "value")
    )
    np.testing.assert_allclose(residual, [[[-0.5, -1.0], [0.5, 1.0]]])
    np.testing.assert_allclose(given[0, 0], [[0.0, 0.5, 0.0, 1.0, 1.5], [0.5, 1.0, 1.0, 1.0, 1.0]])


def test_the_states_of_shrink_and_history_settle_at_the_moments_of_the_batch(groups):
    names = ("by_answer", "cuts", "thinking", "budgets", "tokens", "surprise")
    few = Groups(
        **{name: getattr(groups, name)[:64] for name in names},
        values={name: x[:64] for name, x in groups.values.items()},
    )
    state = settled_state(BY_NAME["shrink"], Setting(CONFIG), few, "several")
    reward = few.outcomes("several") + 0.3 * np.diff(few.outcomes("several"), axis=-1, prepend=0)
    residual = reward - np.array([0.3 * 1.3, 0.6 + 0.3 * 0.3])
    np.testing.assert_allclose(state["sigma2"], residual.var(1, ddof=1).mean(), rtol=3e-3)
    assert settled_state(BY_NAME["value"], Setting(CONFIG), few, "several") is None
