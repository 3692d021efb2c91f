"""Elastic Reasoning (arXiv 2505.05315): GRPO with thinking truncated at a single small budget."""

import math

from bacr_jax.config.settings import MethodSettings
from bacr_jax.methods.grpo_family import grpo_family, one_budget
from bacr_jax.methods.grpo_family import problems as problems
from bacr_jax.methods.l1 import GRPO_OF_VERL
from bacr_jax.methods.method import Method, Published

PUBLISHED = {
    # The published script uses 1,024 tokens each for the thinking and for the solution.
    "elastic.share": Published(0.25, "ours: 1,024 of 4,096, the largest budget compared at"),
    **GRPO_OF_VERL,
}


def make(config: MethodSettings) -> Method:
    """Builds GRPO whose traces are all truncated at `elastic.share` of the maximum budget."""
    budget = max(math.ceil(config.elastic.share * config.budget.max), 1)
    sample_budgets = one_budget(config, budget)
    return grpo_family(config, "Elastic", sample_budgets=sample_budgets, published=PUBLISHED)
