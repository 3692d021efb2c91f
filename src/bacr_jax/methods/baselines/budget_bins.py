"""Stores running statistics separately for ranges of budgets (`advantage.score_by_budget`).

Each range (bin) covers a factor of two in the budget. The statistics of K bins and M truncation
points are stored as one vector of K * M numbers, ordered by bin. With a single bin, the methods
`spread` and `select` return their argument unchanged.
"""

import math
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Array, Float

from bacr_jax.config.settings import MethodSettings
from bacr_jax.methods.method import GroupBatch, PerCut


@dataclass(frozen=True)
class BudgetBins:
    """A division of budgets into bins, each of which covers a factor of two.

    Attributes:
      smallest: smallest budget that can be sampled, in tokens, at which the first bin starts.
      count: number of bins K.
    """

    smallest: int
    count: int

    def spread(self, batch: GroupBatch, x: PerCut) -> Float[Array, "Q G N"]:
        """Expands M numbers per response to K * M numbers.

        The result contains `x` in the bin of the response's budget, and 0 in all other bins.
        """
        if self.count == 1:
            return x
        return (self._one_hot(batch) * x[:, :, None]).reshape(*x.shape[:2], -1)

    def select(self, batch: GroupBatch, x: Float[Array, "Q G N"]) -> PerCut:
        """Selects, from K * M numbers per response, the M numbers in the bin of its budget."""
        if self.count == 1:
            return x
        return (self._one_hot(batch) * x.reshape(*x.shape[:2], self.count, -1)).sum(2)

    def _one_hot(self, batch: GroupBatch) -> Float[Array, "Q G K one"]:
        # The boundaries are integers, because a rounded logarithm could put a boundary value in
        # either bin.
        limits = self.smallest * 2 ** np.arange(1, self.count)
        index = (batch.budgets[..., None] >= limits.astype(np.int32)).sum(-1)
        return jax.nn.one_hot(index, self.count)[..., None]


def budget_bins(config: MethodSettings) -> BudgetBins:
    """Builds one bin per factor of two, or a single bin if `advantage.score_by_budget` is false."""
    smallest, largest = config.budget_range
    if not config.advantage.score_by_budget:
        return BudgetBins(smallest, 1)
    return BudgetBins(smallest, max(math.ceil(math.log2(largest / smallest)), 1))
