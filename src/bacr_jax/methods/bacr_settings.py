"""Lists the published settings of BACR, checks settings, and recommends changes."""

import math
from collections.abc import Iterator

import numpy as np

from bacr_jax import rewards
from bacr_jax.config.settings import MethodSettings
from bacr_jax.config.values import written
from bacr_jax.methods.grpo_family import needs_a_group
from bacr_jax.methods.method import Published
from bacr_jax.methods.published import given_by

# Baselines that compare the responses to the same question, so they need at least two of them.
_COMPARES_THE_GROUP = ("group", "residual_loo", "shrink", "optimal_token")

# All settings prescribed by the paper. configs/methods/bacr-paper.yaml sets all of them.
PUBLISHED = {
    "conditioning.budget_input": Published("embedding", "Eq. 2, 3"),
    "conditioning.sharing": Published("shared", "Eq. 2 has no layer index"),
    "conditioning.positions": Published("all", "Eq. 3"),
    "conditioning.input": Published("raw", "Eq. 2"),
    "conditioning.gate": Published("sigmoid", "Eq. 3"),
    "conditioning.gate_bias": Published(0.0, "Eq. 3"),
    "budget.prior": Published("curriculum", "Eq. 4"),
    "budget.assign": Published("independent", "Algorithm 1: G budgets per question"),
    "curriculum.alpha": Published(0.6, "its settings"),
    "curriculum.beta": Published(0.3, "its settings"),
    "curriculum.clip_mu": Published(False, "Eq. 5"),
    "curriculum.pass_rate": Published("epoch", "Algorithm 1"),
    "curriculum.update_every": Published(None, "Algorithm 1: after every epoch"),
    "curriculum.weight_epsilon": Published(0.0, "Eq. 6"),
    "curriculum.size_weighted": Published(False, "Eq. 6"),
    "cuts.count": Published(4, "b/4, b/2, 3b/4, b"),
    "cuts.kind": Published("even", "appendix: b/4, b/2, 3b/4, b"),
    "cuts.weights": Published("uniform", "Eq. 9"),
    "reward.dense": Published(True, "Eq. 7"),
    "reward.coefficient": Published(0.3, "its settings"),
    "advantage.baseline": Published("value", "Eq. 10"),
    "advantage.credit": Published("trajectory", "Eq. 15: one advantage a trace"),
    "advantage.normalise": Published("group", "Eq. 14"),
    "advantage.floor": Published(0.1, "a small constant; the number is ours"),
    "advantage.score_weighted": Published(False, "Eq. 10"),
    "advantage.same_shift_for_batch": Published(False, "Eq. 10"),
    "advantage.score_by_budget": Published(False, "Eq. 10"),
    "value.input": Published("cut", "Eq. 10, 12: R(q, t, b) and V(q, b) share their b"),
    "value.stop_gradient": Published(False, "Eq. 16 is one joint loss"),
    "value.inner_steps": Published(0, "Eq. 16: one joint step"),
    "value.warmup_iterations": Published(0, "Algorithm 1 has none"),
    "optimizer.single_rate": Published(True, "its settings: one rate"),
    "loss.clip_low": Published(0.2, "its settings"),
    "loss.clip_high": Published(0.2, "its settings"),
    "loss.ratio": Published("sequence", "Eq. 15"),
    "loss.aggregate": Published("seq_mean_token_mean", "Eq. 15: each trace once"),
    "loss.value_coef": Published(0.5, "its settings"),
    "loss.entropy_coef": Published(0.01, "its settings"),
    "loss.kl_coef": Published(0.0, "Eq. 16 has no such term"),
}


def problems(config: MethodSettings) -> Iterator[str]:
    """Yields an error message for each setting that is incompatible with the method."""
    advantage = config.advantage
    if advantage.baseline in _COMPARES_THE_GROUP:
        yield from needs_a_group(config, f"advantage.baseline={advantage.baseline}")
    if advantage.normalise == "group":
        yield from needs_a_group(config, "advantage.normalise=group")
    yield from _steep_weights(config)
    if config.loss.ratio == "sequence" and advantage.credit != "trajectory":
        yield (
            f"advantage.credit={advantage.credit} assigns a separate advantage to each segment, "
            "but loss.ratio=sequence has one ratio for the whole response, so the advantages "
            "would be added up; set advantage.credit=trajectory, or loss.ratio=token"
        )
    yield from _score_weighting_problems(config)
    yield from _optimal_token_problems(config)


