"""Budget-adaptive curriculum reasoning: four parts, each a switch of the config.

part                               switch
budget-conditioned unified policy  conditioning.told: embedding | words | both | nothing
curriculum-aware scheduler         budget.prior: curriculum | uniform | choices | fixed
truncation-aware dense reward      reward.dense
budget-conditioned advantages      advantage.baseline: value | shrink | group | ...
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from bacr_jax import advantages, rewards
from bacr_jax.config import Config, derived
from bacr_jax.config.values import written
from bacr_jax.methods.budget_prior import question_weights, sample_budgets
from bacr_jax.methods.grpo_family import cut_points, group_mean, needs_a_group
from bacr_jax.methods.method import Advantages, GroupBatch, Method, PerCut, Published
from bacr_jax.methods.published import given_by

# Decay per iteration of the moments behind `shrink` and `score_weighted`: about the last ten count.
_MOMENT_DECAY = 0.9
# Baselines that compare the rollouts of a question.
_OF_THE_GROUP = ("group", "residual_loo", "shrink", "optimal_token")
# Baselines without a value head.
_WITHOUT_VALUE = ("group", "constant", "optimal_token", "batch", "same_budget")

# The letter of the paper, where it says something (configs/methods/bacr-paper.yaml).
PUBLISHED = {
    "conditioning.told": Published("embedding", "Eq. 2, 3"),
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
    "cuts.weights": Published("uniform", "Eq. 9"),
    "reward.dense": Published(True, "Eq. 7"),
    "reward.coefficient": Published(0.3, "its settings"),
    "advantage.baseline": Published("value", "Eq. 10"),
    "advantage.credit": Published("trajectory", "Eq. 15: one advantage a trace"),
    "advantage.normalise": Published("group", "Eq. 14"),
    "advantage.floor": Published(0.1, "a small constant; the number is ours"),
    "advantage.score_weighted": Published(False, "Eq. 10"),
    "advantage.score_uniform": Published(False, "Eq. 10"),
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

# Moments by name; None where nothing needs any.
State = dict[str, Array] | None


def make(config: Config) -> Method:
    """BACR with the parts that the config switches on."""
    bind = lambda function: functools.partial(function, config)
    return Method(
        name="BACR",
        conditioned=config.conditioning.embeds,
        uses_value=config.advantage.baseline not in _WITHOUT_VALUE,
        question_weights=bind(question_weights),
        sample_budgets=bind(sample_budgets),
        cuts=bind(cut_points),
        rewards=bind(dense_rewards),
        advantages=bind(make_advantages),
        init_state=bind(init_state),
        update=bind(update),
        metrics=bind(metrics),
        needs_path=config.advantage.baseline == "optimal_token",
        follows_prior=True,
        published=PUBLISHED,
    )


def problems(config: Config) -> Iterator[str]:
    """What is wrong with the settings of this method."""
    advantage = config.advantage
    if advantage.baseline in _OF_THE_GROUP:
        yield from needs_a_group(config, f"advantage.baseline={advantage.baseline}")
    if advantage.normalise == "group":
        yield from needs_a_group(config, "advantage.normalise=group")
    yield from _steep_weights(config)
    if config.loss.ratio == "sequence" and advantage.credit != "trajectory":
        yield (
            f"advantage.credit={advantage.credit}: loss.ratio=sequence weighs a trace as a whole, "
            "and credit by segment would be added up in it; write advantage.credit=trajectory, or "
            "loss.ratio=token"
        )
    if advantage.score_weighted and advantage.credit not in ("to_go", "answer_literal"):
        yield (
            "advantage.score_weighted=true: needs credit that starts at the segment, found "
            f"advantage.credit={advantage.credit}; write to_go"
        )
    if advantage.score_weighted and advantage.normalise == "group":
        yield (
            "advantage.score_weighted=true: the baseline with the least noise is that of one scale "
            "for all questions, and advantage.normalise=group gives each its own; write "
            "advantage.normalise=batch_rms"
        )
    for name in ("score_uniform", "score_by_budget"):
        if getattr(advantage, name) and not advantage.score_weighted:
            yield f"advantage.{name}=true: moves nothing without advantage.score_weighted=true"
    if advantage.baseline == "optimal_token":
        if advantage.score_weighted:
            yield (
                "advantage.score_weighted=true: advantage.baseline=optimal_token has its own "
                "number for every token; write advantage.score_weighted=false"
            )
        if advantage.credit not in ("to_go", "answer_literal"):
            yield (
                f"advantage.credit={advantage.credit}: advantage.baseline=optimal_token weighs "
                "what comes after each token; write to_go"
            )


def advice(config: Config) -> Iterator[str]:
    """What these settings would do better with, one line each."""
    half, several = config.model.compute_dtype != "float32", config.train.minibatches > 1
    if config.advantage.score_weighted and config.loss.importance_cap is None and (half or several):
        key = "model.compute_dtype" if half else "train.minibatches"
        yield (
            f"advantage.score_weighted=true: advantages are not 0 on average, and with {key}="
            f"{written(given_by(config, key))} sampler and learner differ, which then biases the "
            "gradient; write loss.importance_cap=2"
        )


def _steep_weights(config: Config) -> Iterator[str]:
    """Weights under which the objective pays for a wrong answer at some cut."""
    cuts, reward = config.cuts, config.reward
    if not reward.dense:
        return
    try:
        weights = rewards.cut_shares(cuts.weights, cuts.count)
    except ValueError:  # a list that is no list of weights, which has a line of its own
        return
    u = rewards.outcome_coefficients(weights, coefficient=reward.coefficient)
    for j in np.flatnonzero(u < -1e-6)[:1]:
        # Rounded down: what is to be written must be taken.
        most = math.floor(1e3 * weights[j] / (weights[j + 1] - weights[j])) / 1e3
        yield (
            f"cuts.weights={written(cuts.weights)}: with reward.coefficient="
            f"{written(reward.coefficient)} a right answer at cut {j + 1} would be punished, "
            f"since losing it pays for progress at cut {j + 2}; write reward.coefficient of at "
            f"most {most:g}, reward.dense=false, or flatter weights such as "
            "[.12, .12, .16, .6]"
        )


# --- what it is worth -----------------------------------------------------------------------------


def coefficient_of(config: Config) -> float:
    """Lambda of Eq. 7; 0 without the dense reward."""
    return config.reward.coefficient if config.reward.dense else 0.0


def _weights(config: Config) -> Float[Array, "M"]:
    return rewards.cut_weights(config.cuts.weights, config.cuts.count)


def dense_rewards(config: Config, state: State, batch: GroupBatch) -> PerCut:
    """Rewards of Eq. 7; the outcomes alone without `reward.dense`."""
    return rewards.dense_reward(batch.outcomes, coefficient=coefficient_of(config))


def baselines(
    config: Config, state: State, batch: GroupBatch, reward: PerCut, values: PerCut | None
) -> tuple[PerCut, PerCut]:
    """What is subtracted from R, and the probability of a right answer that it implies."""
    kind = config.advantage.baseline
    if kind == "group":
        return group_mean(reward), group_mean(batch.outcomes)
    if kind == "optimal_token":
        weights = _path_at_cuts(batch)
        mean = lambda x: jnp.broadcast_to(advantages.token_baseline(x, weights), x.shape)
        return mean(reward), mean(batch.outcomes)
    if kind in ("batch", "same_budget"):
        budgets = batch.budgets if kind == "same_budget" else jnp.zeros_like(batch.budgets)
        return (
            advantages.same_budget_mean(reward, budgets),
            advantages.same_budget_mean(batch.outcomes, budgets),
        )
    if kind == "constant":
        values = _running_mean(config, state, batch, reward)
    assert values is not None
    baseline = values
    if kind == "residual_loo":
        baseline = advantages.residual_loo_baseline(reward, values)
    elif kind == "shrink":
        strength = _prior_strength(state)
        baseline = advantages.shrink_baseline(reward, values, prior_strength=strength)
    implied = advantages.correctness_from_value(baseline, coefficient=coefficient_of(config))
    return baseline, implied


def _path_at_cuts(batch: GroupBatch) -> PerCut:
    """Squared norms of a trace's scores, summed up to each cut."""
    assert batch.path is not None
    within = jnp.arange(batch.path.shape[-1]) < batch.cuts[..., None]
    return jnp.where(within, batch.path[..., None, :], 0.0).max(-1)


