"""The two constants of the paper's reward, as specified in the config: lambda and cut weights."""

from jaxtyping import Array, Float

from bacr_jax import rewards
from bacr_jax.config import Config


def progress_coefficient(config: Config) -> float:
    """Returns lambda of Eq. 7, or 0 if the dense reward is disabled."""
    return config.reward.coefficient if config.reward.dense else 0.0


def cut_weights(config: Config) -> Float[Array, "M"]:
    """Returns the weights w in the objective sum_j w_j R_j, which are 1/M in Eq. 9."""
    return rewards.cut_weights(config.cuts.weights, config.cuts.count)
