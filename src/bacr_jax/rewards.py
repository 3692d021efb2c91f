"""Truncation-aware dense reward: where a trace is cut, and what each cut is worth.

An outcome r_j is the correctness of the answer given after the first c_j thinking tokens. For a
trace cut at four places,

    cuts    = cut_points(budgets, num_cuts=4)               # [.., M], the last one is the budget
    source  = distinct_cuts(cuts, lengths)                  # cuts past the natural end are one text
    r       = take_along_axis(outcomes, source, -1)         # one verdict per cut
    R       = dense_reward(r, coefficient=.3)               # Eq. 7
    R_bar   = sum(cut_weights("uniform", 4) * R, -1)        # Eq. 9

Eq. 7 and 8 also take numpy's arrays, for those who must not touch a device. The rewards of
published length-aware methods are beside these methods, in `methods`.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import TypeVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from bacr_jax.types import Scalar

# Either kind of array; what comes in goes out.
Numbers = TypeVar("Numbers", Array, np.ndarray)

# Share of the last cut in "final_heavy". A policy told the largest budget keeps its long, more
# accurate style only if the cut at that budget weighs more than about .6 of the objective.
_FINAL_SHARE = 0.7


def _namespace(x: Array | np.ndarray) -> ModuleType:
    """The functions for an array: numpy's for numpy's own, jax.numpy's for all others."""
    return np if isinstance(x, np.ndarray) else jnp


def cut_points(budgets: Int[Array, "*batch"], *, num_cuts: int) -> Int[Array, "*batch M"]:
    """Evenly spaced cuts of each budget (paper appendix: b/4, b/2, 3b/4, b).

        c_j = ceil(j b / M),  j = 1..M

    Budgets below M repeat cuts; `distinct_cuts` finds repetitions.
    """
    index = jnp.arange(1, num_cuts + 1, dtype=budgets.dtype)
    return (budgets[..., None] * index + (num_cuts - 1)) // num_cuts


def random_cut_points(
    key: Array, budgets: Int[Array, "*batch"], *, num_cuts: int
) -> Int[Array, "*batch M"]:
    """Cuts drawn uniformly below each budget, and the budget (paper Algorithm 1, line 10).

        c_1 <= .. <= c_{M-1} sorted draws from 1..b,  c_M = b

    The last cut is the budget, since pass rates and the answer that a user gets are measured there.
    Cuts may fall together (`distinct_cuts`).

    Args:
      budgets: thinking budget of each trace, in tokens, at least 1.
    """
    shape = (*budgets.shape, num_cuts - 1)
    drawn = jax.random.randint(key, shape, 1, budgets[..., None] + 1, budgets.dtype)
    return jnp.concatenate([jnp.sort(drawn, axis=-1), budgets[..., None]], axis=-1)


