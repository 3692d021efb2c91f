"""Gradient variance of the baselines, by enumerating every group an exact toy policy can sample.

A softmax policy over three responses with fixed rewards; groups of N responses are few enough to
list, so that means and variances of the gradient estimate (1/N) sum_i S_i A_i are exact. S_i is the
score of response i, "variance" the trace of the covariance.
"""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax import advantages
from research.variance.control_variates import (
    before,
    history_advantage,
    history_moments,
)

PROBS = np.array([0.2, 0.5, 0.3])
REWARDS = np.array([1.0, 0.0, 0.6])
SCORES = np.eye(3) - PROBS  # d log softmax / d logits
MU = PROBS @ REWARDS
EPS = REWARDS - MU
SIGMA2 = PROBS @ EPS**2
GRADIENT = (PROBS * EPS) @ SCORES
G2 = GRADIENT @ GRADIENT
NORMS = (SCORES**2).sum(-1)
F, H, KAPPA = PROBS @ NORMS, PROBS @ (NORMS * EPS**2), PROBS @ (NORMS * EPS)


def groups(n):
    """Every group of n responses and its probability."""
    index = np.array(list(itertools.product(range(3), repeat=n)))
    return index, PROBS[index].prod(-1)


def moments(index, probability, advantage):
    """Exact mean and variance of the gradient estimate, and variance of one advantage."""
    advantage = np.asarray(advantage, np.float64)
    estimate = (SCORES[index] * advantage[..., None]).mean(1)
    mean = probability @ estimate
    variance = probability @ ((estimate - mean) ** 2).sum(-1)
    spread = probability @ advantage[:, 0] ** 2 - (probability @ advantage[:, 0]) ** 2
    return mean, variance, spread


def rewards_of(index):
    return jnp.asarray(REWARDS[index], jnp.float32)


def loo_variance(n):
    return (H - G2) / n + (F * SIGMA2 + G2) / (n * (n - 1))


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("delta", [0.0, 0.3, -0.2])
def test_constant_baseline(n, delta):
    index, probability = groups(n)
    r = rewards_of(index)[:, :, None]
    a = advantages.bcae_advantage(r, jnp.full_like(r, MU + delta))[..., 0]
    mean, variance, _ = moments(index, probability, a)
    np.testing.assert_allclose(mean, GRADIENT, atol=1e-6)
    want = (H - G2 + delta**2 * F - 2 * delta * KAPPA) / n
    np.testing.assert_allclose(variance, want, rtol=1e-5)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_the_best_constant_saves_kappa_squared_over_f_and_n(n):
    index, probability = groups(n)

    def variance(delta):
        return moments(index, probability, REWARDS[index] - (MU + delta))[1]

    best = variance(KAPPA / F)
    np.testing.assert_allclose(variance(0.0) - best, KAPPA**2 / (F * n), rtol=1e-5)
    assert best < min(variance(KAPPA / F - 0.01), variance(KAPPA / F + 0.01))


