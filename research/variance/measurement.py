"""Computes the results for a pool: gradient noise of each arm, value errors, score statistics."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from bacr_jax.advantages import score_statistics
from bacr_jax.config import Config
from research.variance import baselines, noise
from research.variance.baselines import REFERENCE, Groups, Reading, Setting, Variants, variants
from research.variance.gradient_pool import Drawn, Pool, Rollouts
from research.variance.noise import Noise, Partition
from research.variance.settings import Regime

# Predicted outcomes of the pool's rows, keyed by the name of the predictor.
Values = Mapping[str, Float[np.ndarray, "_ _"]]
OfRows = Bool[np.ndarray, "B"]
OfVariants = Float[np.ndarray, "variants C P n G M"]
# Number of ranges of budgets (in regime independent) and of V, for which the noise is also measured
# separately. The ranges have about the same number of rows.
_RANGES = 3
_statistics = jax.jit(jax.vmap(score_statistics))


def grouped(drawn: Drawn, values: Values, traces: int, partition: Partition) -> Groups:
    """Arranges the rows as groups. Cell, partition and group are combined into one axis.

    Args:
      drawn: rollouts, cell by cell.
      values: predicted outcomes of the rows.
      traces: number of traces per cell.
      partition: random partitions of the traces of a cell into groups.
    """

    def split(x: np.ndarray) -> np.ndarray:
        of_cells = x.reshape(-1, traces, *x.shape[1:])[:, partition]
        return of_cells.reshape(-1, partition.shape[-1], *x.shape[1:])

    names = [field.name for field in dataclasses.fields(Rollouts)]
    return Groups(
        **{name: split(getattr(drawn, name)) for name in names},
        values={name: split(value) for name, value in values.items()},
    )


def calibrated(
    config: Config, drawn: Drawn, values: Values, traces: int, group: int, seed: int
) -> Setting:
    """Returns the moments and slopes that the arms learn from batches of other questions."""
    # The oracle is only available for the questions of the pool, so its moments are computed with
    # the value `trace_and_cut` instead.
    values = {**values, "oracle": values["trace_and_cut"]}
    groups = grouped(drawn, values, traces, noise.partitions([seed, group, 3], traces, group, 4))
    plain, pairs = Setting(config), variants(drawn.by_answer.shape[-1]).pairs
    return Setting(
        config, {arm.reads(reading): arm.learned(plain, groups, reading) for arm, reading in pairs}
    )


@dataclass(frozen=True)
class Measured:
    """The gradient noise on a pool for one group size.

    Attributes:
      noise: noise of the gradient of the thinking, with one entry per cell.
      by_budget: the same for only the traces of a budget, or of a range of budgets, keyed by its
        name.
      by_value: the same for only the traces in a range of V, from the lowest to the highest range.
      with_answers: noise including the gradient of the answers, for the variants in
        `Variants.trained`.
      spread: for each variant, the variance of the advantages divided by the variance of the
        returns, over segments with tokens.
      cost: for each variant, the mean number of sampled tokens of a trace with its branches.
    """

    noise: Noise
    by_budget: dict[str, Noise]
    by_value: list[Noise]
    with_answers: Noise | None
    spread: Float[np.ndarray, " variants"]
    cost: Float[np.ndarray, " variants"]


@dataclass(frozen=True)
class Result:
    """Results on one pool. `right` is the share of correct answers at the budget."""

    seed: int
    step: int
    regime: Regime
    by_group: dict[int, Measured]
    diagnostics: dict[str, Any]
    right: float


def budget_ranges(budgets: Int[np.ndarray, "B"], regime: Regime) -> dict[str, OfRows]:
    """Selects the rows of each budget, or of ranges of budgets in the regime independent.

    The ranges have about the same number of rows.
    """
    if regime != "independent":
        return {str(budget): budgets == budget for budget in np.unique(budgets)}
    edges = np.quantile(budgets, np.linspace(0, 1, _RANGES + 1)).astype(int)
    starts = [edges[0], *(edges[1:-1] + 1)]
    return {
        f"{low}-{high}" if low < high else str(low): (budgets >= low) & (budgets <= high)
        for low, high in zip(starts, edges[1:])
    }


def value_ranges(
    predicted: Float[np.ndarray, "B M"], weights: Float[np.ndarray, " M"]
) -> tuple[Float[np.ndarray, " edges"], list[OfRows]]:
    """Divides the rows into ranges of V with about the same number of rows.

    V is the predicted return of the whole trace divided by the maximum return.

    Returns:
      The edges of the ranges in ascending order, and a mask of the rows in each range.
    """
    whole = baselines.returns_to_go(predicted, weights)[..., 0]
    share = np.clip(whole / np.sum(weights), 0.0, 1.0)
    edges = np.quantile(share, np.linspace(0, 1, _RANGES + 1))
    place = np.searchsorted(edges[1:-1], share, side="left")
    return edges, [place == number for number in range(_RANGES)]


def measure(
    pool: Pool, values: Values, setting: Setting, partition: Partition, regime: Regime | None
) -> Measured:
    """Measures the noise of every variant on the groups of a pool.

    If `regime` is not None, also measures it separately by budget and by V.
    """
    measured, traces = variants(pool.by_answer.shape[-1]), pool.gram.shape[1]
    groups = grouped(pool, values, traces, partition)
    norms = np.einsum("cnmnm->cnm", pool.gram)[:, partition]
    thinking, answers = credited(setting, groups, norms, measured)
    factors = measured.factors(partition.shape[-1], norms.shape[-1])
    reference = measured.place(REFERENCE)

    def noise_of(advantages: np.ndarray) -> Noise:
        return noise.measured(
            pool.cell_questions, pool.gram, advantages, partition, reference, factors
        )

    def among(rows: OfRows) -> Noise:
        return noise_of(thinking * rows.reshape(-1, traces)[:, partition][..., None])

    there, spread, cost = groups.tokens > 0, [], []
    for given, (_, reading) in zip(thinking, measured.pairs):
        returns = baselines.returns_to_go(groups.outcomes(reading), setting.weights)
        spread.append(noise.advantage_variance(given.reshape(there.shape), returns, there))
        cost.append(pool.tokens.sum(1).mean() + baselines.drawn_answers(pool, reading).mean())
    by_budget = budget_ranges(pool.budgets, regime) if regime else {}
    _, by_value = value_ranges(values["trace_and_cut"], setting.weights)
    return Measured(
        noise=noise_of(thinking),
        by_budget={name: among(rows) for name, rows in by_budget.items()},
        by_value=[among(rows) for rows in by_value] if regime else [],
        with_answers=_answer_noise(pool, setting, thinking, answers, partition),
        spread=np.array(spread),
        cost=np.array(cost),
    )


def credited(
    setting: Setting, groups: Groups, norms: Float[np.ndarray, "C P n G M"], measured: Variants
) -> tuple[OfVariants, OfVariants]:
    """Returns the advantages of the thinking and the baselines of the answers for each variant."""
    readings = {reading for _, reading in measured.pairs}
    given = {
        reading: dataclasses.replace(groups, weighted=_weighted(setting, groups, reading, norms))
        for reading in readings
    }
    credits = [arm.credit(setting, given[reading], reading) for arm, reading in measured.pairs]
    thinking = np.stack([np.asarray(credit.thinking, np.float32) for credit in credits])
    answers = np.stack([np.asarray(credit.answers, np.float32) for credit in credits])
    return thinking.reshape(-1, *norms.shape), answers.reshape(-1, *norms.shape)


def _weighted(
    setting: Setting, groups: Groups, reading: Reading, norms: Float[np.ndarray, "C P n G M"]
) -> Float[np.ndarray, "R M"]:
    """Computes `Groups.weighted`: the weighted error of the oracle's return outside each group."""
    returns = baselines.returns_to_go(
        groups.outcomes(reading) - groups.values["oracle"], setting.weights
    ).reshape(norms.shape)
    top, bottom = (norms * returns).sum(3), norms.sum(3)
    outside = lambda x: x.sum(2, keepdims=True) - x
    weighted = outside(top) / np.maximum(outside(bottom), 1e-12)
    return np.asarray(weighted.reshape(-1, norms.shape[-1]))


