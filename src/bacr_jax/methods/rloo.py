"""RLOO (arXiv 2402.14740): the baseline is the mean reward of the group's other traces."""

from bacr_jax import advantages
from bacr_jax.config.settings import MethodSettings
from bacr_jax.methods.grpo_family import NO_ENTROPY, grpo_family
from bacr_jax.methods.grpo_family import problems as problems
from bacr_jax.methods.method import Method, Published

# The publication does not clip ratios, and clipping cannot be disabled here. With one update per
# batch, every ratio is 1, so clipping has no effect. loss.kl_coef is not listed, because in the
# publication the divergence from the initial policy is part of the reward, with a different weight
# per task.
PUBLISHED = {
    "loss.aggregate": Published("constant", "a response is one action; the constant only scales"),
    **NO_ENTROPY,
    "train.minibatches": Published(1, "its estimator has no ratio: samples are on-policy"),
}


def make(config: MethodSettings) -> Method:
    """Builds RLOO: correctness minus the mean correctness of the group's other traces."""
    leave_one_out = advantages.rloo_advantage
    return grpo_family(config, "RLOO", leave_one_out, centred=leave_one_out, published=PUBLISHED)
