"""Numbers of the variance study: what variance.json holds."""

import dataclasses
import json
import operator
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np

from bacr_jax.runs.provenance import VERSIONED
from bacr_study.variance import noise
from bacr_study.variance.baselines import BY_NAME, Variants, variants
from bacr_study.variance.measurement import Result
from bacr_study.variance.noise import Noise
from bacr_study.variance.settings import KIND, VarianceSettings

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


def _merged(
    results: Sequence[Result], group: int, take: str = "noise", questions: str = "questions"
) -> tuple[Noise, np.ndarray]:
    """Noise of all seeds, and the question of each entry, a number of its own for each seed."""
    measured = [result.by_group[group] for result in results]
    clusters = [1_000_000 * index + getattr(one, questions) for index, one in enumerate(measured)]
    return Noise.joined([getattr(one, take) for one in measured]), np.concatenate(clusters)


def _rounded(value: Any) -> Any:
    """Five significant digits, so that the file is small; null for what can't be told."""
    if isinstance(value, Mapping):
        return {str(name): _rounded(x) for name, x in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_rounded(x) for x in value]
    if not isinstance(value, float | np.floating):
        return value
    return float(f"{value:.5g}") if np.isfinite(value) else None


def _arms(
    results: Sequence[Result], group: int, measured: Variants, resamples: int
) -> dict[str, dict[str, Any]]:
    """Every number of every arm at one group size, over all seeds."""
    entries, clusters = _merged(results, group)
    whole = noise.by_question(entries, clusters)
    cost = np.mean([result.by_group[group].cost for result in results], axis=0)
    spread = np.mean([result.by_group[group].spread for result in results], axis=0)
    reduction = whole.reduction(measured.against, resamples=resamples)
    at_cost = whole.reduction(measured.against, costs=cost, resamples=resamples)
    alone = [
        result.by_group[group].noise.reduction(measured.against, resamples=1)[:, 0]
        for result in results
    ]
    scale, of_pool = whole.scale(np.ones(len(whole.signal))), whole.measured_scale()
    bias, ratio = whole.bias(), whole.ratio()
    return {
        name: {
            "reduction": reduction[i],
            "reduction_at_equal_tokens": at_cost[i],
            "by_seed": [one[i] for one in alone],
            "noise_to_signal": ratio[i],
            "scale": scale[i],
            "measured_scale": of_pool[i],
            "bias": bias[i],
            "advantage_variance": spread[i],
            "tokens_a_trace": cost[i],
        }
        for i, name in enumerate(measured.names)
    }


def _compared(
    entries: Noise, clusters: np.ndarray, measured: Variants, resamples: int
) -> dict[str, Any]:
    """Noise that one arm has less than another, from the same resamples of questions."""
    whole = noise.by_question(entries, clusters)
    return {
        f"{one} against {other}": whole.reduction(measured.place(other), resamples=resamples)[
            measured.place(one)
        ]
        for one, other in _PAIRS
    }


def _by_budget(
    results: Sequence[Result], group: int, measured: Variants, resamples: int
) -> dict[str, dict[str, Any]]:
    """Reductions by budget: of cells under one budget, or of the traces in a range."""
    entries, clusters = _merged(results, group)
    budgets = np.concatenate([result.by_group[group].budgets for result in results])
    parts: dict[str, tuple[Noise, np.ndarray]] = {}
    if (budgets > 0).all():
        for budget in np.unique(budgets):
            keep = budgets == budget
            parts[str(budget)] = entries.each(operator.itemgetter(keep)), clusters[keep]
    else:
        bins = [list(result.by_group[group].bins.items()) for result in results]
        for place, (name, _) in enumerate(bins[0]):
            parts[name] = Noise.joined([of_seed[place][1] for of_seed in bins]), clusters
    found = {}
    for name, (part, cluster) in parts.items():
        reduction = noise.by_question(part, cluster).reduction(
            measured.against, resamples=resamples
        )
        found[name] = _only_shown(reduction, measured)
    return found


def _only_shown(reduction: np.ndarray, measured: Variants) -> dict[str, Any]:
    kept = shown(measured)
    return {arm: reduction[i] for i, arm in enumerate(measured.names) if arm in kept}


def _by_value(
    results: Sequence[Result], group: int, measured: Variants, resamples: int
) -> list[dict[str, Any]]:
    """Reductions, and arm against arm, by ranges of V from the lowest to the highest."""
    bins = [result.by_group[group].by_value for result in results]
    _, clusters = _merged(results, group)
    found = []
    for place in range(len(bins[0])):
        part = Noise.joined([of_seed[place] for of_seed in bins])
        reduction = noise.by_question(part, clusters).reduction(
            measured.against, resamples=resamples
        )
        compared = _compared(part, clusters, measured, resamples)
        found.append({"arms": _only_shown(reduction, measured), "compared": compared})
    return found


def _with_answers(
    results: Sequence[Result], group: int, measured: Variants, resamples: int
) -> dict[str, Any]:
    """Reductions of the gradient of thinking and answers together."""
    if results[0].by_group[group].with_answers is None:
        return {}
    entries, clusters = _merged(results, group, "with_answers", "answer_questions")
    against = measured.trained.index(measured.against)
    reduction = noise.by_question(entries, clusters).reduction(against, resamples=resamples)
    return {measured.names[i]: reduction[place] for place, i in enumerate(measured.trained)}


def _pool(result: Result, group: int, measured: Variants) -> dict[str, Any]:
    """What is said of one pool by itself."""
    # What a batch predicts is how much one number, moved by scores, saves against the mean.
    against_mean = result.by_group[group].noise.reduction(measured.place("loo"), resamples=1)
    return {
        "seed": result.seed,
        "right": result.right,
        "across_questions": result.across,
        "seconds_a_trace": result.seconds,
        "measured_saving": against_mean[measured.place("rescaled_group"), 0],
        **result.diagnostics,
    }


def summary(
    size: str, settings: VarianceSettings, results: Sequence[Result], seconds: float
) -> dict[str, Any]:
    """What variance.json holds."""
    middle = middle_group(settings.groups)
    measured = variants(settings.answers)
    places = dict.fromkeys((result.regime, result.step) for result in results)
    cells = []
    for regime, step in places:
        own = [r for r in results if r.regime == regime and r.step == step]
        by_group = {g: _arms(own, g, measured, settings.resamples) for g in settings.groups}
        for group, arms in by_group.items():
            if group != middle:
                by_group[group] = {name: arms[name] for name in shown(measured)}
        cells.append(
            {
                "regime": regime,
                "step": step,
                "groups": by_group,
                "by_budget": _by_budget(own, middle, measured, settings.resamples),
                "by_value": _by_value(own, middle, measured, settings.resamples),
                "compared": _compared(*_merged(own, middle), measured, settings.resamples),
                "with_answers": _with_answers(own, middle, measured, settings.resamples),
                "pools": [_pool(result, middle, measured) for result in own],
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
        "cells": _rounded(cells),
    }