@pytest.mark.parametrize("n", [2, 3, 5])
def test_leave_one_out_baseline(n):
    index, probability = groups(n)
    mean, variance, _ = moments(index, probability, advantages.rloo_advantage(rewards_of(index)))
    np.testing.assert_allclose(mean, GRADIENT, atol=1e-6)
    np.testing.assert_allclose(variance, loo_variance(n), rtol=1e-5)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_group_mean_is_leave_one_out_shrunk(n):
    index, probability = groups(n)
    a = advantages.group_advantage(rewards_of(index))
    mean, variance, _ = moments(index, probability, a)
    np.testing.assert_allclose(mean, (1 - 1 / n) * GRADIENT, atol=1e-6)
    np.testing.assert_allclose(variance, (1 - 1 / n) ** 2 * loo_variance(n), rtol=1e-5)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_the_papers_proposition_1_fails_and_what_holds_instead(n):
    """A perfect V(q, b) has MORE advantage variance than the group mean, not less.

    V is constant given (q, b), so Cov[R, V] = 0 and Var[R - V] = Var[R] > Var[R](1 - 1/N): the
    inequality of the proposition points the other way for every N. Nor does it matter: the group
    mean's advantages are small because each contains its own reward. At equal expected
    gradient the perfect value does have less gradient variance, by a term of relative size 1/N.
    """
    index, probability = groups(n)
    r = rewards_of(index)
    perfect = jnp.full_like(r, MU)

    _, gradient_bcae, spread_bcae = moments(index, probability, r - perfect)
    mean_group, gradient_group, spread_group = moments(
        index, probability, advantages.group_advantage(r)
    )
    _, _, spread_loo = moments(index, probability, advantages.rloo_advantage(r))
    np.testing.assert_allclose(spread_bcae, SIGMA2, rtol=1e-5)
    np.testing.assert_allclose(spread_group, SIGMA2 * (1 - 1 / n), rtol=1e-5)
    np.testing.assert_allclose(spread_loo, SIGMA2 * n / (n - 1), rtol=1e-5)
    assert spread_group < spread_bcae < spread_loo

    scale = mean_group @ GRADIENT / G2
    assert gradient_bcae < gradient_group / scale**2
    saving = gradient_group / scale**2 - gradient_bcae
    np.testing.assert_allclose(saving, (F * SIGMA2 + G2) / (n * (n - 1)), rtol=1e-4)


@pytest.mark.parametrize("n", [3, 5])
def test_a_learned_value_beats_leave_one_out_exactly_below_its_error_threshold(n):
    index, probability = groups(n)
    threshold = np.sqrt(SIGMA2 / (n - 1) + G2 / (F * (n - 1)))
    for factor, better in ((0.95, True), (1.05, False)):
        # An error of either sign, so that its cross term with the reward averages out.
        variance = np.mean(
            [
                moments(index, probability, rewards_of(index) - (MU + sign * factor * threshold))[1]
                for sign in (1, -1)
            ]
        )
        assert (variance < loo_variance(n)) == better


@pytest.mark.parametrize("n", [3, 5])
@pytest.mark.parametrize("error", [0.1, 0.3])
def test_shrinkage_between_value_and_group(n, error):
    """Excess variance (F/N) [w^2 v^2 + (1-w)^2 s^2], least at w* = s^2 / (s^2 + v^2)."""
    index, probability = groups(n)
    r = rewards_of(index)

    def variance(prior_strength):
        each = []
        for sign in (1, -1):
            v = jnp.full_like(r, MU + sign * error)
            c = advantages.shrink_baseline(r, v, prior_strength=prior_strength)
            mean, var, _ = moments(index, probability, r - c)
            np.testing.assert_allclose(mean, GRADIENT, atol=1e-6)
            each.append(var)
        return np.mean(each)

    s2 = SIGMA2 / (n - 1)
    for n0 in (0.5, 2.0, 10.0):
        w = n0 / (n0 + n - 1)
        excess = F * (w**2 * error**2 + (1 - w) ** 2 * s2) / n
        excess += (1 - w) ** 2 * G2 / (n * (n - 1))
        np.testing.assert_allclose(variance(n0), (H - G2) / n + excess, rtol=1e-5)

    best = SIGMA2 / error**2
    np.testing.assert_allclose(best / (best + n - 1), s2 / (s2 + error**2))
    assert variance(best) < min(variance(0.0), variance(jnp.inf))