def _running_mean(config: Config, state: State, batch: GroupBatch, reward: PerCut) -> PerCut:
    """Mean reward at each cut of earlier batches; in the first, of the other questions."""
    assert state is not None
    others = jax.vmap(advantages.other_questions_mean, -1, -1)(reward[..., None, :])
    if (bins := _num_bins(config)) > 1:
        others = jnp.tile(others, bins)
    known = state["reward_mean"] / jnp.maximum(state["reward_seen"], 1e-6)
    mean = jnp.where(state["reward_seen"] > 0, known, others)
    shape = (*reward.shape[:2], mean.shape[-1])
    return _of_own_bin(config, batch, jnp.broadcast_to(mean[:, None], shape))


def _num_bins(config: Config) -> int:
    """Doublings of the budget that have running numbers of their own; 1: all budgets share them."""
    low, high = derived.prior_range(config)
    return max(math.ceil(math.log2(high / low)), 1) if config.advantage.score_by_budget else 1


def _bins(config: Config, batch: GroupBatch) -> Float[Array, "Q G K one"]:
    """1 for the doubling that a trace's budget is in."""
    count = _num_bins(config)
    # Integers: a logarithm would put the doublings themselves on either side.
    starts = derived.prior_range(config)[0] * 2 ** np.arange(1, count)
    place = (batch.budgets[..., None] >= starts.astype(np.int32)).sum(-1)
    return jax.nn.one_hot(place, count)[..., None]


