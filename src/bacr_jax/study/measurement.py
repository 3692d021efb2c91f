"""From a pool to the noise of every arm at every group size."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from bacr_jax.config import Config
from bacr_jax.study import baselines, noise
from bacr_jax.study.baselines import ARMS, PUBLISHED, READINGS, REFERENCE, Arm, Groups, Setting
from bacr_jax.study.gradient_pool import Drawn, Pool, Regime
from bacr_jax.study.noise import Moments, Noise

# What is measured: an arm and how it reads the answers, as "arm/reading".
VARIANTS = tuple((arm, reading) for arm in ARMS for reading in READINGS)
NAMES = tuple(f"{arm.name}/{reading}" for arm, reading in VARIANTS)
# The published method has its published number of answers.
AGAINST, OF_REFERENCE = NAMES.index(f"{PUBLISHED}/several"), NAMES.index(f"{REFERENCE}/several")
# With the gradient of the answers too, where all answers of a cut are trained on.
TRAINED = tuple(i for i, (_, reading) in enumerate(VARIANTS) if reading == "several")
# Rows by cuts; pool and calibration have different rows.
Values = Mapping[str, Float[np.ndarray, "_ _"]]


def grouped(
    drawn: Drawn, values: Values, traces: int, partition: Int[np.ndarray, "P n G"]
) -> Groups:
    """Rows of cells of so many traces, as groups: cell, partition and group are one axis."""

    def split(x: np.ndarray) -> np.ndarray:
        of_cells = x.reshape(-1, traces, *x.shape[1:])[:, partition]
        return of_cells.reshape(-1, partition.shape[-1], *x.shape[1:])

    names = ("by_answer", "cuts", "thinking", "budgets", "tokens", "surprise")
    return Groups(
        **{name: split(getattr(drawn, name)) for name in names},
        values={name: split(value) for name, value in values.items()},
    )


def calibrated(
    config: Config, drawn: Drawn, values: Values, traces: int, group: int, seed: int
) -> Setting:
    """Moments and slopes that earlier batches, of other questions, would have left behind."""
    partition = noise.partitions([seed, group, 3], traces, group, 4)
    groups = grouped(drawn, values, traces, partition)
    plain, states, regressions = Setting(config), {}, {}
    for arm, reading in VARIANTS:
        if arm.value not in values:
            # An oracle is known for the pool's questions alone; it borrows the value's moments.
            arm = dataclasses.replace(arm, value="trace_and_cut")
        if "features" in arm.options:
            fitted = baselines.fitted_regression(arm, plain, groups, reading)
            regressions[f"{arm.name}/{reading}"] = fitted
        else:
            state = baselines.settled_state(arm, plain, groups, reading)
            states[f"{arm.name}/{reading}"] = state
    return Setting(config, states, regressions)


@dataclass(frozen=True)
class Measured:
    """A pool's noise at one group size.

    Attributes:
      noise: of the thinking's gradient, an entry per question and budget.
      questions: of each entry.
      budgets: of each entry; 0 where they are mixed.
      bins: the same for the traces of a range of budgets alone, by its name.
      with_answers: noise with the gradient of answers, of the variants in `TRAINED`.
      answer_questions: questions of its entries.
      spread: variance of advantages over that of returns, by variant.
      cost: tokens a trace costs, by variant.
    """

    noise: Noise
    questions: Int[np.ndarray, " C"]
    budgets: Int[np.ndarray, " C"]
    bins: dict[str, Noise]
    with_answers: Noise | None
    answer_questions: Int[np.ndarray, " H"]
    spread: Float[np.ndarray, " variants"]
    cost: Float[np.ndarray, " variants"]


@dataclass(frozen=True)
class Result:
    """What was measured on one pool.

    Attributes:
      seed: of run and pool.
      step: of the checkpoint.
      regime: of the budgets.
      by_group: noise by group size.
      diagnostics: of values and budgets.
      across: share of a batch's variance that lies between questions.
      right: share correct at the budget.
      seconds: a trace takes by number of answers at a cut, and its scores.
    """

    seed: int
    step: int
    regime: Regime
    by_group: dict[int, Measured]
    diagnostics: dict[str, Any]
    across: float
    right: float
    seconds: dict[str, float]


def _weighted(
    setting: Setting,
    groups: Groups,
    reading: baselines.Reading,
    norms: Float[np.ndarray, "C P n G M"],
) -> Float[np.ndarray, "R M"]:
    """Error of the oracle's return weighted by norms, over a cell's traces outside each group."""
    returns = baselines.returns_to_go(
        groups.outcomes(reading) - groups.values["oracle"], setting.weights
    ).reshape(norms.shape)
    top, bottom = (norms * returns).sum(3), norms.sum(3)
    outside = lambda x: x.sum(2, keepdims=True) - x
    weighted = outside(top) / np.maximum(outside(bottom), 1e-12)
    return np.asarray(weighted.reshape(-1, norms.shape[-1]))


def credited(
    setting: Setting, groups: Groups, norms: Float[np.ndarray, "C P n G M"]
) -> tuple[Float[np.ndarray, "variants C P n G M"], Float[np.ndarray, "variants C P n G M"]]:
    """Advantages of the thinking, and baselines of the answers, of every variant."""
    thinking = np.zeros((len(VARIANTS), *norms.shape), np.float32)
    answers = np.zeros_like(thinking)
    moved = {r: _weighted(setting, groups, r, norms) for r in READINGS}
    for index, (arm, reading) in enumerate(VARIANTS):
        given = dataclasses.replace(groups, weighted=moved[reading])
        credit = arm.credit(setting, given, reading)
        thinking[index] = np.asarray(credit.thinking).reshape(norms.shape)
        answers[index] = np.asarray(credit.answers).reshape(norms.shape)
    return thinking, answers


def _factors(arms: Sequence[Arm], group: int, cuts: int) -> Float[np.ndarray, "variants M"]:
    return np.stack([arm.factors(group, cuts) for arm in arms])


def _answer_noise(
    pool: Pool,
    setting: Setting,
    thinking: Float[np.ndarray, "variants C P n G M"],
    answers: Float[np.ndarray, "variants C P n G M"],
    partition: Int[np.ndarray, "P n G"],
) -> Noise | None:
    """Noise of thinking and answers together."""
    if not len(pool.with_answers):
        return None
    u, chosen = setting.weights, list(TRAINED)
    cells = []
    for place, cell in enumerate(pool.with_answers):
        a, c = thinking[chosen, cell], answers[chosen, cell]
        joined = np.concatenate([a, np.broadcast_to(u, a.shape), -u * c], -1)
        reference = chosen.index(OF_REFERENCE)
        cells.append(noise.moments(pool.answer_gram[place], joined, partition, reference))
    arms = [VARIANTS[i][0] for i in chosen]
    of_thinking = _factors(arms, partition.shape[-1], len(u))
    count = pool.drawn.by_answer.shape[-1]
    # An answer is compared with the mean of all at its cut, its own included.
    compared = [1.0 - 1.0 / count if a.rule is baselines.grid_rule and a.name != "none" else 1.0
                for a in arms]  # fmt: skip
    of_answers = np.repeat(np.array(compared)[:, None], 2 * len(u), 1)
    return noise.gathered(cells, np.concatenate([of_thinking, of_answers], 1))


def measure(
    pool: Pool,
    values: Values,
    setting: Setting,
    group: int,
    *,
    count: int,
    seed: int,
    budget_bins: Sequence[tuple[int, int]] = (),
) -> Measured:
    """Noise of every variant on the pool's groups.

    Args:
      pool: rollouts and inner products.
      values: predicted outcomes of its rows.
      setting: objective, moments and slopes (`calibrated`).
      group: G.
      count: partitions.
      seed: of the partitions.
      budget_bins: ranges [low, high] of budgets whose traces are also looked at alone.
    """
    traces, cuts = pool.gram.shape[1:3]
    partition = noise.partitions([seed, group], traces, group, count)
    groups = grouped(pool.drawn, values, traces, partition)
    norms = np.einsum("cnmnm->cnm", pool.gram)[:, partition]
    thinking, answers = credited(setting, groups, norms)
    factors = _factors([arm for arm, _ in VARIANTS], group, cuts)

    def moments_of(advantages: np.ndarray) -> Noise:
        cells: list[Moments] = [
            noise.moments(gram, advantages[:, cell], partition, OF_REFERENCE)
            for cell, gram in enumerate(pool.gram)
        ]
        return noise.gathered(cells, factors)

    budgets = groups.budgets.reshape(norms.shape[:-1])
    bins = {}
    for low, high in budget_bins:
        inside = (budgets >= low) & (budgets <= high)
        bins[f"{low}-{high}"] = moments_of(thinking * inside[..., None])
    same = budgets.reshape(len(budgets), -1)
    return Measured(
        noise=moments_of(thinking),
        questions=pool.cell_questions,
        budgets=np.where((same == same[:, :1]).all(1), same[:, 0], 0),
        bins=bins,
        with_answers=_answer_noise(pool, setting, thinking, answers, partition),
        answer_questions=pool.cell_questions[pool.with_answers],
        spread=_spread(setting, groups, thinking),
        cost=_cost(pool.drawn),
    )


def _spread(
    setting: Setting, groups: Groups, thinking: Float[np.ndarray, "variants C P n G M"]
) -> Float[np.ndarray, " variants"]:
    """Variance of advantages over that of the returns, on segments with tokens."""
    there: Bool[np.ndarray, "R G M"] = groups.tokens > 0
    returns = {
        reading: baselines.returns_to_go(groups.outcomes(reading), setting.weights)
        for reading in READINGS
    }
    flat = thinking.reshape(len(VARIANTS), *there.shape)
    return np.array(
        [
            noise.advantage_variance(given, returns[reading], there)
            for given, (_, reading) in zip(flat, VARIANTS)
        ]
    )


def _cost(drawn: Drawn) -> Float[np.ndarray, " variants"]:
    """Mean sampled tokens of a trace with its branches."""
    everything = Groups(
        by_answer=drawn.by_answer[:, None],
        cuts=drawn.cuts[:, None],
        thinking=drawn.thinking[:, None],
        budgets=drawn.budgets[:, None],
        tokens=drawn.tokens[:, None],
        surprise=drawn.surprise[:, None],
        values={},
    )
    of_thinking = drawn.tokens.sum(1).mean()
    sampled = drawn.sampled[:, None]
    cost = {
        reading: of_thinking + baselines.drawn_answers(everything, sampled, reading).mean()
        for reading in READINGS
    }
    return np.array([cost[reading] for _, reading in VARIANTS])


# --- diagnostics ----------------------------------------------------------------------------------


def diagnostics(
    pool: Pool, values: Values, weights: Float[np.ndarray, " M"], group: int
) -> dict[str, Any]:
    """How good the values are, and what that should cost.

    Args:
      pool: rollouts.
      values: predicted outcomes of its rows.
      weights: u of the objective.
      group: G of the predicted excess.
    """
    traces, cuts = pool.gram.shape[1:3]
    cells = lambda x: x.reshape(-1, traces, cuts)
    outcomes = pool.drawn.by_answer.mean(-1)
    norms = np.einsum("cnmnm->cnm", pool.gram)
    found: dict[str, Any] = {}
    for name, predicted in values.items():
        returns = cells(baselines.returns_to_go(outcomes, weights))
        expected = cells(baselines.returns_to_go(predicted, weights))
        error2, deviation, sigma2 = noise.squared_error(expected[..., 0], returns[..., 0])
        residual = returns - expected
        each = residual.mean(1) ** 2 - residual.var(1, ddof=1) / traces
        excess = sum(noise.predicted_excess(norms[..., s], each[:, s], group) for s in range(cuts))
        found[name] = {
            "squared_error": error2,
            "standard_error": deviation,
            "variance_of_return": sigma2,
            "threshold": sigma2 / (group - 1),
            "predicted_excess": float(np.sum(excess)),
            "calibration": _calibration(pool.drawn, predicted),
        }
    oracle = cells(baselines.returns_to_go(values["oracle"], weights))[..., 0]
    returns = cells(baselines.returns_to_go(outcomes, weights))[..., 0]
    icc, tau2, within = noise.intraclass_correlation(oracle, returns)
    return {
        "values": found,
        "icc": icc,
        "variance_over_budgets": tau2,
        "variance_within_budget": within,
        "effective_traces": _effective(pool.drawn, traces, group),
    }


def _calibration(drawn: Drawn, predicted: Float[np.ndarray, "B M"]) -> dict[str, list[float]]:
    """Predicted and measured share correct at the budget, by quarters of the budgets."""
    edges = np.unique(np.quantile(drawn.budgets, [0.25, 0.5, 0.75]))
    quarter = np.searchsorted(edges, drawn.budgets)
    table = {}
    for q in np.unique(quarter):
        rows = quarter == q
        span = f"{drawn.budgets[rows].min()}-{drawn.budgets[rows].max()}"
        measured = drawn.by_answer[rows, -1].mean()
        table[span] = [float(predicted[rows, -1].mean()), float(measured)]
    return table


def _effective(drawn: Drawn, traces: int, group: int) -> float:
    """Mean number of a group's traces under one budget: G if it is shared, about 1 if not."""
    cells = drawn.budgets.reshape(-1, traces)
    same = [(cell[:, None] == cell[None]).sum(1).mean() / traces for cell in cells]
    return float(1 + (group - 1) * (np.mean(same) * traces - 1) / (traces - 1))


def share_across(pool: Pool, measured: Measured) -> float:
    """Share of a batch's variance that lies between questions, which no baseline removes."""
    mean = np.asarray(pool.mean, np.float64)
    count = len(mean)
    total = mean.sum(0)
    of_all = (total @ total - (mean**2).sum()) / max(count * (count - 1), 1)
    across = measured.noise.signal.mean() - of_all
    within = measured.noise.variance[:, AGAINST].mean()
    return float(across / (across + within))
