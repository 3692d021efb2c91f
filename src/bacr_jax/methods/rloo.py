"""RLOO (arXiv 2402.14740): every trace against the mean of the others of its group."""

from bacr_jax import advantages
from bacr_jax.config import Config
from bacr_jax.methods.grpo_family import NO_ENTROPY, grpo_family
from bacr_jax.methods.grpo_family import problems as problems
from bacr_jax.methods.method import Method, Published

# It clips nothing, which no setting can say; with one update per rollout no ratio leaves 1. Its
# divergence from the starting policy is a part of the reward, whose weight is that of a task.
PUBLISHED = {
    "loss.aggregate": Published("constant", "a response is one action; the constant only scales"),
    **NO_ENTROPY,
}


def make(config: Config) -> Method:
    """Correctness minus the leave-one-out mean."""
    leave_one_out = advantages.rloo_advantage
    return grpo_family(config, "RLOO", leave_one_out, centred=leave_one_out, published=PUBLISHED)