def _answer_noise(
    pool: Pool, setting: Setting, thinking: OfVariants, answers: OfVariants, partition: Partition
) -> Noise | None:
    """Measures the noise of the gradient of thinking and answers together."""
    if not len(pool.with_answers):
        return None
    count, u, group = pool.by_answer.shape[-1], setting.weights, partition.shape[-1]
    measured = variants(count)
    chosen = list(measured.trained)
    a, c = (x[chosen][:, pool.with_answers] for x in (thinking, answers))
    joined = np.concatenate([a, np.broadcast_to(u, a.shape), -u * c], -1)
    compared = [measured.pairs[i][0].answer_factor(group, count) for i in chosen]
    of_answers = np.repeat(np.array(compared)[:, None], 2 * len(u), 1)
    factors = np.concatenate([measured.factors(group, len(u))[chosen], of_answers], 1)
    reference = chosen.index(measured.place(REFERENCE))
    questions = pool.cell_questions[pool.with_answers]
    return noise.measured(questions, pool.answer_gram, joined, partition, reference, factors)


def diagnostics(
    pool: Pool, values: Values, weights: Float[np.ndarray, " M"], partition: Partition
) -> dict[str, Any]:
    """Computes the errors of the values, and statistics of the scores for the best constant.

    Args:
      pool: the pool of rollouts.
      values: predicted outcomes of its rows.
      weights: u, the total weight of each outcome in the objective.
      partition: partitions of each cell into groups. One group of every cell forms a batch.
    """
    traces, cuts = pool.gram.shape[1:3]
    to_go = lambda x: baselines.returns_to_go(x, weights).reshape(-1, traces, cuts)
    returns, found = to_go(pool.by_answer.mean(-1)), {}
    for name, predicted in values.items():
        error2, deviation, sigma2 = noise.squared_error(to_go(predicted)[..., 0], returns[..., 0])
        found[name] = {
            "squared_error": error2,
            "standard_error": deviation,
            "threshold": sigma2 / (partition.shape[-1] - 1),
        }
    edges, _ = value_ranges(values["trace_and_cut"], weights)
    return {"values": found, "value_edges": edges, "scores": _scores(pool, returns, partition)}