def cuts_of_trace(
    cuts: Int[np.ndarray, "*batch M"],
    lengths: Int[np.ndarray, "*batch"],
    budgets: Int[np.ndarray, "*batch"],
) -> Int[np.ndarray, "*batch M"]:
    """Cuts of a budget as cuts of the trace that was written under it.

        ceil(c n / b);  the budget itself, where the whole trace is kept, stays

    Args:
      cuts: in 1..b tokens.
      lengths: n, thinking tokens of each trace.
      budgets: b.
    """
    budgets = budgets[..., None]
    # Places below 2^31 have products that are not.
    share = -(-cuts.astype(np.int64) * lengths[..., None] // np.maximum(budgets, 1))
    return np.where(cuts < budgets, share, cuts).astype(cuts.dtype)


def with_grace(
    cuts: Int[Numbers, "*batch M"], limits: Int[Numbers, "*batch"], grace: int
) -> Int[Numbers, "*batch M"]:
    """Cuts with those at the end of a trace where a grace window lets it end.

        b + g where c >= b, else c

    Args:
      limits: b, tokens after which a trace is cut.
      grace: g, further tokens within which it may wait for a line break.
    """
    limits = limits[..., None]
    return _namespace(cuts).where(cuts >= limits, limits + grace, cuts)


def distinct_cuts(
    cuts: Int[Numbers, "*batch M"], lengths: Int[Numbers, "*batch"]
) -> Int[Numbers, "*batch M"]:
    """For each cut, the first cut that truncates its trace to the same text.

    Cuts at or past the natural end leave the whole trace. Asking for one answer there and reusing
    it, instead of sampling again, keeps sampling noise out of the progress reward: between two
    such cuts it is exactly 0. Outcomes are spread with `take_along_axis(r, source, -1)`.

    Args:
      lengths: thinking tokens of each trace.

    Returns:
      Index of the cut whose answer serves this one; a cut that needs its own maps to itself.
    """
    chex.assert_equal_shape_prefix([cuts, lengths], lengths.ndim)
    xp = _namespace(cuts)
    reached = xp.minimum(cuts, lengths[..., None])
    same = reached[..., :, None] == reached[..., None, :]
    return xp.argmax(same, axis=-1).astype(cuts.dtype)


def cut_shares(kind: str | Sequence[float] | np.ndarray, num_cuts: int) -> Float[np.ndarray, "M"]:
    """Weight of each cut in the objective sum_j w_j R_j.

    The paper weighs cuts alike, which makes every trace an anytime trace: most of its reward is
    paid for answers given long before the budget it was told. The other choices pay more for the
    answer at that budget.

    Args:
      kind: "uniform": 1/M each (Eq. 9). "final_heavy": .7 for the last cut, the rest shared.
        "own_budget": 1 for the last cut (Eq. 1). Or a list of M weights that sum to 1.

    Returns:
      Weights summing to 1, float64, on no device.
    """
    if not isinstance(kind, str):
        weights = np.asarray(kind, np.float64)
        fits = weights.shape == (num_cuts,) and weights.min() >= 0.0
        if not (fits and abs(weights.sum() - 1.0) <= 1e-4):  # of NaN nothing is true
            found = weights.tolist()
            raise ValueError(f"weights: found {found}; give {num_cuts} of at least 0 that sum to 1")
        weights = weights / weights.sum()
    elif kind == "uniform":
        weights = np.full(num_cuts, 1.0 / num_cuts)
    elif kind == "own_budget" or (kind == "final_heavy" and num_cuts == 1):
        weights = np.eye(num_cuts)[-1]
    elif kind == "final_heavy":
        weights = np.full(num_cuts, (1.0 - _FINAL_SHARE) / (num_cuts - 1))
        weights[-1] = _FINAL_SHARE
    else:
        raise ValueError(
            f"weights: found {kind!r}; known are uniform, final_heavy and own_budget, or write "
            f"{num_cuts} numbers"
        )
    return weights


def cut_weights(kind: str | Sequence[float] | np.ndarray, num_cuts: int) -> Float[Array, "M"]:
    """`cut_shares` as JAX computes with them, in float32."""
    return jnp.asarray(cut_shares(kind, num_cuts), jnp.float32)


def progress(r: Float[Numbers, "*batch M"]) -> Float[Numbers, "*batch M"]:
    """Change of the outcome since the previous cut, paper Eq. 8.

        delta_j = r_j - r_{j-1},  with r_0 = 0

    Returns:
      Progress in [-1, 1]; negative where more thinking turned a right answer wrong.
    """
    xp = _namespace(r)
    return xp.diff(r, axis=-1, prepend=xp.zeros_like(r[..., :1]))


def dense_reward(
    r: Float[Numbers, "*batch M"], *, coefficient: Scalar
) -> Float[Numbers, "*batch M"]:
    """Reward of each cut: its outcome plus weighted progress, paper Eq. 7.

        R_j = r_j + lambda (r_j - r_{j-1})

    For 0/1 outcomes the values are 0, 1, 1 + lambda and -lambda, so a value function of R must not
    be squashed into [0, 1]. Summed uniformly the progress telescopes: mean_j R_j =
    mean_j r_j + (lambda / M) r_M. Per trace it is extra weight on the final answer; it tells
    segments apart only through credit that starts at the segment (`advantages.to_go`).

    Args:
      coefficient: lambda.
    """
    return r + coefficient * progress(r)


def outcome_coefficients(
    weights: Float[Numbers, "M"], *, coefficient: Scalar
) -> Float[Numbers, "M"]:
    """Total weight of each outcome r_j in the objective sum_j w_j R_j.

        u_j = (1 + lambda) w_j - lambda w_{j+1},  w_{M+1} = 0

    r_j enters R_j as outcome and progress, and R_{j+1} as lost progress. With uniform weights that
    is 1/M, and (1 + lambda)/M for the last. A weight that grows from one cut to the next by more
    than a factor (1 + lambda)/lambda makes u_j negative: the objective pays for a wrong answer at
    j. "final_heavy" over 4 cuts does so from lambda = 1/6 up.

    Args:
      coefficient: lambda of Eq. 7.
    """
    following = _namespace(weights).append(weights[1:], 0.0)
    return (1.0 + coefficient) * weights - coefficient * following
