"""Adaptive effort control, e1 (arXiv 2510.27042): a budget relative to the policy's own length."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from bacr_jax.config import Config
from bacr_jax.methods.grpo_family import CLIPPED, NO_ENTROPY, grpo_family
from bacr_jax.methods.l1 import TOLD, told_alone
from bacr_jax.methods.l1 import problems as problems
from bacr_jax.methods.method import GroupBatch, Method, Published

_UNCHECKED = "unchecked: summaries name GRPO and no setting of it"
PUBLISHED = {
    **TOLD,
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
    """Whether a trace is short enough for its effort.

        length <= rho T,   rho = b / b_max,   T the mean length of its question's traces at that rho

    Args:
      lengths: thinking tokens, below 2^18, their sum over a question below 2^25.
      budgets: b, the number that stands for the effort, below 2^18.
      largest: b_max, the number of full effort.
    """
    alike = budgets[:, :, None] == budgets[:, None, :]
    total, count = jnp.where(alike, lengths[:, None, :], 0).sum(-1), alike.sum(-1)
    # In integers, length b_max n <= b total: rounded quotients leave exact ties on either side.
    # Products may pass int32, so that 12 bits of one factor stand apart.
    split = lambda x: (x >> 12, x & 0xFFF)
    ours, most = split(largest * count), split(total)
    high, low = (budgets * m - lengths * o for m, o in zip(most, ours))
    return high + (low >> 12) >= 0


def make(config: Config) -> Method:
    """GRPO on right answers that took at most the told share of the group's mean length."""

    def met(batch: GroupBatch) -> Bool[Array, "Q G"]:
        return effort_met(batch.thinking, batch.budgets, largest=config.budget.max)

    def reward(state: Any, batch: GroupBatch) -> Float[Array, "Q G"]:
        return batch.outcomes[..., -1] * met(batch)

    def metrics(state: Any, batch: GroupBatch) -> dict[str, Array]:
        return {"effort/met_share": met(batch).mean()}

    fields = told_alone(config)
    return grpo_family(
        config, "Effort", reward=reward, metrics=metrics, published=PUBLISHED, **fields
    )
