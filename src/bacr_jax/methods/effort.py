"""Adaptive effort control, e1 (arXiv 2510.27042): budgets relative to the policy's mean length."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from bacr_jax.config.settings import MethodSettings
from bacr_jax.methods.grpo_family import CLIPPED, NO_ENTROPY, grpo_family
from bacr_jax.methods.l1 import BUDGET_IN_PROMPT, prompt_budget_settings
from bacr_jax.methods.l1 import problems as problems
from bacr_jax.methods.method import GroupBatch, Method, Published

_UNCHECKED = "unchecked: summaries name GRPO and no setting of it"
PUBLISHED = {
    **BUDGET_IN_PROMPT,
    "budget.prior": Published(
        "uniform", "efforts between 0 and 1; how they are drawn: unchecked", verified=False
    ),
    "loss.aggregate": Published("seq_mean_token_mean", _UNCHECKED, verified=False),
    **CLIPPED,
    **NO_ENTROPY,
    "loss.kl_coef": Published(0.0, _UNCHECKED, verified=False),
}


def effort_met(
    lengths: Int[Array, "Q G"], budgets: Int[Array, "Q G"], *, largest: int
) -> Bool[Array, "Q G"]:
    """True for traces that are at most as long as the effort in their prompt allows.

        length <= rho T,   rho = b / b_max

    The effort rho is a fraction of the usual length. T is the mean length of the traces of the same
    question with the same rho.

    Args:
      lengths: number of thinking tokens, below 2^18. The sum over a question must be below 2^25.
      budgets: b, the number in the prompt that specifies the effort, below 2^18.
      largest: b_max, the number that corresponds to full effort.
    """
    has_same_budget = budgets[:, :, None] == budgets[:, None, :]
    total = jnp.where(has_same_budget, lengths[:, None, :], 0).sum(-1)
    count = has_same_budget.sum(-1)
    # The condition length * b_max * count <= b * total is evaluated in integers, because rounded
    # quotients would break exact ties arbitrarily. The products can exceed int32, so the low 12
    # bits of b_max * count and of total are multiplied separately.
    scaled_count = largest * count
    high = budgets * (total >> 12) - lengths * (scaled_count >> 12)
    low = budgets * (total & 0xFFF) - lengths * (scaled_count & 0xFFF)
    return high + (low >> 12) >= 0


def make(config: MethodSettings) -> Method:
    """Builds adaptive effort control: GRPO that rewards correct answers within a length limit.

    The number b in the prompt specifies the effort, the fraction b / b_max. The limit is this
    fraction of the mean length of the traces of the same question with the same effort.
    """

    def met(batch: GroupBatch) -> Bool[Array, "Q G"]:
        return effort_met(batch.thinking, batch.budgets, largest=config.budget.max)

    def reward(state: Any, batch: GroupBatch) -> Float[Array, "Q G"]:
        return batch.outcomes[..., -1] * met(batch)

    def metrics(state: Any, batch: GroupBatch) -> dict[str, Array]:
        return {"effort/met_share": met(batch).mean()}

    return grpo_family(
        config,
        "Effort",
        reward=reward,
        metrics=metrics,
        published=PUBLISHED,
        **prompt_budget_settings(config),
    )
