"""Numbers of the variance study: what variance.json holds."""

import dataclasses
import json
import operator
import os
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from bacr_jax.runs.provenance import VERSIONED
from bacr_study.statistics import rounded
from bacr_study.variance import noise
from bacr_study.variance.baselines import BY_NAME, Variants, variants
from bacr_study.variance.measurement import Measured, Result
from bacr_study.variance.noise import Noise
from bacr_study.variance.settings import KIND, VarianceSettings

# Significant digits, so that the file is small.
_DIGITS = 5
_READ = {"one": "1 answer", "several": "{answers} answers", "pooled": "{answers} answers, pooled"}
# Drawn and tabulated by group size and budget, in the reading of all answers; the others stand in
# variance.json.
_SHOWN = (
    *("none", "group_mean", "loo", "brpo", "brpo_loo", "v1", "opo", "opo_loo", "token"),
    *("token_loo", "value_saved", "value_cut", "value", "value_trajectory", "residual_loo"),
    *("shrink", "history", "shrink_history", "rescaled", "rescaled_interior", "rescaled_constant"),
    *("rescaled_group", "score_weighted", "score_weighted_saved", "score_weighted_shrink"),
    *("oracle", "oracle_history", "oracle_weighted"),
)
# The same, where there are several answers at a cut.
_OF_SEVERAL = (
    *("everything/pooled", "rescaled_everything/pooled"),
    *("brpo/one", "value/one", "shrink/one", "shrink_history/one"),
)
# An arm and what it is compared with, besides published BRPO.
_PAIRS = (
    *(("score_weighted_shrink", "group_mean"), ("score_weighted_shrink", "shrink")),
    *(("score_weighted", "value"), ("rescaled_interior", "rescaled")),
    *(("rescaled_constant", "rescaled"), ("rescaled_group", "loo")),
    *(("rescaled_group", "score_weighted_shrink"), ("opo_loo", "loo"), ("token_loo", "loo")),
    *(("opo_loo", "score_weighted_shrink"), ("token_loo", "score_weighted_shrink")),
)


def shown(measured: Variants) -> tuple[str, ...]:
    """Variants in pictures and tables."""
    of_all = tuple(measured.name(arm) for arm in _SHOWN)
    return of_all + (_OF_SEVERAL if measured.full == "several" else ())


def middle_group(groups: Sequence[int]) -> int:
    """The group size of whatever is shown of one: that nearest to 8."""
    return min(groups, key=lambda group: abs(group - 8))


def label(name: str, answers: int) -> str:
    """An arm and how it reads the answers, for people."""
    arm, reading = name.split("/")
    return f"{BY_NAME[arm].label}; {_READ[reading].format(answers=answers)}"


def _clusters(questions: Sequence[Int[np.ndarray, " entries"]]) -> Int[np.ndarray, " entries"]:
    """The question of each entry of all seeds, a number of its own for each seed."""
    return np.concatenate([1_000_000 * seed + places for seed, places in enumerate(questions)])


