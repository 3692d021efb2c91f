"""RLOO (arXiv 2402.14740): the baseline of a trace is the mean of the others of its group."""

from bacr_jax import advantages
from bacr_jax.config import Config
from bacr_jax.methods.grpo_family import NO_ENTROPY, grpo_family
from bacr_jax.methods.grpo_family import problems as problems
from bacr_jax.methods.method import Method, Published

# The publication does not clip ratios, and no setting turns clipping off. With one update per
# rollout every ratio is 1, so nothing is clipped. loss.kl_coef is not in the list, because the
# publication's divergence from the starting policy is part of the reward, with a weight per task.
PUBLISHED = {
    "loss.aggregate": Published("constant", "a response is one action; the constant only scales"),
    **NO_ENTROPY,
}


def make(config: Config) -> Method:
    """Returns RLOO: correctness minus the leave-one-out mean of the group."""
    leave_one_out = advantages.rloo_advantage
    return grpo_family(config, "RLOO", leave_one_out, centred=leave_one_out, published=PUBLISHED)
