"""Arms of the variance study: which are unbiased, by listing every group, and what they read."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.advantages import token_baseline
from bacr_jax.config import Config, CutsConfig
from research.variance.baselines import (
    ARMS,
    BY_NAME,
    Groups,
    SearchedArm,
    Setting,
    drawn_answers,
    returns_to_go,
)
from research.variance.control_variates import (
    fitted_slopes,
    length_weights,
    path_weights,
    regressors,
    weighted_mean,
)
from research.variance.gradient_pool import Drawn, Rollouts

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
    state = {"sigma2": 0.2, "error2": 0.05}
    square, product = [[[0.2, 0.1], [0.1, 0.1]]] * CUTS, [[0.1, 0.03], [-0.08, 0.02]]
    state |= {"optimal_square": square, "optimal_product": product}
    state |= {"optimal_spread": [0.001, 0.002]}
    state = {name: jnp.asarray(x, jnp.float32) for name, x in state.items()}
    names = [f"{arm.name}/{reading}" for arm in ARMS for reading in ("one", "several", "pooled")]
    slopes = {
        f"{arm.name}/{reading}": np.linspace(-0.5, 0.8, CUTS * len(arm.features)).reshape(CUTS, -1)
        for arm in ARMS
        if isinstance(arm, SearchedArm)
        for reading in ("one", "several", "pooled")
    }
    left = (state, jnp.array([0.2, 0.5]))
    return Setting(CONFIG, dict.fromkeys(names, left) | slopes)


PROBABILITY, SCORES, ANSWERS, THINKING = traces()
# Weights that depend on what was sampled, here as strongly as can be.
ENERGY = (SCORES**2).sum(-1)
TOKENS = np.stack([1 + (SCORES[:, 0, 0] > 0), 2 * THINKING - 1], 1).astype(int)
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
        tokens=TOKENS[INDEX],
        surprise=np.ones(shape),
        energy=ENERGY[INDEX],
        values={
            "constant": value(0.5, 0.6),
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


EXACT = [arm for arm in ARMS if not np.isnan(arm.factors(GROUP, CUTS)).any()]


@pytest.mark.parametrize("arm", EXACT, ids=lambda arm: arm.name)
def test_every_arm_has_the_expected_gradient_that_it_says(groups, arm):
    want = arm.factors(GROUP, CUTS)[:, None] * true_gradient()
    np.testing.assert_allclose(expectation(groups, arm, "several"), want, atol=2e-6)


@pytest.mark.parametrize("reading", ["one", "pooled"])
@pytest.mark.parametrize("name", ["brpo", "history", "everything"])
def test_sharing_answers_past_the_natural_end_changes_no_expectation(groups, name, reading):
    arm = BY_NAME[name]
    want = arm.factors(GROUP, CUTS)[:, None] * true_gradient()
    np.testing.assert_allclose(expectation(groups, arm, reading), want, atol=2e-6)


@pytest.mark.parametrize("name", ["opo", "token"])
def test_a_weighted_mean_that_holds_the_trace_leaves_no_multiple_of_the_gradient(groups, name):
    found = expectation(groups, BY_NAME[name], "several").ravel()
    g = true_gradient().ravel()
    scale = found @ g / (g @ g)
    assert 0 < scale < 0.8
    assert np.linalg.norm(found - scale * g) > 1e-3 * np.linalg.norm(g)
    assert np.isnan(BY_NAME[name].factors(GROUP, CUTS)).all()


@pytest.mark.parametrize("name", ["opo_loo", "token_loo"])
def test_in_a_group_of_three_the_others_weights_move_no_expected_gradient(name):
    """Of two traces the other one has all the weight; of three it matters how it is shared."""
    returns = returns_to_go(ANSWERS.mean(-1), Setting(CONFIG).weights)
    # One for all traces of the same tokens, with their mean return: baselines are linear in it.
    kinds, place = np.unique(SCORES.reshape(len(SCORES), -1), axis=0, return_inverse=True)
    chance = np.bincount(place, PROBABILITY)
    mean = np.zeros((len(kinds), CUTS))
    np.add.at(mean, place, PROBABILITY[:, None] * returns)
    mean /= chance[:, None]
    first = [np.flatnonzero(place == kind)[0] for kind in range(len(kinds))]
    weights = {
        "opo_loo": length_weights(TOKENS[first]),
        "token_loo": path_weights(ENERGY[first], TOKENS[first]),
    }[name]
    index = np.array(list(itertools.product(range(len(kinds)), repeat=3)))
    baseline = weighted_mean(mean[index], weights[index], loo=True)
    weighed = chance[index].prod(-1)[:, None, None, None] * SCORES[first][index]
    np.testing.assert_allclose((weighed * baseline[..., None]).sum((0, 1)), 0.0, atol=1e-12)
    assert (np.ptp(weights, axis=0) > 0).all() and np.abs(baseline).max() > 0.1


def test_only_arms_that_hold_their_own_reward_shrink_the_gradient():
    shrinking = {arm.name for arm in ARMS if (arm.factors(8, 4) != 1).any()}
    assert shrinking == {"group_mean", "brpo", "opo", "token"}
    np.testing.assert_allclose(BY_NAME["brpo"].factors(8, 4), [0.875, 0.90625, 0.9375, 0.96875])


def test_answers_are_compared_with_all_at_their_cut_or_where_there_is_one_with_the_group():
    factors = lambda name: [BY_NAME[name].answer_factor(8, answers) for answers in (4, 1)]
    assert factors("loo") == factors("brpo") == [0.75, 0.875]
    assert factors("none") == factors("value") == factors("token_loo") == [1.0, 1.0]
    assert np.isnan(factors("opo")).all()


class TestWeightedMeans:
    def test_opo_by_hand(self):
        tokens = np.array([[[1, 0], [1, 2], [3, 1]]])
        returns = np.array([[1.0, 0.0, 0.5]])[..., None] * np.ones(2)
        lengths = length_weights(tokens)
        np.testing.assert_array_equal(lengths[0, :, 0], [1, 3, 4])
        published = weighted_mean(returns, lengths, loo=False)
        np.testing.assert_allclose(published, 3 / 8)  # (1 + 0 + 2) / 8
        others = weighted_mean(returns, lengths, loo=True)
        np.testing.assert_allclose(others[0, :, 0], [2 / 7, 3 / 5, 1 / 4])

    def test_the_optimal_token_baseline_by_hand(self):
        energy = np.array([[[0.5, 0.0], [0.5, 1.0], [1.0, 2.0]]])
        tokens = np.array([[[4, 0], [4, 4], [4, 4]]])
        returns = np.array([[[1.0, 1.0], [0.0, 0.0], [0.5, 1.0]]])
        path = path_weights(energy, tokens)
        # The first trace has no token in the second segment, and no weight there.
        np.testing.assert_allclose(path[0], [[0.5, 0.0], [0.5, 1.5], [1.0, 3.0]])
        published = weighted_mean(returns, path, loo=False)
        np.testing.assert_allclose(published[0], [[0.5, 2 / 3]] * 3)
        np.testing.assert_allclose(
            published, token_baseline(jnp.asarray(returns), jnp.asarray(path)) * np.ones((1, 3, 1))
        )
        others = weighted_mean(returns, path, loo=True)
        np.testing.assert_allclose(others[0, :, 0], [1 / 3, 2 / 3, 0.5])
        np.testing.assert_allclose(others[0, :, 1], [2 / 3, 1.0, 0.0])

    def test_nothing_with_a_weight_is_0(self):
        nothing = weighted_mean(np.ones((1, 2, 1)), np.array([[[3.0], [0.0]]]), loo=True)
        np.testing.assert_array_equal(nothing[0, :, 0], [0.0, 1.0])


class TestReadings:
    GROUPS = Groups(
        by_answer=np.array([[[[1, 0], [0, 0]], [[1, 1], [0, 1]]]], np.float32),
        cuts=np.array([[[4, 8], [4, 8]]]),
        thinking=np.array([[8, 3]]),
        budgets=np.array([[8, 8]]),
        tokens=np.array([[[4, 4], [4, 0]]]),
        surprise=np.ones((1, 2, 2)),
        energy=np.ones((1, 2, 2)),
        values={},
    )

    def test_by_hand(self):
        np.testing.assert_allclose(self.GROUPS.outcomes("one"), [[[1, 0], [1, 1]]])
        np.testing.assert_allclose(self.GROUPS.outcomes("several"), [[[0.5, 0], [1, 0.5]]])
        np.testing.assert_allclose(self.GROUPS.outcomes("pooled"), [[[0.5, 0], [0.75, 0.75]]])

    def test_tokens_of_branches(self):
        sampled = np.array([[[[1, 2], [3, 4]], [[5, 6], [7, 8]]]])
        rollouts = {name: getattr(self.GROUPS, name) for name in Rollouts.__dataclass_fields__}
        drawn = Drawn(**rollouts, questions=np.zeros((1, 2), int), sampled=sampled)
        np.testing.assert_array_equal(drawn_answers(drawn, "one"), [[4, 5]])
        np.testing.assert_array_equal(drawn_answers(drawn, "pooled"), [[10, 26]])


def test_regression_finds_the_slopes_that_are_there():
    rng = np.random.default_rng(0)
    given = rng.normal(size=(50, 4, 3, 2))
    slopes = np.array([[1.0, -2.0], [0.5, 0.0], [0.0, 3.0]])
    weights = rng.integers(0, 5, (50, 4, 3))
    found = fitted_slopes(given, np.einsum("rgmf,mf->rgm", given, slopes), weights)
    np.testing.assert_allclose(found, slopes, atol=0.01)


def test_regressors_by_hand():
    outcomes, predicted = np.array([[[1.0, 0.0], [0.0, 1.0]]]), np.full((1, 2, 2), 0.5)
    residual, given = regressors(
        outcomes, predicted, np.array([1.0, 2.0]), ("previous", "others", "doubt", "level", "value")
    )
    np.testing.assert_allclose(residual, [[[-0.5, -1.0], [0.5, 1.0]]])
    np.testing.assert_allclose(given[0, 0], [[0.0, 0.5, 0.0, 1.0, 1.5], [0.5, 1.0, 1.0, 1.0, 1.0]])


def test_interior_regressors_are_0_at_both_ends_of_the_returns():
    names, weights = ("interior", "interior_tilt"), np.array([1.0, 2.0])
    of = lambda *p: regressors(np.ones((1, 1, 2)), np.array([[p]]), weights, names)[1][0, 0]
    # Also where a value head says more than there is to get.
    for end in (of(0.0, 0.0), of(1.0, 1.0), of(-0.2, -0.1), of(1.3, 1.1)):
        np.testing.assert_array_equal(end, 0.0)
    # Returns of at most 3 and 2: V is 2.4 and 1.8, shares of .8 and .9.
    np.testing.assert_allclose(of(0.6, 0.9), [[0.16, -0.096], [0.09, -0.072]])


def test_the_state_of_shrink_settles_at_the_moments_of_the_batch(groups):
    names = ("by_answer", "cuts", "thinking", "budgets", "tokens", "surprise", "energy")
    few = Groups(
        **{name: getattr(groups, name)[:64] for name in names},
        values={name: x[:64] for name, x in groups.values.items()},
    )
    state, _ = BY_NAME["shrink"].learned(Setting(CONFIG), few, "several")
    reward = few.outcomes("several") + 0.3 * np.diff(few.outcomes("several"), axis=-1, prepend=0)
    residual = reward - np.array([0.3 * 1.3, 0.6 + 0.3 * 0.3])
    np.testing.assert_allclose(state["sigma2"], residual.var(1, ddof=1).mean(), rtol=3e-3)
    assert BY_NAME["value"].learned(Setting(CONFIG), few, "several") is None
