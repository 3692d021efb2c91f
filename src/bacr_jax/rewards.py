"""Truncation-aware dense reward: where a trace is cut, and what each cut is worth.

An outcome r_j is the correctness of the answer given after the first c_j thinking tokens. For a
trace cut at four places,

    cuts    = cut_points(budgets, num_cuts=4)               # [.., M], the last one is the budget
    source  = distinct_cuts(cuts, lengths)                  # cuts past the natural end are one text
    r       = take_along_axis(outcomes, source, -1)         # one verdict per cut
    R       = dense_reward(r, coefficient=.3)               # Eq. 7
    R_bar   = cumulative_reward(R, cut_weights("uniform", 4))   # Eq. 9

The rewards of published length-aware methods that serve as baselines are in `baselines`.
"""

from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from bacr_jax.errors import UserError

Scalar = int | float | Array

# Share of the last cut in "final_heavy". A policy told the largest budget keeps its long, more
# accurate style only if the cut at that budget weighs more than about .6 of the objective.
_FINAL_SHARE = 0.7


def cut_points(budgets: Int[Array, "*batch"], *, num_cuts: int) -> Int[Array, "*batch M"]:
    """Evenly spaced cuts of each budget (paper appendix: b/4, b/2, 3b/4, b).

        c_j = ceil(j b / M),  j = 1..M

    Budgets below M repeat cuts; `distinct_cuts` finds repetitions.

    Args:
      budgets: thinking budget of each trace, in tokens.
      num_cuts: number of cuts M.

    Returns:
      Cuts in tokens, nondecreasing; the last equals the budget.
    """
    index = jnp.arange(1, num_cuts + 1, dtype=budgets.dtype)
    return (budgets[..., None] * index + (num_cuts - 1)) // num_cuts


def random_cuts(
    key: PRNGKeyArray, budgets: Int[Array, "*batch"], *, num_cuts: int
) -> Int[Array, "*batch M"]:
    """Cuts drawn uniformly from 1..b, the last one fixed at the budget.

    Args:
      key: PRNG key.
      budgets: thinking budget of each trace, in tokens, at least 1.
      num_cuts: number of cuts M.

    Returns:
      Cuts in tokens, nondecreasing, possibly repeated; the last equals the budget.
    """
    u = jax.random.uniform(key, (*budgets.shape, num_cuts - 1))
    inner = 1 + jnp.floor(u * budgets[..., None]).astype(budgets.dtype)
    inner = jnp.sort(jnp.minimum(inner, budgets[..., None]), axis=-1)
    return jnp.concatenate([inner, budgets[..., None]], axis=-1)


def distinct_cuts(
    cuts: Int[Array, "*batch M"], lengths: Int[Array, "*batch"]
) -> Int[Array, "*batch M"]:
    """For each cut, the first cut that truncates its trace to the same text.

    Cuts at or past the natural end leave the whole trace. Asking for one answer there and reusing
    it, instead of sampling again, keeps sampling noise out of the progress reward: between two
    such cuts it is exactly 0. Outcomes are spread with `take_along_axis(r, source, -1)`.

    Args:
      cuts: cuts in tokens.
      lengths: thinking tokens of each trace.

    Returns:
      Index of the cut whose answer serves this one; a cut that needs its own maps to itself.
    """
    chex.assert_equal_shape_prefix([cuts, lengths], lengths.ndim)
    reached = jnp.minimum(cuts, lengths[..., None])
    same = reached[..., :, None] == reached[..., None, :]
    return jnp.argmax(same, axis=-1).astype(cuts.dtype)


def cut_weights(kind: str | Sequence[float], num_cuts: int) -> Float[Array, "M"]:
    """Weight of each cut in the objective sum_j w_j R_j.

    The paper weighs cuts alike, which makes every trace an anytime trace: most of its reward is
    paid for answers given long before the budget it was told. The other choices pay more for the
    answer at that budget.

    Args:
      kind: "uniform": 1/M each (Eq. 9). "final_heavy": .7 for the last cut, the rest shared.
        "own_budget": 1 for the last cut (Eq. 1). Or a list of M weights that sum to 1.
      num_cuts: number of cuts M.

    Returns:
      Weights summing to 1.

    Raises:
      UserError: an unknown name, or a list of wrong length, sign or sum.
    """
    if kind == "uniform":
        weights = np.full(num_cuts, 1.0 / num_cuts)
    elif kind == "own_budget" or (kind == "final_heavy" and num_cuts == 1):
        weights = np.eye(num_cuts)[-1]
    elif kind == "final_heavy":
        weights = np.full(num_cuts, (1.0 - _FINAL_SHARE) / (num_cuts - 1))
        weights[-1] = _FINAL_SHARE
    elif isinstance(kind, str):
        raise UserError(
            f"cuts.weights: found {kind!r}; write uniform, final_heavy, own_budget or a list"
        )
    else:
        weights = np.asarray(kind, np.float64)
        if weights.shape != (num_cuts,):
            raise UserError(
                f"cuts.weights: found {weights.size} values for {num_cuts} cuts; write one per cut"
            )
        if weights.min() < 0.0 or abs(weights.sum() - 1.0) > 1e-4:
            raise UserError(
                f"cuts.weights: found {list(kind)}; write weights of at least 0 that sum to 1"
            )
        weights = weights / weights.sum()
    return jnp.asarray(weights, jnp.float32)


def progress(r: Float[Array, "*batch M"]) -> Float[Array, "*batch M"]:
    """Change of the outcome since the previous cut, paper Eq. 8.

        delta_j = r_j - r_{j-1},  with r_0 = 0

    Args:
      r: outcomes, in [0, 1].

    Returns:
      Progress in [-1, 1]; negative where more thinking turned a right answer wrong.
    """
    return jnp.diff(r, axis=-1, prepend=jnp.zeros_like(r[..., :1]))


def dense_reward(r: Float[Array, "*batch M"], *, coefficient: Scalar) -> Float[Array, "*batch M"]:
    """Reward of each cut: its outcome plus weighted progress, paper Eq. 7.

        R_j = r_j + lambda (r_j - r_{j-1})

    For 0/1 outcomes the values are 0, 1, 1 + lambda and -lambda, so a value function of R must not
    be squashed into [0, 1]. Summed uniformly the progress telescopes: mean_j R_j =
    mean_j r_j + (lambda / M) r_M. Per trace it is extra weight on the final answer; it tells
    segments apart only through credit that starts at the segment (`advantages.to_go`).

    Args:
      r: outcomes, in [0, 1].
      coefficient: lambda.

    Returns:
      R.
    """
    return r + coefficient * progress(r)


def cumulative_reward(
    dense: Float[Array, "*batch M"], weights: Float[Array, "M"]
) -> Float[Array, "*batch"]:
    """Reward of a trace: its cuts' rewards averaged, paper Eq. 9 with general weights.

        R_bar = sum_j w_j R_j

    Args:
      dense: R, one per cut.
      weights: w (`cut_weights`), uniform in the paper.

    Returns:
      One reward per trace.
    """
    chex.assert_rank(weights, 1)
    chex.assert_axis_dimension(dense, -1, weights.shape[0])
    return jnp.sum(weights * dense, axis=-1)
