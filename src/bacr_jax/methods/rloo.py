"""RLOO (arXiv 2402.14740): every trace against the mean of the others of its group."""

from bacr_jax import advantages
from bacr_jax.config import Config
from bacr_jax.methods.grpo_family import grpo_family, problems
from bacr_jax.methods.method import Method

__all__ = ["make", "problems"]


def make(config: Config) -> Method:
    """Correctness minus the leave-one-out mean."""
    leave_one_out = advantages.rloo_advantage
    return grpo_family(config, "RLOO", leave_one_out, centred=leave_one_out)