@dataclasses.dataclass(frozen=True)
class _Cell:
    """What every seed measured at a checkpoint in a regime, with groups of one size."""

    results: Sequence[Result]
    group: int
    variants: Variants
    resamples: int

    @property
    def measured(self) -> list[Measured]:
        """By seed."""
        return [result.by_group[self.group] for result in self.results]

    def joined(self, parts: Iterable[Noise]) -> Noise:
        """Noise of all seeds, an entry for each question of each."""
        clusters = _clusters([one.questions for one in self.measured])
        return noise.by_question(Noise.joined(list(parts)), clusters)

    def reduction(self, whole: Noise, **how: Any) -> Float[np.ndarray, "arms 3"]:
        """Noise that each arm has less than the published method."""
        return whole.reduction(self.variants.against, resamples=self.resamples, **how)

    def only_shown(self, whole: Noise) -> dict[str, Any]:
        """`reduction` of the arms in tables."""
        reduction, kept = self.reduction(whole), shown(self.variants)
        return {arm: reduction[i] for i, arm in enumerate(self.variants.names) if arm in kept}

    def compared(self, whole: Noise) -> dict[str, Any]:
        """Noise that one arm has less than another, from the same resamples of questions."""
        place = self.variants.place
        return {
            f"{one} against {other}": whole.reduction(place(other), resamples=self.resamples)[
                place(one)
            ]
            for one, other in _PAIRS
        }

    def arms(self) -> dict[str, dict[str, Any]]:
        """Every number of every arm."""
        against, whole = self.variants.against, self.joined(one.noise for one in self.measured)
        cost = np.mean([one.cost for one in self.measured], axis=0)
        alone = [one.noise.reduction(against, resamples=1)[:, 0] for one in self.measured]
        columns = {
            "reduction": self.reduction(whole),
            "reduction_at_equal_tokens": self.reduction(whole, costs=cost),
            "by_seed": np.stack(alone, axis=1),
            "scale": whole.scale(np.ones(len(whole.signal))),
            "bias": whole.bias(),
            "advantage_variance": np.mean([one.spread for one in self.measured], axis=0),
            "tokens_a_trace": cost,
        }
        return {
            arm: {name: column[i] for name, column in columns.items()}
            for i, arm in enumerate(self.variants.names)
        }

    def by_budget(self) -> dict[str, dict[str, Any]]:
        """Reductions by budget: of cells under one budget, or of the traces in a range."""
        budgets = np.concatenate([one.budgets for one in self.measured])
        if not (budgets > 0).all():
            bins = zip(*(one.bins.items() for one in self.measured))
            # Ranges are called as they are in the first seed.
            parts = {seeds[0][0]: self.joined(part for _, part in seeds) for seeds in bins}
        else:
            entries = Noise.joined([one.noise for one in self.measured])
            clusters = _clusters([one.questions for one in self.measured])
            parts = {
                str(budget): noise.by_question(
                    entries.each(operator.itemgetter(budgets == budget)),
                    clusters[budgets == budget],
                )
                for budget in np.unique(budgets)
            }
        return {name: self.only_shown(part) for name, part in parts.items()}

    def by_value(self) -> list[dict[str, Any]]:
        """Reductions, and arm against arm, by ranges of V from the lowest to the highest."""
        parts = [self.joined(seeds) for seeds in zip(*(one.by_value for one in self.measured))]
        return [{"arms": self.only_shown(x), "compared": self.compared(x)} for x in parts]

    def with_answers(self) -> dict[str, Any]:
        """Reductions of the gradient of thinking and answers together."""
        found = [one.with_answers for one in self.measured if one.with_answers is not None]
        if not found:
            return {}
        clusters = _clusters([one.answer_questions for one in self.measured])
        whole, trained = noise.by_question(Noise.joined(found), clusters), self.variants.trained
        against = trained.index(self.variants.against)
        reduction = whole.reduction(against, resamples=self.resamples)
        return {self.variants.names[i]: reduction[place] for place, i in enumerate(trained)}

    def pool(self, result: Result) -> dict[str, Any]:
        """What is said of one pool by itself."""
        # What a batch predicts is how much one number, moved by scores, saves against the mean.
        place, of_pool = self.variants.place, result.by_group[self.group].noise
        against_mean = of_pool.reduction(place("loo"), resamples=1)
        return {
            "seed": result.seed,
            "right": result.right,
            "measured_saving": against_mean[place("rescaled_group"), 0],
            **result.diagnostics,
        }


def summary(
    size: str, settings: VarianceSettings, results: Sequence[Result], seconds: float
) -> dict[str, Any]:
    """What variance.json holds."""
    middle = middle_group(settings.groups)
    measured = variants(settings.answers)
    cells = []
    for regime, step in dict.fromkeys((result.regime, result.step) for result in results):
        own = [r for r in results if r.regime == regime and r.step == step]
        of = {group: _Cell(own, group, measured, settings.resamples) for group in settings.groups}
        by_group = {group: cell.arms() for group, cell in of.items()}
        for group, arms in by_group.items():
            if group != middle:
                by_group[group] = {name: arms[name] for name in shown(measured)}
        cell = of[middle]
        cells.append(
            {
                "regime": regime,
                "step": step,
                "groups": by_group,
                "by_budget": cell.by_budget(),
                "by_value": cell.by_value(),
                "compared": cell.compared(cell.joined(one.noise for one in cell.measured)),
                "with_answers": cell.with_answers(),
                "pools": [cell.pool(result) for result in own],
            }
        )
    return {
        "kind": KIND,
        "size": size,
        "settings": json.loads(json.dumps(dataclasses.asdict(settings))),
        "wall_seconds": seconds,
        "versions": {name: version(name) for name in VERSIONED},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "against": measured.names[measured.against],
        "cells": rounded(cells, _DIGITS),
    }
