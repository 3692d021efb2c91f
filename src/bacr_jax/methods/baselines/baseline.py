"""Defines `Baseline`, the baseline of budget-conditioned advantages, and its data types.

`methods/bacr.py` calls a `Baseline` where the paper uses V(q, b). The other modules of this package
construct baselines.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxtyping import Array, Float

from bacr_jax.methods.method import GroupBatch, PerCut

# Running statistics (moments) of earlier batches, such as mean rewards, keyed by name. They are
# saved in every checkpoint.
State = dict[str, Array]

# Decay of the running statistics per training step, which averages over roughly the last ten
# batches.
MOMENT_DECAY = 0.9


class Estimate(NamedTuple):
    """The expected reward and correctness of each response at each truncation point.

    Attributes:
      reward: baseline of the rewards R (Eq. 7), in units of reward.
      correctness: baseline of the outcomes r, which is a mean outcome or a probability.
    """

    reward: PerCut
    correctness: PerCut


class Credit(NamedTuple):
    """The advantages of a batch before they are divided by their scale.

    A cut is a truncation point of the thinking, at which an answer is sampled. A segment is the
    thinking between two cuts.

    Attributes:
      thinking: advantage of each thinking segment.
      answers: advantage of the answer at each cut.
      returns: return of each thinking segment, the part of the reward that is credited to it.
      tokens: advantage of each thinking token, or None if all tokens of a segment have the same
        advantage.
    """

    thinking: PerCut
    answers: PerCut
    returns: PerCut
    tokens: Float[Array, "Q G T"] | None = None


# Defaults of `Baseline` for baselines without statistics of earlier batches -----------------------


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
    """A baseline of the rewards, as a set of pure functions.

    The state of a baseline contains running statistics (moments) of earlier batches.

    Attributes:
      estimate: (state, batch, rewards R [Q, G, M], values V [Q, G, M] or None) -> `Estimate`.
      uses_value: True if `estimate` requires V, the prediction of the value head.
      needs_score_norms: True if `estimate` requires `GroupBatch.cumulative_score_norm`.
      init_state: () -> state before training.
      update: (state, batch, rewards, values) -> state after the batch.
      refine: (state, batch, `Credit`) -> `Credit`. Corrects the advantages that were computed with
        `estimate`.
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
    """Updates an exponentially weighted sum of a statistic over batches.

        a^p old + (1 - a)^p new,   a = MOMENT_DECAY

    Args:
      old: weighted sum over earlier batches.
      new: statistic of the current batch.
      power: p. Use 1 for a mean and 2 for a sum of squared weights.
    """
    return MOMENT_DECAY**power * old + (1.0 - MOMENT_DECAY) ** power * new
