"""Numbers of the variance study: what variance.json holds."""

import dataclasses
import json
import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
from jaxtyping import Float

from bacr_jax.runs.provenance import VERSIONED
from bacr_study.statistics import rounded
from bacr_study.variance.baselines import BY_NAME, PUBLISHED, Variants, variants
from bacr_study.variance.measurement import Measured, Result
from bacr_study.variance.noise import Noise, by_question
from bacr_study.variance.settings import VarianceSettings

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


@dataclasses.dataclass(frozen=True)
class _Cell:
    """What every seed measured at a checkpoint in a regime, with groups of one size."""

    measured: Sequence[Measured]
    variants: Variants
    resamples: int

    @property
    def whole(self) -> Noise:
        """Noise of all traces."""
        return by_question([one.noise for one in self.measured])

    def reduction(self, whole: Noise, **how: Any) -> Float[np.ndarray, "arms 3"]:
        """Noise that each arm has less than the published method."""
        against = self.variants.place(PUBLISHED)
        return whole.reduction(against, resamples=self.resamples, **how)

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
        against, whole = self.variants.place(PUBLISHED), self.whole
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
        """Reductions of the traces under a budget, or in a range of them."""
        # Ranges are called as they are in the first seed.
        names = self.measured[0].by_budget
        parts = zip(*(one.by_budget.values() for one in self.measured))
        return {name: self.only_shown(by_question(part)) for name, part in zip(names, parts)}

    def by_value(self) -> list[dict[str, Any]]:
        """Reductions, and arm against arm, by ranges of V from the lowest to the highest."""
        parts = [by_question(seeds) for seeds in zip(*(one.by_value for one in self.measured))]
        return [{"arms": self.only_shown(x), "compared": self.compared(x)} for x in parts]

    def with_answers(self) -> dict[str, Any]:
        """Reductions of the gradient of thinking and answers together."""
        found = [one.with_answers for one in self.measured if one.with_answers is not None]
        if not found:
            return {}
        whole = by_question(found)
        trained = self.variants.trained
        against = trained.index(self.variants.place(PUBLISHED))
        reduction = whole.reduction(against, resamples=self.resamples)
        return {self.variants.names[i]: reduction[place] for place, i in enumerate(trained)}

    def pool(self, result: Result, measured: Measured) -> dict[str, Any]:
        """What is said of one pool by itself."""
        # What a batch predicts is how much one number, moved by scores, saves against the mean.
        place = self.variants.place
        against_mean = measured.noise.reduction(place("loo"), resamples=1)
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
        of = {
            group: _Cell([r.by_group[group] for r in own], measured, settings.resamples)
            for group in settings.groups
        }
        cell, by_group = of[middle], {}
        for group, one in of.items():
            arms, kept = one.arms(), measured.names if group == middle else shown(measured)
            by_group[group] = {name: arms[name] for name in kept}
        cells.append(
            {
                "regime": regime,
                "step": step,
                "groups": by_group,
                "by_budget": cell.by_budget(),
                "by_value": cell.by_value(),
                "compared": cell.compared(cell.whole),
                "with_answers": cell.with_answers(),
                "pools": list(map(cell.pool, own, cell.measured)),
            }
        )
    return {
        "kind": "variance",
        "size": size,
        "settings": json.loads(json.dumps(dataclasses.asdict(settings))),
        "wall_seconds": seconds,
        "versions": {name: version(name) for name in VERSIONED},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "against": measured.name(PUBLISHED),
        "cells": rounded(cells, _DIGITS),
    }
