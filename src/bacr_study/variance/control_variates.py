"""The search for a better unbiased baseline: regressions on everything a segment can't influence.

Baseline of segment s: its predicted return, and slopes times what the other traces of the group
and the trace's own earlier answers have shown. None of these depends on the segment's own tokens,
given what comes before them, so the gradient is unbiased for any slopes of earlier batches.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float, Num

# Added to the diagonal, relative to its mean: earlier answers are nearly collinear.
_RIDGE = 1e-3


@dataclasses.dataclass(frozen=True)
class _Known:
    """What regressors are made of; one entry per segment.

    Attributes:
      residual: return to go less its prediction.
      expected: return to go that these make.
      scaled: the same as a share of the most there is to get, within [0, 1].
    """

    residual: Float[np.ndarray, "R G M"]
    surprise: Float[np.ndarray, "R G M"]
    predicted: Float[np.ndarray, "R G M"]
    expected: Float[np.ndarray, "R G M"]
    scaled: Float[np.ndarray, "R G M"]

    def before(self, x: Float[np.ndarray, "R G M"], steps: int) -> Float[np.ndarray, "R G M"]:
        """Its entry so many cuts before the segment's own; 0 where there is none."""
        later = np.zeros_like(x)
        if steps < x.shape[-1]:
            later[..., steps:] = x[..., : x.shape[-1] - steps]
        return later


def others_mean(x: Float[np.ndarray, "R G M"]) -> Float[np.ndarray, "R G M"]:
    """Mean over the rest of the group; 0 in a group of one."""
    return (x.sum(1, keepdims=True) - x) / max(x.shape[1] - 1, 1)


def _doubt(known: _Known) -> np.ndarray:
    """4 p (1 - p) of the cut before the segment: how open its outcome was."""
    p = np.clip(known.before(known.predicted, 1), 0.0, 1.0)
    return 4.0 * p * (1.0 - p)


def _first(known: _Known) -> np.ndarray:
    """Surprise at the first cut, where it is at least three cuts back."""
    first = np.zeros_like(known.surprise)
    first[..., 3:] = known.surprise[..., :1]
    return first


def _interior(known: _Known) -> np.ndarray:
    """V (1 - V) of the scaled return: 0 where it can't be lower, and where it can't be higher."""
    return known.scaled * (1.0 - known.scaled)


_MAKERS: dict[str, Callable[[_Known], np.ndarray]] = {
    "level": lambda known: np.ones_like(known.residual),
    "value": lambda known: known.expected,
    "interior": _interior,
    "interior_tilt": lambda known: _interior(known) * (1.0 - 2.0 * known.scaled),
    "previous": lambda known: known.before(known.surprise, 1),
    "earlier": lambda known: known.before(known.surprise, 2),
    "first": _first,
    "doubt": _doubt,
    "previous_doubt": lambda known: known.before(known.surprise, 1) * _doubt(known),
    "others": lambda known: others_mean(known.residual),
    "others_previous": lambda known: others_mean(known.before(known.surprise, 1)),
    "previous_others": lambda known: known.before(known.surprise, 1) * others_mean(known.residual),
}


def regressors(
    outcomes: Float[np.ndarray, "R G M"],
    predicted: Float[np.ndarray, "R G M"],
    weights: Float[np.ndarray, "M"],
    features: Sequence[str],
) -> tuple[Float[np.ndarray, "R G M"], Float[np.ndarray, "R G M F"]]:
    """Residual return of each segment, and what may explain it.

        sum_{k >= s} u_k (r_k - p_k)

    Args:
      weights: u, total weight of each outcome in the objective.
    """
    surprise = np.asarray(outcomes - predicted, np.float64)
    to_go = lambda x: np.flip(np.cumsum(np.flip(weights * x, -1), -1), -1)
    residual, given = to_go(surprise), np.asarray(predicted, np.float64)
    expected = to_go(given)
    # A value head is not bound to the range of its targets.
    scaled = np.clip(expected / to_go(np.ones_like(given)), 0.0, 1.0)
    known = _Known(residual, surprise, given, expected, scaled)
    return residual, np.stack([_MAKERS[name](known) for name in features], -1)


@dataclasses.dataclass(frozen=True)
class Regression:
    """Slopes of every segment: its residual return is expected to be their sum with regressors."""

    slopes: Float[np.ndarray, "M F"]

    def __call__(self, given: Float[np.ndarray, "R G M F"]) -> Float[np.ndarray, "R G M"]:
        """Expected residual return."""
        return np.einsum("rgmf,mf->rgm", given, self.slopes)

    @classmethod
    def fitted(
        cls,
        given: Float[np.ndarray, "R G M F"],
        residual: Float[np.ndarray, "R G M"],
        weights: Num[np.ndarray, "R G M"],
    ) -> "Regression":
        """Weighted least squares for each segment, without an intercept.

        Weights stand for the squared norm of each entry's score, with which the noise of a gradient
        weighs errors.
        """
        slopes = []
        for s in range(residual.shape[-1]):
            x = given[..., s, :].reshape(-1, given.shape[-1])
            weight = np.asarray(weights[..., s], np.float64).reshape(-1, 1)
            square = (x * weight).T @ x
            ridge = _RIDGE * max(np.trace(square) / len(square), 1e-12)
            right = (x * weight).T @ residual[..., s].reshape(-1)
            slopes.append(np.linalg.solve(square + ridge * np.eye(len(square)), right))
        return cls(np.stack(slopes))
