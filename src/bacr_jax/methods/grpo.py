"""GRPO (arXiv 2402.03300): advantages normalised within the group, at a fixed budget."""

from bacr_jax import advantages
from bacr_jax.config import Config
from bacr_jax.methods.grpo_family import CLIPPED, NO_ENTROPY, grpo_family, problems
from bacr_jax.methods.method import Method, Published

__all__ = ["PUBLISHED", "make", "problems"]

PUBLISHED = {
    "loss.aggregate": Published("seq_mean_token_mean", "arXiv 2402.03300, Eq. 3"),
    **CLIPPED,
    **NO_ENTROPY,
    "loss.kl_coef": Published(0.04, "arXiv 2402.03300, settings of its training"),
    "loss.kl_kind": Published("k3", "arXiv 2402.03300, Eq. 4"),
}


def make(config: Config) -> Method:
    """Correctness minus the group's mean, over the group's deviation."""
    return grpo_family(config, "GRPO", advantages.grpo_advantage, published=PUBLISHED)
