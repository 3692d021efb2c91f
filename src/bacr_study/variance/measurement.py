"""From a pool to the noise of every arm at every group size."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from bacr_jax.config import Config
from bacr_study.variance import baselines, noise, pool_statistics
from bacr_study.variance.baselines import Groups, Setting, Variants, variants
from bacr_study.variance.gradient_pool import Drawn, Pool
from bacr_study.variance.noise import Noise
from bacr_study.variance.pool_statistics import Values
from bacr_study.variance.settings import Regime


def _variants(drawn: Drawn) -> Variants:
    return variants(drawn.by_answer.shape[-1])


def grouped(
    drawn: Drawn, values: Values, traces: int, partition: Int[np.ndarray, "P n G"]
) -> Groups:
    """Rows of cells of so many traces, as groups: cell, partition and group are one axis."""

    def split(x: np.ndarray) -> np.ndarray:
        of_cells = x.reshape(-1, traces, *x.shape[1:])[:, partition]
        return of_cells.reshape(-1, partition.shape[-1], *x.shape[1:])

    names = ("by_answer", "cuts", "thinking", "budgets", "tokens", "surprise", "energy")
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
    plain, earlier = Setting(config), {}
    for arm, reading in _variants(drawn).pairs:
        if arm.value is not None and arm.value not in values:
            # An oracle is known for the pool's questions alone; it borrows the value's moments.
            arm = dataclasses.replace(arm, value="trace_and_cut")
        earlier[f"{arm.name}/{reading}"] = baselines.learned(arm, plain, groups, reading)
    return Setting(config, earlier)


@dataclass(frozen=True)
class Measured:
    """A pool's noise at one group size.

    Attributes:
      noise: of the thinking's gradient, an entry per question and budget.
      budgets: of each entry; 0 where they are mixed.
      bins: the same for the traces of a range of budgets alone, by its name.
      by_value: the same for the traces of a range of V, from the lowest to the highest.
      with_answers: noise with the gradient of answers, of `Variants.trained`.
      answer_questions: questions of its entries.
      spread: variance of advantages over that of returns, by variant.
      cost: tokens a trace costs, by variant.
    """

    noise: Noise
    questions: Int[np.ndarray, " C"]
    budgets: Int[np.ndarray, " C"]
    bins: dict[str, Noise]
    by_value: list[Noise]
    with_answers: Noise | None
    answer_questions: Int[np.ndarray, " H"]
    spread: Float[np.ndarray, " variants"]
    cost: Float[np.ndarray, " variants"]


@dataclass(frozen=True)
class Result:
    """What was measured on one pool.

    Attributes:
      by_group: noise by group size.
      right: share of right answers at the budget.
    """

    seed: int
    step: int
    regime: Regime
    by_group: dict[int, Measured]
    diagnostics: dict[str, Any]
    right: float


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
    setting: Setting,
    groups: Groups,
    norms: Float[np.ndarray, "C P n G M"],
    measured: Variants,
) -> tuple[Float[np.ndarray, "variants C P n G M"], Float[np.ndarray, "variants C P n G M"]]:
    """Advantages of the thinking, and baselines of the answers, of every variant."""
    thinking = np.zeros((len(measured.pairs), *norms.shape), np.float32)
    answers = np.zeros_like(thinking)
    moved = {r: _weighted(setting, groups, r, norms) for r in measured.readings}
    for index, (arm, reading) in enumerate(measured.pairs):
        given = dataclasses.replace(groups, weighted=moved[reading])
        credit = arm.credit(setting, given, reading)
        thinking[index] = np.asarray(credit.thinking).reshape(norms.shape)
        answers[index] = np.asarray(credit.answers).reshape(norms.shape)
    return thinking, answers


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
    measured, u, group = _variants(pool.drawn), setting.weights, partition.shape[-1]
    chosen, count = list(measured.trained), pool.drawn.by_answer.shape[-1]
    a, c = (x[chosen][:, pool.with_answers] for x in (thinking, answers))
    joined = np.concatenate([a, np.broadcast_to(u, a.shape), -u * c], -1)
    compared = [measured.pairs[i][0].answer_factor(group, count) for i in chosen]
    of_answers = np.repeat(np.array(compared)[:, None], 2 * len(u), 1)
    factors = np.concatenate([measured.factors(chosen, group, len(u)), of_answers], 1)
    reference = chosen.index(measured.reference)
    return noise.measured(pool.answer_gram, joined, partition, reference, factors)


def measure(
    pool: Pool,
    values: Values,
    setting: Setting,
    partition: Int[np.ndarray, "P n G"],
    *,
    budget_bins: Sequence[tuple[int, int]] = (),
    value_bins: bool = False,
) -> Measured:
    """Noise of every variant on the pool's groups.

    Args:
      budget_bins: ranges [low, high] of budgets whose traces are also looked at alone.
      value_bins: the same for ranges of V, so that it can be said what a baseline does where V is
        low, middling and high.
    """
    measured = _variants(pool.drawn)
    groups = grouped(pool.drawn, values, pool.gram.shape[1], partition)
    norms = np.einsum("cnmnm->cnm", pool.gram)[:, partition]
    thinking, answers = credited(setting, groups, norms, measured)
    factors = measured.factors(range(len(thinking)), partition.shape[-1], norms.shape[-1])

    def noise_of(advantages: np.ndarray) -> Noise:
        return noise.measured(pool.gram, advantages, partition, measured.reference, factors)

    budgets = groups.budgets.reshape(norms.shape[:-1])
    bins = {}
    for low, high in budget_bins:
        inside = (budgets >= low) & (budgets <= high)
        name = f"{low}-{high}" if low < high else str(low)
        bins[name] = noise_of(thinking * inside[..., None])
    by_value = []
    if value_bins:
        # V knows question and budget, not the trace: no expectation changes.
        given = lambda x: pool_statistics.scaled_value(x["trace_and_cut"], setting.weights)
        edges = pool_statistics.value_edges(given(values))
        place = pool_statistics.value_bin(given(groups.values), edges).reshape(norms.shape[:-1])
        by_value = [noise_of(thinking * (place == i)[..., None]) for i in range(len(edges) - 1)]
    same = budgets.reshape(len(budgets), -1)
    return Measured(
        noise=noise_of(thinking),
        questions=pool.cell_questions,
        budgets=np.where((same == same[:, :1]).all(1), same[:, 0], 0),
        bins=bins,
        by_value=by_value,
        with_answers=_answer_noise(pool, setting, thinking, answers, partition),
        answer_questions=pool.cell_questions[pool.with_answers],
        spread=_spread(setting, groups, thinking, measured),
        cost=_cost(pool.drawn, measured),
    )


def _spread(
    setting: Setting,
    groups: Groups,
    thinking: Float[np.ndarray, "variants C P n G M"],
    measured: Variants,
) -> Float[np.ndarray, " variants"]:
    """Variance of advantages over that of the returns, on segments with tokens."""
    there, spread = groups.tokens > 0, []
    for given, (_, reading) in zip(thinking, measured.pairs):
        returns = baselines.returns_to_go(groups.outcomes(reading), setting.weights)
        spread.append(noise.advantage_variance(given.reshape(there.shape), returns, there))
    return np.array(spread)


def _cost(drawn: Drawn, measured: Variants) -> Float[np.ndarray, " variants"]:
    """Mean sampled tokens of a trace with its branches."""
    given, of_thinking = (drawn.cuts, drawn.thinking, drawn.sampled), drawn.tokens.sum(1).mean()
    cost = {
        reading: of_thinking + baselines.drawn_answers(*given, reading).mean()
        for reading in measured.readings
    }
    return np.array([cost[reading] for _, reading in measured.pairs])
