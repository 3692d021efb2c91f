"""Checks by which a fleet finds a server that samples with other weights than it was sent.

After each push every server is asked for one token after each of some contexts. The learner scores
these tokens with the weights of the push and with the weights of the push before it. The contexts
are chosen and scored before the push, so that no copy of the older weights is needed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from bacr_jax.types import Params

# Number of contexts of a push.
CONTEXTS = 64
# Maximum response tokens in a context.
DEPTH = 8
# Largest root mean square difference of log-probabilities, in nats, by the type in which server and
# learner take products.
BOUNDS = {"float32": 1e-3, "bfloat16": 0.1}
# Differences below this share of the bound are rounding.
_RESOLUTION = 1e-3
# Share of the deciding tokens that are nearer to the older weights, for a server that has kept the
# older weights. For a server with the weights of the push, the share is at most one half, because
# rounding errors are symmetric.
_NEARER_OF_STALE = 0.9
# Evidence at which a server is refused: a server with the right weights reaches it once in 1e8
# tokens at most.
CERTAIN = math.log(1e8)


@dataclass(frozen=True)
class Context:
    """A prompt with the beginning of a response.

    Attributes:
      budget: budget in thinking tokens that the policy reads; None if it reads no budget.
    """

    prompt: tuple[int, ...]
    budget: int | None
    response: tuple[int, ...] = ()


@dataclass(frozen=True)
class Probe:
    """Supplies contexts and the learner's scores of them.

    Attributes:
      draw: returns the prompts and budgets for the push of a version; they differ from push to
        push.
      score: returns the log-probability of every token after each context.
    """

    draw: Callable[[int], list[Context]]
    score: Callable[[Params, Sequence[Context]], Float[np.ndarray, "n V"]]


def rms_difference(theirs: Float[np.ndarray, "n"], ours: Float[np.ndarray, "n"]) -> float:
    """Returns the root mean square difference of log-probabilities, in nats."""
    mean_square = np.mean(np.square(theirs - ours))
    return float(np.sqrt(mean_square))


def evidence_of_stale_weights(
    theirs: Float[np.ndarray, "n"],
    ours: Float[np.ndarray, "n"],
    before: Float[np.ndarray, "n"],
    bound: float,
) -> float:
    """Returns the log-likelihood ratio of "has kept the older weights" to "has the newer ones".

    A token decides if both weights score it differently and the server's log-probability is more
    than twice as near to one score as to the other score. The distance does not count, so no
    assumption about the size of rounding errors is needed.

    Args:
      theirs: the server's log-probabilities of the tokens that it drew.
      ours: scores of these tokens by the weights of this push.
      before: scores by the weights of the push before.
      bound: value of `BOUNDS` for the server's type.
    """
    differs = np.abs(ours - before) > _RESOLUTION * bound
    to_ours = np.abs(theirs - ours)
    to_before = np.abs(theirs - before)
    is_nearer_to_before = differs & (2 * to_before < to_ours)
    is_nearer_to_ours = differs & (2 * to_ours < to_before)
    # Log-likelihood ratio of one token that is nearer to the older (newer) weights.
    evidence_of_before = math.log(2 * _NEARER_OF_STALE)
    evidence_of_ours = math.log(2 * (1 - _NEARER_OF_STALE))
    before_tokens = int(np.sum(is_nearer_to_before))
    our_tokens = int(np.sum(is_nearer_to_ours))
    return before_tokens * evidence_of_before + our_tokens * evidence_of_ours


def picked(
    scores: Float[np.ndarray, "n V"], tokens: Int[np.ndarray, "n"]
) -> Float[np.ndarray, "n"]:
    """Returns the scores of one token after each context."""
    rows = np.arange(len(tokens))
    return scores[rows, tokens].astype(np.float64)
