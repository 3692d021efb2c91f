"""Dr.GRPO (arXiv 2503.20783): no division by deviations or by lengths."""

from bacr_jax import advantages
from bacr_jax.config import Config
from bacr_jax.methods.grpo_family import grpo_family, problems
from bacr_jax.methods.method import Method

__all__ = ["make", "problems"]


def make(config: Config) -> Method:
    """Correctness minus the group's mean; token losses over a constant length."""
    return grpo_family(
        config,
        "Dr.GRPO",
        advantages.group_advantage,
        loss={"aggregate": "constant", "kl_coef": 0.0},
    )
