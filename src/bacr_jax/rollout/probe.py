"""Detects servers that sample with different weights than the learner sent to them.

After each weight update, every server samples one token after each of a set of contexts (a prompt
and the beginning of a response). The learner scores these tokens with the current and with the
previous weights. The contexts are drawn and scored before the weights are updated, so no copy of
the previous weights is needed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from bacr_jax.types import Params

# Number of contexts per weight update.
CONTEXTS = 64
# Maximum number of response tokens in a context.
DEPTH = 8
# Maximum root mean square difference between the log-probabilities of server and learner at
# temperature 1, in nats, by the dtype in which both compute matrix products.
BOUNDS = {"float32": 1e-3, "bfloat16": 0.1}
# Differences smaller than this fraction of the bound are considered rounding errors.
_RESOLUTION = 1e-3
# Assumed probability that, if a server still uses the previous weights, its log-probability of a
# token is closer to the learner's log-probability under the previous weights than under the
# current ones. Only tokens that distinguish the weights are counted. For a server with the current
# weights, this probability is at most one half, because rounding errors are symmetric.
_NEARER_OF_STALE = 0.9
# Evidence (a log-likelihood ratio) at which a server is rejected. A server with the right weights
# reaches it at most once in 1e8 tokens.
CERTAIN = math.log(1e8)


@dataclass(frozen=True)
class Context:
    """A prompt followed by the beginning of a response.

    Attributes:
      prompt: token ids of the prompt.
      budget: thinking budget in tokens that the policy receives as input. None without a budget.
      response: token ids of the response so far.
    """

    prompt: tuple[int, ...]
    budget: int | None
    response: tuple[int, ...] = ()


@dataclass(frozen=True)
class Probe:
    """Two functions with which the learner checks the weights of a server.

    Attributes:
      draw: function that returns contexts with empty responses. Its argument is the version number
        of the weights, and each version has different contexts.
      score: function that returns the log-probability, in nats, of every possible next token after
        each context.
      temperature: temperature of these log-probabilities, at which the servers sample too.
    """

    draw: Callable[[int], list[Context]]
    score: Callable[[Params, Sequence[Context]], Float[np.ndarray, "n V"]]
    temperature: float


def largest_difference(dtype: str, temperature: float) -> float:
    """Returns the maximum root mean square difference between log-probabilities, in nats.

    Log-probabilities are computed from logits / temperature, so a temperature below 1 increases
    rounding errors.

    Args:
      dtype: dtype in which server and learner compute matrix products.
      temperature: sampling temperature.
    """
    return BOUNDS[dtype] / min(temperature, 1.0)


def rms_difference(theirs: Float[np.ndarray, "n"], ours: Float[np.ndarray, "n"]) -> float:
    """Returns the root mean square difference of log-probabilities, in nats.

    Args:
      theirs: log-probabilities computed by the server.
      ours: log-probabilities of the same tokens, computed by the learner.
    """
    mean_square = np.mean(np.square(theirs - ours))
    return float(np.sqrt(mean_square))


def evidence_of_stale_weights(
    theirs: Float[np.ndarray, "n"],
    ours: Float[np.ndarray, "n"],
    before: Float[np.ndarray, "n"],
    bound: float,
) -> float:
    """Returns the evidence that a server still samples with the previous weights.

    The result is the log-likelihood ratio of "the server has the previous weights" to "the server
    has the current weights". A token is counted if its log-probability differs between the two
    weights, and if the server's value is more than twice as close to one of them as to the other.
    The sizes of the distances are not used, so the size of rounding errors need not be known.

    Args:
      theirs: the server's log-probabilities of the tokens that it sampled.
      ours: log-probabilities of these tokens under the current weights.
      before: log-probabilities of these tokens under the previous weights.
      bound: maximum root mean square difference (`largest_difference`), in nats.
    """
    differs = np.abs(ours - before) > _RESOLUTION * bound
    to_current = np.abs(theirs - ours)
    to_before = np.abs(theirs - before)
    is_nearer_to_before = differs & (2 * to_before < to_current)
    is_nearer_to_ours = differs & (2 * to_current < to_before)
    # Log-likelihood ratio of a single token that is closer to the previous or to the current
    # weights.
    evidence_of_before = math.log(2 * _NEARER_OF_STALE)
    evidence_of_current = math.log(2 * (1 - _NEARER_OF_STALE))
    before_tokens = int(np.sum(is_nearer_to_before))
    our_tokens = int(np.sum(is_nearer_to_ours))
    return before_tokens * evidence_of_before + our_tokens * evidence_of_current


def picked(
    scores: Float[np.ndarray, "n V"], tokens: Int[np.ndarray, "n"]
) -> Float[np.ndarray, "n"]:
    """Returns the log-probability of one token per context.

    Args:
      scores: log-probabilities of all tokens after each context.
      tokens: id of the token to select for each context.
    """
    rows = np.arange(len(tokens))
    return scores[rows, tokens].astype(np.float64)
