"""Running moments per doubling of the budget (`advantage.score_by_budget`).

Moments of K bins and M cuts are stored as one vector of K * M numbers, bin by bin. With one bin
every function here returns its argument.
"""

import math
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Array, Float

from bacr_jax.config import Config, derived
from bacr_jax.methods.method import GroupBatch, PerCut


@dataclass(frozen=True)
class BudgetBins:
    """Doublings of the budget, counted from the smallest budget of the prior.

    Attributes:
      smallest: smallest budget, in tokens.
      count: number K of bins.
    """

    smallest: int
    count: int

    def spread(self, batch: GroupBatch, x: PerCut) -> Float[Array, "Q G N"]:
        """Returns K * M numbers per response: x in the bin of its budget, 0 in the others."""
        if self.count == 1:
            return x
        return (self._one_hot(batch) * x[:, :, None]).reshape(*x.shape[:2], -1)

    def select(self, batch: GroupBatch, x: Float[Array, "Q G N"]) -> PerCut:
        """Returns the M numbers of the bin of each response's budget, from K * M per response."""
        if self.count == 1:
            return x
        return (self._one_hot(batch) * x.reshape(*x.shape[:2], self.count, -1)).sum(2)

    def _one_hot(self, batch: GroupBatch) -> Float[Array, "Q G K one"]:
        # Integer limits, because a rounded logarithm could put a limit in either bin.
        limits = self.smallest * 2 ** np.arange(1, self.count)
        index = (batch.budgets[..., None] >= limits.astype(np.int32)).sum(-1)
        return jax.nn.one_hot(index, self.count)[..., None]


def budget_bins(config: Config) -> BudgetBins:
    """Returns one bin per doubling of the budget, or one bin for all budgets."""
    smallest, largest = derived.prior_range(config)
    if not config.advantage.score_by_budget:
        return BudgetBins(smallest, 1)
    return BudgetBins(smallest, max(math.ceil(math.log2(largest / smallest)), 1))
