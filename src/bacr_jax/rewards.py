"""Truncation-aware dense reward: cuts of a trace, and the reward and weight of each cut.

An outcome r_j is the correctness of the answer given after the first c_j thinking tokens. For a
trace cut at four positions,

    cuts    = cut_points(budgets, num_cuts=4)               # [.., M], the last one is the budget
    source  = distinct_cuts(cuts, lengths)                  # cuts past the natural end are one text
    r       = take_along_axis(outcomes, source, -1)         # one verdict per cut
    R       = dense_reward(r, coefficient=.3)               # Eq. 7
    R_bar   = sum(cut_weights("uniform", 4) * R, -1)        # Eq. 9

Eq. 7 and 8 also take NumPy arrays, for callers that must not use a device. The rewards of published
length-aware methods are in `methods`.
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

# A function of Numbers returns the type of array that it takes.
Numbers = TypeVar("Numbers", Array, np.ndarray)

# Weight of the last cut in "final_heavy". A policy with the largest budget in its prompt keeps its
# long, more accurate style only if the cut at that budget has more than about .6 of the weight.
_FINAL_SHARE = 0.7


def _namespace(x: Array | np.ndarray) -> ModuleType:
    """Returns the module with the functions for an array: numpy or jax.numpy."""
    return np if isinstance(x, np.ndarray) else jnp


def cut_points(budgets: Int[Array, "*batch"], *, num_cuts: int) -> Int[Array, "*batch M"]:
    """Returns evenly spaced cuts of each budget, in tokens (paper appendix: b/4, b/2, 3b/4, b).

        c_j = ceil(j b / M),  j = 1..M

    A budget below M has repeated cuts, which `distinct_cuts` finds.
    """
    index = jnp.arange(1, num_cuts + 1, dtype=budgets.dtype)
    return (budgets[..., None] * index + (num_cuts - 1)) // num_cuts


def random_cut_points(
    key: Array, budgets: Int[Array, "*batch"], *, num_cuts: int
) -> Int[Array, "*batch M"]:
    """Draws cuts uniformly up to each budget and adds the budget (paper Algorithm 1, line 10).

        c_1 <= .. <= c_{M-1} sorted draws from 1..b,  c_M = b

    The last cut is the budget, because pass rates and the answer that a user gets are measured at
    the budget. Cuts may be equal (`distinct_cuts`).

    Args:
      budgets: thinking budget of each trace, in tokens, at least 1.
    """
    shape = (*budgets.shape, num_cuts - 1)
    last_cut = budgets[..., None]
    earlier_cuts = jax.random.randint(key, shape, 1, last_cut + 1, budgets.dtype)
    earlier_cuts = jnp.sort(earlier_cuts, axis=-1)
    return jnp.concatenate([earlier_cuts, last_cut], axis=-1)


def cuts_of_trace(
    cuts: Int[np.ndarray, "*batch M"],
    lengths: Int[np.ndarray, "*batch"],
    budgets: Int[np.ndarray, "*batch"],
) -> Int[np.ndarray, "*batch M"]:
    """Scales the cuts of a budget to the length of the trace that was sampled under it.

        ceil(c n / b) if c < b, else c

    A cut at the budget does not change, because it keeps the entire trace.

    Args:
      cuts: c, in 1..b tokens.
      lengths: n, thinking tokens of each trace.
      budgets: b, in tokens.
    """
    budgets = budgets[..., None]
    # In int64, because the product of two positions below 2^31 may exceed 2^31.
    products = cuts.astype(np.int64) * lengths[..., None]
    scaled_cuts = -(-products // np.maximum(budgets, 1))
    return np.where(cuts < budgets, scaled_cuts, cuts).astype(cuts.dtype)


def with_grace(
    cuts: Int[Numbers, "*batch M"], limits: Int[Numbers, "*batch"], grace: int
) -> Int[Numbers, "*batch M"]:
    """Moves the cuts at the end of a trace to the end of its grace window.

        b + g if c >= b, else c

    Args:
      cuts: c, in tokens.
      limits: b, tokens after which a trace is cut.
      grace: g, further tokens in which sampling goes on up to a line break.
    """
    limits = limits[..., None]
    return _namespace(cuts).where(cuts >= limits, limits + grace, cuts)


def distinct_cuts(
    cuts: Int[Numbers, "*batch M"], lengths: Int[Numbers, "*batch"]
) -> Int[Numbers, "*batch M"]:
    """Returns, for each cut, the first cut that truncates the trace to the same text.

    Cuts at or past the natural end leave the entire trace. Such cuts share one sampled answer, so
    that the progress reward between them is exactly 0 instead of sampling noise.
    `take_along_axis(r, source, -1)` copies the outcome of the answer to all its cuts.

    Args:
      cuts: cuts in tokens.
      lengths: thinking tokens of each trace.

    Returns:
      source: for each cut, the index of the cut whose answer it uses. A cut with a sampled answer
      has its own index.
    """
    chex.assert_equal_shape_prefix([cuts, lengths], lengths.ndim)
    xp = _namespace(cuts)
    reached = xp.minimum(cuts, lengths[..., None])
    is_same_text = reached[..., :, None] == reached[..., None, :]
    return xp.argmax(is_same_text, axis=-1).astype(cuts.dtype)


def cut_shares(kind: str | Sequence[float] | np.ndarray, num_cuts: int) -> Float[np.ndarray, "M"]:
    """Returns the weight of each cut in the objective sum_j w_j R_j.

    The paper weighs cuts equally, so most of the reward comes from answers long before the budget
    of the prompt, as in anytime reasoning. The other choices give the answer at that budget more
    weight.

    Args:
      kind: "uniform": 1/M each (Eq. 9). "final_heavy": .7 for the last cut, the rest shared.
        "own_budget": 1 for the last cut (Eq. 1). Or a list of M weights that sum to 1.

    Returns:
      Weights that sum to 1, float64 NumPy.

    Raises:
      ValueError: the kind is unknown, or the list is not M nonnegative weights that sum to 1.
    """
    if not isinstance(kind, str):
        return _checked_weights(kind, num_cuts)
    if kind == "uniform":
        return np.full(num_cuts, 1.0 / num_cuts)
    if kind == "own_budget" or (kind == "final_heavy" and num_cuts == 1):
        return np.eye(num_cuts)[-1]
    if kind == "final_heavy":
        weights = np.full(num_cuts, (1.0 - _FINAL_SHARE) / (num_cuts - 1))
        weights[-1] = _FINAL_SHARE
        return weights
    raise ValueError(
        f"weights: found {kind!r}; write uniform, final_heavy or own_budget, or a list of "
        f"{num_cuts} numbers"
    )


def _checked_weights(
    weights: Sequence[float] | np.ndarray, num_cuts: int
) -> Float[np.ndarray, "M"]:
    """Checks a list of weights and scales it to a sum of exactly 1."""
    array = np.asarray(weights, np.float64)
    is_valid = array.shape == (num_cuts,) and array.min() >= 0.0
    # Written so that NaN is refused: every comparison with NaN is false.
    if not (is_valid and abs(array.sum() - 1.0) <= 1e-4):
        raise ValueError(
            f"weights: found {array.tolist()}; write {num_cuts} numbers of at least 0 that sum to 1"
        )
    return array / array.sum()


def cut_weights(kind: str | Sequence[float] | np.ndarray, num_cuts: int) -> Float[Array, "M"]:
    """Returns `cut_shares` as a float32 JAX array."""
    return jnp.asarray(cut_shares(kind, num_cuts), jnp.float32)


def progress(r: Float[Numbers, "*batch M"]) -> Float[Numbers, "*batch M"]:
    """Returns the change of the outcome since the previous cut (paper Eq. 8).

        delta_j = r_j - r_{j-1},  with r_0 = 0

    Returns:
      Progress in [-1, 1]; negative if more thinking turned a right answer wrong.
    """
    xp = _namespace(r)
    before_first = xp.zeros_like(r[..., :1])
    return xp.diff(r, axis=-1, prepend=before_first)


def dense_reward(
    r: Float[Numbers, "*batch M"], *, coefficient: Scalar
) -> Float[Numbers, "*batch M"]:
    """Returns the reward of each cut, its outcome plus weighted progress (paper Eq. 7).

        R_j = r_j + lambda (r_j - r_{j-1})

    For 0/1 outcomes the values are 0, 1, 1 + lambda and -lambda, so a value function of R must not
    be limited to [0, 1]. With uniform weights the progress telescopes: mean_j R_j =
    mean_j r_j + (lambda / M) r_M. Over a trace, progress is therefore extra weight on the final
    answer. It distinguishes segments only if credit starts at the segment (`advantages.to_go`).

    Args:
      coefficient: lambda.
    """
    return r + coefficient * progress(r)


def outcome_coefficients(
    weights: Float[Numbers, "M"], *, coefficient: Scalar
) -> Float[Numbers, "M"]:
    """Returns the total weight of each outcome r_j in the objective sum_j w_j R_j.

        u_j = (1 + lambda) w_j - lambda w_{j+1},  w_{M+1} = 0

    r_j is part of R_j, as outcome and progress, and of R_{j+1}, as lost progress. With uniform
    weights u_j is 1/M, and (1 + lambda)/M for the last cut. If the weight grows from one cut to the
    next by more than a factor (1 + lambda)/lambda, u_j is negative: the objective rewards a wrong
    answer at j. "final_heavy" over 4 cuts has a negative u_j from lambda = 1/6 up.

    Args:
      weights: w, one per cut.
      coefficient: lambda of Eq. 7.
    """
    next_weights = _namespace(weights).append(weights[1:], 0.0)
    return (1.0 + coefficient) * weights - coefficient * next_weights