def _score_weighting_problems(config: MethodSettings) -> Iterator[str]:
    advantage = config.advantage
    if advantage.score_weighted and advantage.credit not in ("to_go", "answer_literal"):
        yield (
            "advantage.score_weighted=true needs advantages that sum the rewards after each "
            f"segment, but advantage.credit is {advantage.credit}; set advantage.credit=to_go"
        )
    if advantage.score_weighted and advantage.normalise == "group":
        yield (
            "advantage.score_weighted=true needs the same scale for all questions, but "
            "advantage.normalise=group scales each question separately; set "
            "advantage.normalise=batch_rms"
        )
    if advantage.same_shift_for_batch and not advantage.score_weighted:
        yield (
            "advantage.same_shift_for_batch=true has no effect without "
            "advantage.score_weighted=true; set both, or neither"
        )
    has_running_moments = advantage.score_weighted or advantage.baseline == "constant"
    if advantage.score_by_budget and not has_running_moments:
        yield (
            "advantage.score_by_budget=true has no effect without advantage.score_weighted=true "
            "or advantage.baseline=constant; set one of them, or set "
            "advantage.score_by_budget=false"
        )


def _optimal_token_problems(config: MethodSettings) -> Iterator[str]:
    advantage = config.advantage
    if advantage.baseline != "optimal_token":
        return
    if advantage.score_weighted:
        yield (
            "advantage.score_weighted=true can't be combined with "
            "advantage.baseline=optimal_token, which already computes a baseline per token; set "
            "advantage.score_weighted=false"
        )
    if advantage.credit not in ("to_go", "answer_literal"):
        yield (
            f"advantage.credit={advantage.credit}: advantage.baseline=optimal_token needs "
            "advantages that sum the rewards after each token; set advantage.credit=to_go"
        )


def advice(config: MethodSettings) -> Iterator[str]:
    """Yields a recommendation for each setting that works but should be changed."""
    if not config.advantage.score_weighted or config.loss.importance_cap is not None:
        return
    if config.model.compute_dtype != "float32":
        key = "model.compute_dtype"
    elif config.train.minibatches > 1:
        key = "train.minibatches"
    else:
        return
    yield (
        "advantage.score_weighted=true: the mean of the advantages is not 0, and with "
        f"{key}={written(given_by(config, key))} the probabilities of sampler and learner differ, "
        "which together bias the gradient; set loss.importance_cap=2"
    )


def _steep_weights(config: MethodSettings) -> Iterator[str]:
    """Yields an error message if the objective punishes a correct answer at some truncation point.

    This happens if `cuts.weights` increase too steeply from one truncation point to the next.
    """
    cuts = config.cuts
    reward = config.reward
    if not reward.dense:
        return
    try:
        weights = rewards.cut_shares(cuts.weights, cuts.count)
    except ValueError:
        return  # An invalid list is reported by the check of cuts.weights.
    coefficients = rewards.outcome_coefficients(weights, coefficient=reward.coefficient)
    punished_cuts = np.flatnonzero(coefficients < -1e-6)
    if not punished_cuts.size:
        return
    j = punished_cuts[0]
    # Rounded down to three digits, so that the suggested value passes this check.
    largest = math.floor(1e3 * weights[j] / (weights[j + 1] - weights[j])) / 1e3
    yield (
        f"cuts.weights={written(cuts.weights)}: with "
        f"reward.coefficient={written(reward.coefficient)}, a right answer at truncation point "
        f"{j + 1} would reduce the total reward, because a wrong answer there increases the "
        f"progress reward at truncation point {j + 2}; set reward.coefficient to at most "
        f"{largest:g}, reward.dense=false, or flatter weights such as [.12, .12, .16, .6]"
    )