def _by_bin(config: Config, batch: GroupBatch, x: PerCut) -> Float[Array, "Q G N"]:
    """Numbers per cut as numbers per doubling and cut, 0 for those that a trace is not in."""
    if _num_bins(config) == 1:
        return x
    return (_bins(config, batch) * x[:, :, None]).reshape(*x.shape[:2], -1)


def _of_own_bin(config: Config, batch: GroupBatch, x: Float[Array, "Q G N"]) -> PerCut:
    """Numbers per cut of the doubling that each trace is in."""
    if (count := _num_bins(config)) == 1:
        return x
    return (_bins(config, batch) * x.reshape(*x.shape[:2], count, -1)).sum(2)


def returns_to_go(config: Config, reward: PerCut) -> PerCut:
    """What each thinking segment is paid, by `advantage.credit`; of residuals, its credit."""
    return advantages.thinking_credit(reward, _weights(config), mode=config.advantage.credit)


def make_advantages(
    config: Config, state: State, batch: GroupBatch, reward: PerCut, values: PerCut | None
) -> Advantages:
    """Budget-conditioned advantages (Eq. 10 to 14)."""
    settings = config.advantage
    baseline, expected = baselines(config, state, batch, reward, values)
    residual = advantages.bcae_advantage(reward, baseline)
    thinking = returns_to_go(config, residual)
    scale = advantages.advantage_scale(residual, mode=settings.normalise, floor=settings.floor)
    answers = advantages.answer_credit(
        batch.outcomes,
        reward,
        baseline,
        expected,
        _weights(config),
        coefficient=coefficient_of(config),
        mode=settings.credit,
    )
    if settings.credit == "trajectory":
        # An answer that serves several cuts is one part of the trace.
        source = rewards.distinct_cuts(batch.cuts, batch.thinking)
        answers = jnp.where(source == jnp.arange(source.shape[-1]), answers, 0.0)
    returns = returns_to_go(config, reward)
    if settings.score_weighted:
        thinking -= _score_shift(config, state, batch, returns - thinking)
    return Advantages(
        thinking=thinking / scale,
        answers=answers / scale,
        baseline=returns - thinking,
        returns=returns,
        tokens=_token_advantages(batch, returns) / scale if batch.path is not None else None,
    )


def _score_shift(config: Config, state: State, batch: GroupBatch, expected: PerCut) -> PerCut:
    """How far scores move the baseline of each segment, from V or from a constant."""
    known = _by_bin(config, batch, _regressor(config, expected))
    shift = _of_own_bin(config, batch, advantages.optimal_shift(known, _optimal_slopes(state)))
    if config.advantage.baseline == "constant":
        # A running number lags behind its moments: their sum may leave what can be returned.
        coefficient, weights = coefficient_of(config), _weights(config)
        worst = jnp.full_like(weights, -coefficient).at[0].set(0.0)
        least = advantages.to_go(worst, weights)
        most = advantages.to_go(jnp.full_like(weights, 1.0 + coefficient), weights)
        shift = jnp.clip(shift, least - expected, most - expected)
    if config.advantage.score_uniform:
        return jnp.broadcast_to(shift.mean((0, 1)), shift.shape)
    return shift


