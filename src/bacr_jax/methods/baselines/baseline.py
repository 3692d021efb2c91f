"""Defines `Baseline`, the baseline of budget-conditioned advantages, and its data types.

`methods/bacr.py` calls a `Baseline` where the paper has V(q, b). The modules next to this one build
them. Nothing here samples or updates a policy.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxtyping import Array, Float

from bacr_jax.methods.method import GroupBatch, PerCut

# Moments of earlier batches by name, saved with every checkpoint.
State = dict[str, Array]

# Weight that a running moment keeps in each step: about the last ten batches count.
MOMENT_DECAY = 0.9


class Estimate(NamedTuple):
    """Expected reward and correctness of each response at each cut.

    Attributes:
      reward: baseline of R (Eq. 7), in units of reward.
      correctness: baseline of the outcomes r, a probability where the baseline implies one.
    """

    reward: PerCut
    correctness: PerCut


class Credit(NamedTuple):
    """Advantages before they are divided by their scale.

    Attributes:
      thinking: advantage of each thinking segment.
      answers: advantage of the answer at each cut.
      returns: reward that each thinking segment can still change.
      tokens: advantage of each thinking token; None if a segment's tokens share its advantage.
    """

    thinking: PerCut
    answers: PerCut
    returns: PerCut
    tokens: Float[Array, "Q G T"] | None = None


# Defaults of `Baseline`, for a baseline without moments of earlier batches ----------------------


def _no_moments() -> State:
    return {}


def _keep(
    state: State, batch: GroupBatch, reward: PerCut, values: PerCut | None
) -> Mapping[str, Array]:
    return state


def _unchanged(state: State, batch: GroupBatch, credit: Credit) -> Credit:
    return credit


def _no_metrics(state: State) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Baseline:
    """A baseline as pure functions of a batch and of moments of earlier batches.

    Attributes:
      estimate: (state, batch, rewards R [Q, G, M], values V [Q, G, M] or None) -> `Estimate`.
      uses_value: True if `estimate` reads V.
      needs_score_norms: True if `estimate` reads `GroupBatch.path`.
      init_state: moments before training.
      update: (state, batch, rewards, values) -> the baseline's moments after the batch.
      refine: (state, batch, `Credit`) -> `Credit`, a correction of the finished credit.
      metrics: state -> numbers to log, by `group/name`.
    """

    estimate: Callable[[State, GroupBatch, PerCut, PerCut | None], Estimate]
    uses_value: bool = False
    needs_score_norms: bool = False
    init_state: Callable[[], State] = _no_moments
    update: Callable[[State, GroupBatch, PerCut, PerCut | None], Mapping[str, Array]] = _keep
    refine: Callable[[State, GroupBatch, Credit], Credit] = _unchanged
    metrics: Callable[[State], dict[str, Any]] = _no_metrics


def running(old: Array, new: Array, *, power: int = 1) -> Array:
    """Returns an exponentially weighted sum of moments.

        a^p old + (1 - a)^p new,   a = MOMENT_DECAY

    Args:
      power: p. 1 for a mean; 2 for a sum of squared weights.
    """
    return MOMENT_DECAY**power * old + (1.0 - MOMENT_DECAY) ** power * new