def _scores(
    pool: Pool, returns: Float[np.ndarray, "C N M"], partition: Partition
) -> dict[str, dict[str, Any]]:
    """Evaluates each proxy for the squared norm of a score.

    Returns:
      For each proxy: `with_norm`, its correlation with the squared norm for each segment, over the
      traces with tokens in the segment; the mean of `score_statistics` over single batches; and the
      standard deviation of the predicted saving between batches.
    """
    shape, norms = returns.shape, np.einsum("cnmnm->cnm", pool.gram)
    stand_ins = {
        name: getattr(pool, name).reshape(shape) for name in ("surprise", "energy", "tokens")
    }
    there = stand_ins["tokens"] > 0

    def batches(x: Float[np.ndarray, "C N M"]) -> Float[Array, "B C G M"]:
        """Returns P n batches, each with one group of every cell."""
        batch = (shape[0], partition.shape[-1], shape[-1])
        return jnp.asarray(np.moveaxis(x[:, partition], 0, 2).reshape(-1, *batch), jnp.float32)

    paid, found = batches(returns), {}
    for name, weights in (stand_ins | {"norm": norms}).items():
        of_batches = {key: np.asarray(x) for key, x in _statistics(paid, batches(weights)).items()}
        found[name] = {
            "with_norm": [
                _correlation(weights[there[..., s], s], norms[there[..., s], s])
                for s in range(shape[-1])
            ],
            **{key: float(x.mean()) for key, x in of_batches.items()},
            "deviation_of_saving": float(of_batches["predicted_saving"].std()),
        }
    return found


def _correlation(x: Float[np.ndarray, " rows"], y: Float[np.ndarray, " rows"]) -> float:
    """Returns Pearson's correlation coefficient, or 0 if x or y is constant."""
    x, y = (np.asarray(z, np.float64) - np.mean(z) for z in (x, y))
    spread = np.sqrt((x @ x) * (y @ y))
    return float(x @ y / spread) if spread > 0 else 0.0
