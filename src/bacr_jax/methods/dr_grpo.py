"""Dr.GRPO (arXiv 2503.20783): GRPO without division by standard deviations or by lengths."""

from bacr_jax import advantages
from bacr_jax.config.settings import MethodSettings
from bacr_jax.methods.grpo_family import CLIPPED, NO_ENTROPY, grpo_family
from bacr_jax.methods.grpo_family import problems as problems
from bacr_jax.methods.method import Method, Published

PUBLISHED = {
    "loss.aggregate": Published("constant", "its correction of the length bias", defining=True),
    **CLIPPED,
    **NO_ENTROPY,
    "loss.kl_coef": Published(0.0, "its released recipe", defining=True),
    "train.minibatches": Published(8, "its released scripts: batches of 128 of 1,024 responses"),
}


def make(config: MethodSettings) -> Method:
    """Builds Dr.GRPO: correctness minus the group mean, in a loss divided by a constant."""
    return grpo_family(config, "Dr.GRPO", advantages.group_advantage, published=PUBLISHED)
