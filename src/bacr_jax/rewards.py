"""Computes the truncation-aware dense reward of a reasoning trace.

A trace is truncated at M truncation points (cuts). Cut j keeps the first c_j thinking tokens, and
the policy then answers. The outcome r_j is the correctness of this answer. Each cut has a reward
R_j, and the reward of the trace is their weighted sum. For a trace with four cuts:

    cuts    = cut_points(budgets, num_cuts=4)               # [.., M], the last cut is the budget
    source  = distinct_cuts(cuts, lengths)                  # cuts past the end share an answer
    r       = take_along_axis(outcomes, source, -1)         # one outcome per cut
    R       = dense_reward(r, coefficient=.3)               # Eq. 7
    R_bar   = sum(cut_weights("uniform", 4) * R, -1)        # Eq. 9

The functions for Eq. 7 and 8 also accept NumPy arrays, for callers that must not use a device. The
rewards of published length-aware methods are in `methods`.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import TypeVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Num

from bacr_jax.static_arguments import static_arguments
from bacr_jax.types import Scalar

# Functions annotated with `Numbers` return the same array type, JAX or NumPy, as their arguments.
Numbers = TypeVar("Numbers", Array, np.ndarray)

# Weight of the last truncation point (cut), which is at the budget, for "final_heavy". With a
# weight below about .6, training makes the policy abandon long, more accurate traces, even if it
# receives the largest budget.
_FINAL_SHARE = 0.7


def _namespace(x: Array | np.ndarray) -> ModuleType:
    """Returns the array module of `x`: `numpy` for NumPy arrays, else `jax.numpy`."""
    return np if isinstance(x, np.ndarray) else jnp


@static_arguments("num_cuts")
def cut_points(budgets: Int[Array, "*batch"], *, num_cuts: int) -> Int[Array, "*batch M"]:
    """Returns M evenly spaced truncation points (cuts) for each budget.

        c_j = ceil(j b / M),  j = 1..M

    For M = 4 these are b/4, b/2, 3b/4 and b, as in the paper's appendix. For a budget below M, some
    cuts are equal (see `distinct_cuts`).

    Args:
      budgets: thinking budgets b, in tokens.
      num_cuts: number of cuts M per budget.

    Returns:
      Number of thinking tokens that each cut keeps, in increasing order.
    """
    index = jnp.arange(1, num_cuts + 1, dtype=budgets.dtype)
    return (budgets[..., None] * index + (num_cuts - 1)) // num_cuts


@static_arguments("num_cuts")
def random_cut_points(
    key: Array, budgets: Int[Array, "*batch"], *, num_cuts: int
) -> Int[Array, "*batch M"]:
    """Samples M - 1 truncation points (cuts) per trace and appends the budget as the last cut.

        c_1 <= .. <= c_{M-1} sorted uniform samples from 1..b,  c_M = b

    This is line 10 of the paper's Algorithm 1. The last cut is always the budget b, because pass
    rates and the final answer are measured at the budget. Cuts can be equal (see `distinct_cuts`).

    Args:
      key: JAX random key.
      budgets: thinking budget b of each trace, in tokens, at least 1.
      num_cuts: number of cuts M per trace.

    Returns:
      Number of thinking tokens that each cut keeps, in increasing order.
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
    """Rescales truncation points (cuts) from the budget to the actual length of each trace.

        ceil(c n / b) if c < b, else c

    A cut at half the budget moves to half the trace. A cut at the budget is unchanged, because it
    keeps the entire trace. The function takes NumPy arrays only and can't be jitted, because the
    products need 64-bit integers.

    Args:
      cuts: number of thinking tokens c that each cut keeps, in [1, b].
      lengths: number of thinking tokens n of each trace.
      budgets: thinking budget b of each trace, in tokens.

    Returns:
      The rescaled cuts, in tokens.
    """
    chex.assert_shape([lengths, budgets], cuts.shape[:-1])
    budgets = budgets[..., None]
    # Computed in int64, because the product of two int32 values can overflow int32.
    products = cuts.astype(np.int64) * lengths[..., None]
    scaled_cuts = -(-products // np.maximum(budgets, 1))
    return np.where(cuts < budgets, scaled_cuts, cuts).astype(cuts.dtype)


def with_grace(
    cuts: Int[Numbers, "*batch M"], limits: Int[Numbers, "*batch"], grace: Scalar
) -> Int[Numbers, "*batch M"]:
    """Moves truncation points (cuts) at or beyond the budget to the end of the grace window.

        b + g if c >= b, else c

    The grace window allows a trace to exceed its budget by up to g tokens, so that it can end at a
    line break. A cut at the budget must include these tokens.

    Args:
      cuts: number of thinking tokens c that each cut keeps.
      limits: number of thinking tokens b after which each trace is truncated.
      grace: maximum number of tokens g in the grace window.

    Returns:
      The moved cuts, in tokens.
    """
    chex.assert_shape(limits, cuts.shape[:-1])
    limits = limits[..., None]
    return _namespace(cuts).where(cuts >= limits, limits + grace, cuts)


def distinct_cuts(
    cuts: Int[Numbers, "*batch M"], lengths: Int[Numbers, "*batch"]
) -> Int[Numbers, "*batch M"]:
    """Maps each truncation point (cut) to the first cut that keeps the same part of the trace.

    All cuts at or past the natural end of a trace keep the entire trace. These cuts share one
    sampled answer, so that the progress reward between them is exactly 0 instead of sampling noise.
    `take_along_axis(r, source, -1)` copies the outcome of a shared answer to all its cuts.

    Args:
      cuts: number of thinking tokens that each cut keeps.
      lengths: number of thinking tokens of each trace.

    Returns:
      source: for each cut, the index of the cut whose answer it uses. A cut for which an answer was
        sampled maps to itself.
    """
    chex.assert_shape(lengths, cuts.shape[:-1])
    xp = _namespace(cuts)
    reached = xp.minimum(cuts, lengths[..., None])
    is_same_text = reached[..., :, None] == reached[..., None, :]
    return xp.argmax(is_same_text, axis=-1).astype(cuts.dtype)


@static_arguments("kind", "num_cuts")
def cut_shares(kind: str | Sequence[float] | np.ndarray, num_cuts: int) -> Float[np.ndarray, "M"]:
    """Returns the weight w_j of each truncation point (cut) in the objective sum_j w_j R_j.

    The last cut is at the budget that the policy received. The paper weights all cuts equally, so
    most of the reward comes from answers before this budget, as in anytime reasoning. The other
    choices give more weight to the answer at this budget.

    Args:
      kind: one of the following.
        "uniform": 1/M for each cut (Eq. 9).
        "final_heavy": .7 for the last cut, and .3 shared equally by the other cuts.
        "last": 1 for the last cut and 0 for all others (Eq. 1).
        A list of M nonnegative weights that sum to 1.
      num_cuts: number of cuts M.

    Returns:
      Weights that sum to 1, as a float64 NumPy array.

    Raises:
      ValueError: if the kind is unknown, or the list does not contain M nonnegative weights that
        sum to 1.
    """
    if not isinstance(kind, str):
        return _checked_weights(kind, num_cuts)
    if kind == "uniform":
        return np.full(num_cuts, 1.0 / num_cuts)
    if kind == "last" or (kind == "final_heavy" and num_cuts == 1):
        return np.eye(num_cuts)[-1]
    if kind == "final_heavy":
        weights = np.full(num_cuts, (1.0 - _FINAL_SHARE) / (num_cuts - 1))
        weights[-1] = _FINAL_SHARE
        return weights
    raise ValueError(
        "the weights of the truncation points must be uniform, final_heavy or last, or a list of "
        f"{num_cuts} numbers, but are {kind!r}"
    )


def _checked_weights(
    weights: Sequence[float] | np.ndarray, num_cuts: int
) -> Float[np.ndarray, "M"]:
    """Validates a list of weights and rescales the weights so that they sum to exactly 1.

    Raises:
      ValueError: if there are not `num_cuts` nonnegative weights whose sum is 1 up to 1e-4.
    """
    array = np.asarray(weights, np.float64)
    is_valid = array.shape == (num_cuts,) and array.min() >= 0.0
    # The comparison is negated so that NaN is rejected: every comparison with NaN is false.
    if not (is_valid and abs(array.sum() - 1.0) <= 1e-4):
        raise ValueError(
            f"the weights of the truncation points must be {num_cuts} numbers of at least 0 that "
            f"sum to 1, but are {array.tolist()}"
        )
    return array / array.sum()


@static_arguments("kind", "num_cuts")
def cut_weights(kind: str | Sequence[float] | np.ndarray, num_cuts: int) -> Float[Array, "M"]:
    """Returns the weights of the truncation points from `cut_shares` as a float32 JAX array."""
    return jnp.asarray(cut_shares(kind, num_cuts), jnp.float32)


def _signed(r: Numbers) -> Numbers:
    """Converts booleans and unsigned integers to float32, because they can't be negative."""
    return r.astype(np.float32) if r.dtype.kind in "bu" else r


def progress(
    r: Num[Numbers, "*batch M"] | Bool[Numbers, "*batch M"],
) -> Num[Numbers, "*batch M"]:
    """Computes the change of the outcome since the previous truncation point (paper Eq. 8).

        delta_j = r_j - r_{j-1},  with r_0 = 0

    Args:
      r: outcome of each truncation point: correctness of the answer, in [0, 1].

    Returns:
      Progress delta_j in [-1, 1]. It is negative if more thinking turned a correct answer
      into a wrong one.
    """
    r = _signed(r)
    xp = _namespace(r)
    before_first = xp.zeros_like(r[..., :1])
    return xp.diff(r, axis=-1, prepend=before_first)


def dense_reward(
    r: Num[Numbers, "*batch M"] | Bool[Numbers, "*batch M"], *, coefficient: Scalar
) -> Float[Numbers, "*batch M"]:
    """Computes the reward of each truncation point (cut): outcome plus progress (paper Eq. 7).

        R_j = r_j + lambda (r_j - r_{j-1})

    For 0/1 outcomes, R takes the values 0, 1, 1 + lambda and -lambda, so a value function of R must
    not be restricted to [0, 1]. With uniform weights, the progress terms telescope: mean_j R_j =
    mean_j r_j + (lambda / M) r_M. Averaged over a whole trace, progress therefore only adds weight
    to the final answer. Progress distinguishes between the segments of a trace only if the
    advantage of a segment excludes the rewards of earlier cuts (`advantages.to_go`).

    Args:
      r: outcome of each cut: correctness of the answer, in [0, 1].
      coefficient: weight lambda of the progress.
    """
    r = _signed(r)
    return r + coefficient * progress(r)


def outcome_coefficients(
    weights: Float[Numbers, "M"], *, coefficient: Scalar
) -> Float[Numbers, "M"]:
    """Computes the total weight of each outcome r_j in the objective sum_j w_j R_j.

        u_j = (1 + lambda) w_j - lambda w_{j+1},  w_{M+1} = 0

    R_j is the reward of truncation point (cut) j from `dense_reward`. The outcome r_j contributes
    to R_j, directly and through the progress, and r_j is subtracted in the progress of R_{j+1}.
    With uniform weights, u_j is 1/M, and (1 + lambda)/M for the last cut. If the weight grows by
    more than a factor of (1 + lambda)/lambda from cut j to cut j + 1, u_j is negative and the
    objective rewards a wrong answer at cut j. For "final_heavy" with 4 cuts, this happens for
    lambda above 1/6.

    Args:
      weights: weight w_j of each cut.
      coefficient: weight lambda of the progress in Eq. 7.

    Returns:
      Weight u_j of each outcome.
    """
    chex.assert_rank(weights, 1)
    next_weights = _namespace(weights).append(weights[1:], 0.0)
    return (1.0 + coefficient) * weights - coefficient * next_weights
