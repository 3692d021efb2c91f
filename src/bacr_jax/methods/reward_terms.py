"""Reads the two constants of the paper's reward from the config: lambda, and the weights of cuts.

A cut is a truncation point of the thinking, at which an answer is graded.
"""

from jaxtyping import Array, Float

from bacr_jax import rewards
from bacr_jax.config import CutsConfig, RewardConfig


def progress_coefficient(reward: RewardConfig) -> float:
    """Returns lambda of Eq. 7, or 0 if the dense reward is disabled."""
    return reward.coefficient if reward.dense else 0.0


def cut_weights(cuts: CutsConfig) -> Float[Array, "M"]:
    """Returns the weight w_j of each truncation point (cut) in the objective sum_j w_j R_j.

    In the paper, all weights are 1/M (Eq. 9).
    """
    return rewards.cut_weights(cuts.weights, cuts.count)
