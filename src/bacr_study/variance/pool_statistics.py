"""What a pool says besides noise: how good values are, and what scores have to do with returns."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from bacr_jax.advantages import score_statistics
from bacr_study.variance import baselines, noise
from bacr_study.variance.gradient_pool import Drawn, Pool

# Predicted outcomes of the pool's rows, by the name of a value.
Values = Mapping[str, Float[np.ndarray, "_ _"]]
# Of a pool's rows that are looked at alone: so many ranges of V, with about as many rows each.
_VALUE_BINS = 3
_statistics = jax.jit(jax.vmap(score_statistics))


def scaled_value(
    predicted: Float[np.ndarray, "B M"], weights: Float[np.ndarray, " M"]
) -> Float[np.ndarray, "B"]:
    """Predicted return of a whole trace, as a share of the most that there is to get."""
    whole = baselines.returns_to_go(predicted, weights)[..., 0]
    return np.clip(whole / np.sum(weights), 0.0, 1.0)


def value_edges(values: Float[np.ndarray, "B"]) -> Float[np.ndarray, " edges"]:
    """Ends of ranges of V with about as many rows each, from the lowest to the highest V."""
    return np.quantile(values, np.linspace(0, 1, _VALUE_BINS + 1))


def value_bin(
    values: Float[np.ndarray, "*rows"], edges: Float[np.ndarray, " edges"]
) -> Int[np.ndarray, "*rows"]:
    """Which of the ranges each V is in."""
    return np.searchsorted(edges[1:-1], values, side="left")


def diagnostics(
    pool: Pool,
    values: Values,
    weights: Float[np.ndarray, " M"],
    partition: Int[np.ndarray, "P n G"],
) -> dict[str, Any]:
    """How good the values are, and what scores say of the best constant.

    Args:
      partition: of the pool into groups: one group of every cell is a batch.
    """
    traces, cuts = pool.gram.shape[1:3]
    cells = lambda x: x.reshape(-1, traces, cuts)
    outcomes = pool.drawn.by_answer.mean(-1)
    norms = np.einsum("cnmnm->cnm", pool.gram)
    returns = cells(baselines.returns_to_go(outcomes, weights))
    found: dict[str, Any] = {}
    for name, predicted in values.items():
        expected = cells(baselines.returns_to_go(predicted, weights))
        error2, deviation, sigma2 = noise.squared_error(expected[..., 0], returns[..., 0])
        found[name] = {
            "squared_error": error2,
            "standard_error": deviation,
            "threshold": sigma2 / (partition.shape[-1] - 1),
        }
    return {
        "values": found,
        "value_edges": value_edges(scaled_value(values["trace_and_cut"], weights)),
        "scores": _scores(pool.drawn, norms, returns, partition),
    }


def _scores(
    drawn: Drawn,
    norms: Float[np.ndarray, "C N M"],
    returns: Float[np.ndarray, "C N M"],
    partition: Int[np.ndarray, "P n G"],
) -> dict[str, dict[str, Any]]:
    """Of each stand-in for a score's squared norm: how it goes with the norm and with returns.

    By stand-in: `with_norm`, its correlation with the norm over the traces with tokens in a
    segment, a number per segment; and `score_statistics` of single batches, their mean, and of the
    predicted saving also the deviation from batch to batch.
    """
    shape = norms.shape
    stand_ins = {
        "surprise": drawn.surprise.reshape(shape),
        "energy": drawn.energy.reshape(shape),
        "tokens": drawn.tokens.reshape(shape),
        "norm": norms,
    }
    there = drawn.tokens.reshape(shape) > 0

    def batches(x: Float[np.ndarray, "C N M"]) -> Float[Array, "B C G M"]:
        """One group of every cell: P n batches."""
        batch = (shape[0], partition.shape[-1], shape[-1])
        return jnp.asarray(np.moveaxis(x[:, partition], 0, 2).reshape(-1, *batch), jnp.float32)

    paid, found = batches(returns), {}
    for name, weights in stand_ins.items():
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
    """Pearson's; 0 where one of them does not vary."""
    x, y = (np.asarray(z, np.float64) - np.mean(z) for z in (x, y))
    spread = np.sqrt((x @ x) * (y @ y))
    return float(x @ y / spread) if spread > 0 else 0.0
