"""GRPO (arXiv 2402.03300): advantages normalised within the group, at a fixed budget."""

from bacr_jax import advantages
from bacr_jax.config import Config
from bacr_jax.methods.grpo_family import grpo_family, problems
from bacr_jax.methods.method import Method

__all__ = ["make", "problems"]


def make(config: Config) -> Method:
    """Correctness minus the group's mean, over the group's deviation."""
    return grpo_family(config, "GRPO", advantages.grpo_advantage)