class TestMixedBudgets:
    """Each response has its own budget, drawn independently: reward = quality x budget."""

    BUDGETS = np.array([0.5, 1.0])
    BUDGET_PROBS = np.array([0.6, 0.4])
    N = 3

    def enumerate(self):
        """Every (responses, budgets) of a group, its probability, rewards and true values."""
        pairs = np.array(list(itertools.product(range(3), range(2))))
        chosen = np.array(list(itertools.product(range(6), repeat=self.N)))
        index, budget = pairs[chosen, 0], pairs[chosen, 1]
        probability = (PROBS[index] * self.BUDGET_PROBS[budget]).prod(-1)
        rewards = REWARDS[index] * self.BUDGETS[budget]
        values = MU * self.BUDGETS[budget]
        as_jax = lambda x: jnp.asarray(x, jnp.float32)
        return index, probability, as_jax(rewards), as_jax(values)

    def gradient(self):
        return GRADIENT * (self.BUDGET_PROBS @ self.BUDGETS)

    def test_error_of_the_mixed_leave_one_out_mean(self):
        _, probability, r, v = self.enumerate()
        means = MU * self.BUDGETS
        tau2 = self.BUDGET_PROBS @ means**2 - (self.BUDGET_PROBS @ means) ** 2
        within = self.BUDGET_PROBS @ (SIGMA2 * self.BUDGETS**2)
        baseline = np.asarray(r - advantages.rloo_advantage(r), np.float64)
        error = probability @ (baseline[:, 0] - np.asarray(v, np.float64)[:, 0]) ** 2
        np.testing.assert_allclose(error, (tau2 * self.N + within) / (self.N - 1), rtol=1e-5)

    @pytest.mark.parametrize("rates", [(0.2, 0.8), (0.5, 0.5), (0.1, 0.9)])
    def test_saving_of_a_perfect_value_by_the_share_of_variance_between_budgets(self, rates):
        """1 - (1 - c)(1 - 1/N) of the mixed mean's noise, where rewards do not depend on scores.

        Two responses with opposite scores, two budgets, and outcomes with the budget's pass rate.
        """
        rates, n = np.array(rates), self.N
        cases = np.array(list(itertools.product((-1, 1), range(2), (0, 1))))
        weights = self.BUDGET_PROBS[cases[:, 1]] / 2
        weights *= np.where(cases[:, 2] == 1, rates[cases[:, 1]], 1 - rates[cases[:, 1]])
        chosen = np.array(list(itertools.product(range(len(cases)), repeat=n)))
        probability = weights[chosen].prod(-1)
        scores, budgets, outcomes = np.moveaxis(cases[chosen], -1, 0)

        def noise(advantage):
            return probability @ (scores * np.asarray(advantage)).mean(1) ** 2

        r = jnp.asarray(outcomes, jnp.float32)
        mixed = noise(advantages.rloo_advantage(r))
        perfect = noise(r - rates[budgets])
        between = self.BUDGET_PROBS @ rates**2 - (self.BUDGET_PROBS @ rates) ** 2
        share = between / (between + self.BUDGET_PROBS @ (rates * (1 - rates)))
        np.testing.assert_allclose(1 - perfect / mixed, 1 - (1 - share) * (1 - 1 / n), rtol=1e-5)

    def test_the_claimed_savings_need_a_fifth_or_more_of_the_variance_between_budgets(self):
        """Of groups of 8, as in the paper: the shares that docs/theory.md names."""
        shares = [round(1 - (1 - saving) / (1 - 1 / 8), 2) for saving in (0.3, 0.5)]
        assert shares == [0.2, 0.43]

    def test_all_baselines_without_the_own_reward_stay_unbiased(self):
        index, probability, r, v = self.enumerate()
        for c in (
            r - advantages.rloo_advantage(r),
            v,
            advantages.residual_loo_baseline(r, v),
            advantages.shrink_baseline(r, v, prior_strength=4.0),
        ):
            mean, _, _ = moments(index, probability, r - c)
            np.testing.assert_allclose(mean, self.gradient(), atol=1e-6)

    def test_values_of_the_own_budget_and_their_leave_one_out_residuals_beat_mixing_budgets(self):
        index, probability, r, v = self.enumerate()
        _, mixed, _ = moments(index, probability, advantages.rloo_advantage(r))
        _, oracle, _ = moments(index, probability, r - v)
        residual = advantages.residual_loo_baseline(r, v + 0.4)
        _, robust, _ = moments(index, probability, r - residual)
        assert oracle < robust < mixed


