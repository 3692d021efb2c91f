"""Defines `Baseline`, the baseline of budget-conditioned advantages, and its data types.

`methods/bacr.py` calls a `Baseline` where the paper uses V(q, b). The other modules of this package
construct baselines. This module does not sample from or update a policy.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxtyping import Array, Float

from bacr_jax.methods.method import GroupBatch, PerCut

# Moments of earlier batches, keyed by name. They are saved in every checkpoint.
State = dict[str, Array]

# Decay of the running moments per training step, which averages over roughly the last ten batches.
MOMENT_DECAY = 0.9


class Estimate(NamedTuple):
    """Expected reward and expected correctness of each response at each cut.

    Attributes:
      reward: baseline of R (Eq. 7), in units of reward.
      correctness: baseline of the outcomes r. It is a probability if the baseline implies one.
    """

    reward: PerCut
    correctness: PerCut


class Credit(NamedTuple):
    """Advantages before they are divided by their scale.

    Attributes:
      thinking: advantage of each thinking segment.
      answers: advantage of the answer at each cut.
      returns: reward that each thinking segment can still influence.
      tokens: advantage of each thinking token, or None if all tokens of a segment have the same
        advantage.
    """

    thinking: PerCut
    answers: PerCut
    returns: PerCut
    tokens: Float[Array, "Q G T"] | None = None


# Defaults of `Baseline` for baselines without moments of earlier batches --------------------------


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
      uses_value: True if `estimate` requires V.
      needs_score_norms: True if `estimate` requires `GroupBatch.cumulative_score_norm`.
      init_state: () -> moments before training.
      update: (state, batch, rewards, values) -> moments after the batch.
      refine: (state, batch, `Credit`) -> `Credit`. Corrects the final credit.
      metrics: state -> metrics to log, keyed by `group/name`.
    """

    estimate: Callable[[State, GroupBatch, PerCut, PerCut | None], Estimate]
    uses_value: bool = False
    needs_score_norms: bool = False
    init_state: Callable[[], State] = _no_moments
    update: Callable[[State, GroupBatch, PerCut, PerCut | None], Mapping[str, Array]] = _keep
    refine: Callable[[State, GroupBatch, Credit], Credit] = _unchanged
    metrics: Callable[[State], dict[str, Any]] = _no_metrics


def running(old: Array, new: Array, *, power: int = 1) -> Array:
    """Updates an exponentially weighted sum of moments.

        a^p old + (1 - a)^p new,   a = MOMENT_DECAY

    Args:
      power: p. Use 1 for a mean and 2 for a sum of squared weights.
    """
    return MOMENT_DECAY**power * old + (1.0 - MOMENT_DECAY) ** power * new