def _regressor(config: Config, expected: PerCut) -> PerCut:
    """What the shift is linear in besides 1; nothing where the baseline is one number."""
    return jnp.zeros_like(expected) if config.advantage.baseline == "constant" else expected


def _token_advantages(batch: GroupBatch, returns: PerCut) -> Float[Array, "Q G T"]:
    """Returns of each thinking token less the optimal token baseline."""
    assert batch.path is not None
    width = batch.path.shape[-1]
    flat = lambda x: x.reshape(-1, x.shape[-1])
    by_token = advantages.scatter_segments(flat(returns), flat(batch.cuts), width)
    paid = by_token.reshape(batch.path.shape)
    return paid - advantages.token_baseline(paid, batch.path)


# --- moments of earlier batches -------------------------------------------------------------------


def _prior_strength(state: State) -> Float[Array, ""]:
    assert state is not None
    return advantages.prior_strength(state["sigma2"], state["error2"])


def _optimal_slopes(state: State) -> Float[Array, "M 2"]:
    assert state is not None
    square = state["optimal_square"]
    traces = advantages.effective_traces(square, state["optimal_spread"])
    return advantages.optimal_slopes(square, state["optimal_product"], traces)


def init_state(config: Config, num_questions: int) -> State:
    """The moments before training."""
    state: dict[str, Array] = {}
    count = config.cuts.count * _num_bins(config)
    if config.advantage.baseline == "shrink":
        # n0 = 0: until V's error is measured, the other traces alone are trusted.
        state |= {"sigma2": jnp.float32(0.0), "error2": jnp.float32(1e-6)}
    if config.advantage.score_weighted:
        # Slopes of 0 until a batch was seen: the baseline as it is.
        square = jnp.zeros((count, 2, 2), jnp.float32)
        state |= {"optimal_square": square, "optimal_product": square[..., 0]}
        state |= {"optimal_spread": square[..., 0, 0]}
    if config.advantage.baseline == "constant":
        state |= {"reward_mean": jnp.zeros(count, jnp.float32)}
        seen = () if _num_bins(config) == 1 else count
        state |= {"reward_seen": jnp.zeros(seen, jnp.float32)}
    return state or None


def update(
    config: Config, state: State, batch: GroupBatch, reward: PerCut, values: PerCut | None
) -> State:
    """The moments, moved towards those of the batch."""
    if state is None:
        return None
    measured: dict[str, Array] = {}
    if config.advantage.baseline == "shrink":
        assert values is not None
        moments = advantages.residual_moments(reward, values)
        measured |= dict(zip(("sigma2", "error2"), moments))
    if config.advantage.score_weighted:
        baseline, _ = baselines(config, state, batch, reward, values)
        thinking = returns_to_go(config, advantages.bcae_advantage(reward, baseline))
        predicted = _regressor(config, returns_to_go(config, reward) - thinking)
        binned = (_by_bin(config, batch, x) for x in (thinking, predicted, batch.surprise))
        weighted = advantages.optimal_moments(*binned)
        measured |= dict(zip(("optimal_square", "optimal_product", "optimal_spread"), weighted))
    if config.advantage.baseline == "constant":
        seen = jnp.float32(1.0)
        if _num_bins(config) > 1:
            seen = _by_bin(config, batch, jnp.ones_like(reward)).mean((0, 1))
        mean = _by_bin(config, batch, reward).mean((0, 1))
        measured |= {"reward_mean": mean, "reward_seen": seen}
    return {name: _blended(name, state[name], measured[name]) for name in state}


def _blended(name: str, old: Array, new: Array) -> Array:
    """A running mean; `optimal_spread` adds up squares, whose weights are squared."""
    power = 2 if name == "optimal_spread" else 1
    return _MOMENT_DECAY**power * old + (1.0 - _MOMENT_DECAY) ** power * new


def metrics(config: Config, state: State, batch: GroupBatch) -> dict[str, Any]:
    """What the moments say."""
    shown = {}
    if config.advantage.baseline == "shrink":
        shown["advantage/prior_strength"] = _prior_strength(state)
    if config.advantage.score_weighted:
        offset, slope = _optimal_slopes(state).mean(0)
        shown["advantage/score_offset"], shown["advantage/score_slope"] = offset, slope
    return shown