class TestHistory:
    """Two thinking tokens, an answer after each; the first choice mostly decides both outcomes."""

    FIRST, SECOND = np.array([0.4, 0.6]), np.array([0.5, 0.5])
    RIGHT_1 = np.array([0.1, 0.8])  # P(r_1 = 1 | z_1)
    RIGHT_2 = np.array([[0.05, 0.3], [0.7, 0.95]])  # P(r_2 = 1 | z_1, z_2)

    def enumerate(self):
        """Every (z_1, z_2, r_1, r_2), its probability and outcomes [1, N, 2]."""
        cases = np.array(list(itertools.product(range(2), repeat=4)))
        z1, z2, r1, r2 = cases.T
        chance = lambda p, r: np.where(r, p, 1 - p)
        probability = self.FIRST[z1] * self.SECOND[z2]
        probability = probability * chance(self.RIGHT_1[z1], r1)
        probability = probability * chance(self.RIGHT_2[z1, z2], r2)
        outcomes = jnp.asarray(np.stack([r1, r2], -1)[None], jnp.float32)
        return z1, z2, probability, outcomes

    def advantages(self, slope):
        _, _, _, r = self.enumerate()
        credit = advantages.to_go(r - 0.5, jnp.array([0.5, 0.5]))
        score_norm_proxy = before(r - 0.5)
        return history_advantage(credit, score_norm_proxy, jnp.array([0.0, slope]))[0]

    def second_token(self, slope):
        """Exact mean and variance of the second token's part of the gradient."""
        _, z2, probability, _ = self.enumerate()
        estimate = (np.eye(2)[z2] - self.SECOND) * np.asarray(self.advantages(slope))[:, 1:]
        mean = probability @ estimate
        return mean, probability @ ((estimate - mean) ** 2).sum(-1)

    def test_the_previous_outcome_leaves_the_gradient_as_it_is_and_takes_variance_away(self):
        plain, variance = self.second_token(0.0)
        _, _, probability, r = self.enumerate()
        credit = advantages.to_go(r - 0.5, jnp.array([0.5, 0.5]))
        score_norm_proxy = before(r - 0.5)
        weigh = lambda x: float(probability @ np.asarray(x)[0, :, 1])
        slope = weigh(credit * score_norm_proxy) / weigh(score_norm_proxy**2)
        assert slope > 0.1
        corrected, smaller = self.second_token(slope)
        np.testing.assert_allclose(corrected, plain, atol=1e-7)
        assert smaller < 0.9 * variance
        # Of all slopes of a linear correction this is nearly the best, the exact one being
        # weighted by the score's norm, which is constant here.
        for other in (0.8 * slope, 1.2 * slope):
            assert self.second_token(other)[1] > smaller

    def test_the_first_segment_has_no_history(self):
        np.testing.assert_array_equal(self.advantages(0.0)[:, 0], self.advantages(0.9)[:, 0])

    def test_moments_by_hand(self):
        credit = jnp.array([[[1.0, 2.0], [0.0, -1.0]]])
        score_norm_proxy = jnp.array([[[0.0, 0.5], [0.0, -0.5]]])
        both, square = history_moments(credit, score_norm_proxy)
        np.testing.assert_allclose(both, [0.0, 0.75])
        np.testing.assert_allclose(square, [0.0, 0.25])


@pytest.mark.parametrize("segment", range(4))
def test_the_published_brpo_shrinks_each_segments_gradient_by_its_own_share(segment):
    """d A[g, s] / d (own later outcomes) = 1 - (M - s) / (M G), and 1 when left out."""
    from bacr_jax.methods.anytime import brpo_advantage

    cuts, group = 4, 8
    prior = jnp.full(cuts, 1 / cuts)

    def own_part(r_last, loo):
        r = jnp.zeros((1, group, cuts)).at[0, 0, 3].set(r_last)
        return brpo_advantage(r, prior, loo=loo)[0, 0, segment]

    slope = [(own_part(1.0, loo) - own_part(0.0, loo)) * cuts for loo in (False, True)]
    np.testing.assert_allclose(slope, [1 - (cuts - segment) / (cuts * group), 1.0], rtol=1e-6)
