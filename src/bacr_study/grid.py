"""The cells of a study by task, variant and seed, and contrasts between variants."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float

from bacr_jax.evaluation.intervals import rate_intervals
from bacr_jax.evaluation.samples import SAMPLED
from bacr_study.cells import Cell
from bacr_study.spec import MEAN, Study, Variant, cell_id
from bacr_study.statistics import OVER_PROBLEMS, Estimate, crossed_test, mean_interval


@dataclass(frozen=True)
class Setting:
    """What is measured, of whichever arm.

    Attributes:
      budget: key of a budget, or `MEAN`.
      level: only problems of this level; None: all.
      mode: decoding; tables and figures show that by default.
    """

    task: str
    set: str
    budget: str
    level: int | None = None
    mode: str = SAMPLED


@dataclass(frozen=True)
class Grid:
    """The cells that there are."""

    study: Study
    cells: Mapping[str, Cell]

    def of(self, task: str, variant: Variant) -> list[Cell]:
        """The cells of a task and a variant, by seed."""
        ids = (cell_id(task, variant, seed) for seed in self.study.seeds)
        return [self.cells[id_] for id_ in ids if id_ in self.cells]

    def variants(self, task: str) -> list[Variant]:
        """Variants with at least one cell, in order."""
        return [variant for variant in self.study.variants() if self.of(task, variant)]

    def keys(self, where: Setting) -> list[str]:
        """Keys of the budgets that a setting stands for."""
        mean = where.budget == MEAN
        return list(map(str, self.study.task(where.task).budgets)) if mean else [where.budget]

    def entries(self, cell: Cell, where: Setting) -> list[dict[str, Any]] | None:
        """A cell's numbers at a budget, or at all budgets for `MEAN`; None: one is missing."""
        found = [cell.entry(where.set, where.mode, key) for key in self.keys(where)]
        return [entry for entry in found if entry is not None] if all(found) else None

    def rates(self, cell: Cell, where: Setting) -> Float[np.ndarray, "n"] | None:
        """Share of right samples of each problem, or [accuracy] where verdicts are not kept.

        Those of the setting's level alone; None: not known.
        """
        entries, levels = self.entries(cell, where), cell.levels(where.set)
        if entries is None:
            return None
        rates = [cell.rates(where.set, where.mode, key) for key in self.keys(where)]
        known = [one for one in rates if one is not None]
        if where.level is not None:
            kept = len(known) == len(rates) and levels is not None
            return np.mean(known, axis=0)[levels == where.level] if kept else None
        if len(known) < len(rates):
            return np.array([np.mean([entry["accuracy"] for entry in entries])])
        return np.mean(known, axis=0)

    def table(self, variant: Variant, where: Setting) -> dict[int, Float[np.ndarray, "n"]]:
        """`rates` by seed, of seeds that have any."""
        found = {cell.seed: self.rates(cell, where) for cell in self.of(where.task, variant)}
        return {seed: rates for seed, rates in found.items() if rates is not None and rates.size}

    def difference(self, of: Variant, less: Variant, where: Setting) -> dict[str, Any] | None:
        """`contrast` of two variants in one setting."""
        return self.contrast([(of, where, 1.0), (less, where, -1.0)])

    def contrast(self, terms: Sequence[tuple[Variant, Setting, float]]) -> dict[str, Any] | None:
        """`Contrast` of a weighted sum of accuracies on the same seeds and problems.

        It is of the seeds that all variants have; None: there are none, or too few.

        Args:
          terms: variant, where, and weight of each accuracy; weights sum to 0.
        """
        tables = [self.table(variant, where) for variant, where, _ in terms]
        seeds = [s for s in self.study.seeds if all(s in table for table in tables)]
        if not seeds:
            return None
        sizes = {len(table[seed]) for table in tables for seed in seeds}
        values = np.zeros(())
        for table, (*_, weight) in zip(tables, terms):
            rows = np.stack(
                [table[s] if len(sizes) == 1 else table[s].mean(keepdims=True) for s in seeds]
            )
            values = values + weight * rows
        contrast = crossed_test(values)
        return None if contrast is None else asdict(contrast)

    def estimate(self, variant: Variant, where: Setting, key: str) -> Estimate | None:
        """Mean over seeds of a number, with its interval.

        Where there is one seed, or seeds do not vary, the interval of an accuracy is that over
        problems. None: no cell has the number.
        """
        found = [self.entries(cell, where) for cell in self.of(where.task, variant)]
        values = [float(np.mean([entry[key] for entry in entries])) for entries in found if entries]
        if not values:
            return None
        estimate = mean_interval(values)
        if key != "accuracy" or np.ptp(values) > 0 or where.mode != SAMPLED:
            return estimate
        rows = list(self.table(variant, where).values())
        if not rows or rows[0].size < 2:
            return estimate
        low, high = map(float, rate_intervals(np.mean(rows, axis=0)[:, None])[0])
        return replace(estimate, low=low, high=high, basis=OVER_PROBLEMS)
