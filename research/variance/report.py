"""Writes the results of the variance study: variance.json, tables and figures."""

import dataclasses
import functools
import json
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from bacr_jax.files import write_atomically, write_json
from bacr_jax.report.charts import Axis, Chart, Mark, Series, colour, marker
from bacr_jax.report.html_page import templates
from bacr_jax.runs.provenance import VERSIONED
from bacr_study.figure_parts import StudyFigure, saved
from bacr_study.statistics import rounded
from research.variance.baselines import BY_NAME, PUBLISHED, Variants, variants
from research.variance.measurement import Measured, Result
from research.variance.noise import Noise, by_question
from research.variance.settings import VarianceSettings

# Number of significant digits in variance.json, which limits its size.
_DIGITS = 5
_READ = {"one": "1 answer", "several": "{answers} answers", "pooled": "{answers} answers, pooled"}
# Arms in the figures and tables, with the reading that uses all answers. All other arms are only in
# variance.json.
_SHOWN = (
    *("none", "group_mean", "loo", "brpo", "brpo_loo", "v1", "opo", "opo_loo", "token"),
    *("token_loo", "value_saved", "value_cut", "value", "value_trajectory", "residual_loo"),
    *("shrink", "history", "shrink_history", "rescaled", "rescaled_interior", "rescaled_constant"),
    *("rescaled_group", "score_weighted", "score_weighted_saved", "score_weighted_shrink"),
    *("oracle", "oracle_history", "oracle_weighted"),
)
# Additional arms in the figures and tables if there are several answers per cut.
_OF_SEVERAL = (
    *("everything/pooled", "rescaled_everything/pooled"),
    *("brpo/one", "value/one", "shrink/one", "shrink_history/one"),
)
# Pairs of arms that are compared with each other, in addition to the comparison with BRPO.
_PAIRS = (
    *(("score_weighted_shrink", "group_mean"), ("score_weighted_shrink", "shrink")),
    *(("score_weighted", "value"), ("rescaled_interior", "rescaled")),
    *(("rescaled_constant", "rescaled"), ("rescaled_group", "loo")),
    *(("rescaled_group", "score_weighted_shrink"), ("opo_loo", "loo"), ("token_loo", "loo")),
    *(("opo_loo", "score_weighted_shrink"), ("token_loo", "score_weighted_shrink")),
)
# Lower limit of the figure's axis of noise reduction, in percent.
_LEAST = -120.0
# Names of the ranges of V, from the lowest. Their number must match `measurement._RANGES`.
_THIRDS = ("lowest third of V", "middle third", "highest third")


def shown(measured: Variants) -> tuple[str, ...]:
    """Returns the names of the variants that the figures and tables show."""
    of_all = tuple(measured.name(arm) for arm in _SHOWN)
    return of_all + (_OF_SEVERAL if measured.full == "several" else ())


def middle_group(groups: Sequence[int]) -> int:
    """Returns the group size for results that are only shown for one size: the nearest to 8."""
    return min(groups, key=lambda group: abs(group - 8))


def label(name: str, answers: int) -> str:
    """Returns the label of a variant, which describes the arm and its reading of the answers."""
    arm, reading = name.split("/")
    return f"{BY_NAME[arm].label}; {_READ[reading].format(answers=answers)}"


@dataclasses.dataclass(frozen=True)
class _Cell:
    """Measurements of all seeds at one checkpoint, in one regime, and for one group size."""

    measured: Sequence[Measured]
    variants: Variants
    resamples: int

    @property
    def whole(self) -> Noise:
        """The noise over all traces."""
        return by_question([one.noise for one in self.measured])

    def reduction(
        self, whole: Noise, against: str = PUBLISHED, **how: Any
    ) -> Float[np.ndarray, "arms 3"]:
        """Returns the noise reduction of each variant relative to the arm `against`."""
        return whole.reduction(self.variants.place(against), resamples=self.resamples, **how)

    def only_shown(self, whole: Noise) -> dict[str, Any]:
        """Returns `reduction` for the variants in the tables."""
        reduction, kept = self.reduction(whole), shown(self.variants)
        return {arm: reduction[i] for i, arm in enumerate(self.variants.names) if arm in kept}

    def compared(self, whole: Noise) -> dict[str, Any]:
        """Returns the noise reduction for the pairs of arms in `_PAIRS`."""
        return {
            f"{one} against {other}": self.reduction(whole, other)[self.variants.place(one)]
            for one, other in _PAIRS
        }

    def arms(self) -> dict[str, dict[str, Any]]:
        """Returns all results of every variant."""
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
        rows = zip(*columns.values())
        return {arm: dict(zip(columns, row)) for arm, row in zip(self.variants.names, rows)}

    def by_budget(self) -> dict[str, dict[str, Any]]:
        """Returns the noise reductions for each budget or range of budgets."""
        # The names of the ranges come from the first seed.
        names = self.measured[0].by_budget
        parts = zip(*(one.by_budget.values() for one in self.measured))
        return {name: self.only_shown(by_question(part)) for name, part in zip(names, parts)}

    def by_value(self) -> list[dict[str, Any]]:
        """Returns the noise reductions and comparisons for each range of V, from the lowest."""
        parts = [by_question(seeds) for seeds in zip(*(one.by_value for one in self.measured))]
        return [{"arms": self.only_shown(x), "compared": self.compared(x)} for x in parts]

    def with_answers(self) -> dict[str, Any]:
        """Returns the noise reductions of the gradient of thinking and answers together."""
        found = [one.with_answers for one in self.measured if one.with_answers is not None]
        if not found:
            return {}
        whole = by_question(found)
        trained = self.variants.trained
        against = trained.index(self.variants.place(PUBLISHED))
        reduction = whole.reduction(against, resamples=self.resamples)
        return {self.variants.names[i]: reduction[place] for place, i in enumerate(trained)}

    def pool(self, result: Result, measured: Measured) -> dict[str, Any]:
        """Returns the results of a single pool."""
        # A batch predicts the noise reduction of a score-weighted constant relative to the mean.
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
    """Returns the content of variance.json."""
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
        "settings": dataclasses.asdict(settings),
        "wall_seconds": seconds,
        "versions": {name: version(name) for name in VERSIONED},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "against": measured.name(PUBLISHED),
        "cells": rounded(cells, _DIGITS),
    }


_UNKNOWN = "can't be told"


def _percent(reduction: Sequence[float | None]) -> str:
    if None in reduction:
        return _UNKNOWN
    value, low, high = (100 * x for x in reduction if x is not None)
    return f"{value:+.1f} [{low:+.1f}, {high:+.1f}]"


def markdown(found: Mapping[str, Any]) -> str:
    """Formats the tables of a summary as Markdown."""
    settings = found["settings"]
    return _markdown.get_template("report.md").render(
        found=found,
        middle=str(middle_group(settings["groups"])),
        kept=shown(variants(settings["answers"])),
        names=_THIRDS,
        label=functools.partial(label, answers=settings["answers"]),
    )


_markdown = templates(Path(__file__).parent)
_markdown.filters |= {
    "percent": _percent,
    "number": lambda value: _UNKNOWN if value is None else f"{value:.3g}",
    "share": lambda value: _UNKNOWN if value is None else f"{100 * value:.0f} %",
}


def noise_figure(found: Mapping[str, Any], regime: str) -> StudyFigure:
    """Plots the noise reduction relative to published BRPO, next to the variance of advantages."""
    settings = found["settings"]
    middle = str(middle_group(settings["groups"]))
    known = found["cells"][0]["groups"][middle]
    names = [name for name in reversed(shown(variants(settings["answers"]))) if name in known]
    noise, spread = list[Series](), list[Series]()
    for number, cell in enumerate(cell for cell in found["cells"] if cell["regime"] == regime):
        places = [i + 0.22 * (1 - number) for i in range(len(names))]
        arms = cell["groups"][middle]
        style: dict[str, Any] = {"colour": colour(number + 1), "line": ""}
        value, low, high = 100 * np.array([arms[name]["reduction"] for name in names], float).T
        ends, at, of = list(zip(low, high)), f"step {cell['step']}", marker(number + 1)
        noise.append(Series(at, value.tolist(), places, ends=ends, across=True, marker=of, **style))
        ratios = [arms[name]["advantage_variance"] for name in names]
        spread.append(Series(at, ratios, places, marker=of, **style))
    ticks = [(i, label(name, settings["answers"])) for i, name in enumerate(names)]
    arms_axis = Axis("", low=-0.6, high=len(names) - 0.4, ticks=ticks)
    percent = Axis("%, at equal scale (95 % interval); more is better", low=_LEAST)
    returns = Axis("over the variance of returns", low=0.0)
    charts = [
        Chart(
            *("less gradient noise than published BRPO", noise, percent, arms_axis),
            marks=[Mark("x", 0.0), Mark("x", 30.0, "dotted")],
            note="dotted: 30 % less, the least that is claimed",
        ),
        Chart("variance of advantages", spread, returns, arms_axis, note="no measure of noise"),
    ]
    seeds = "seeds " * (len(settings["seeds"]) > 1) or "seed "
    seeds += ", ".join(map(str, settings["seeds"]))
    title = f"Same policy, same rollouts: {regime} budgets, G = {middle}, {seeds}"
    return StudyFigure(f"variance_{regime}", title, "", [charts], size=(440, 225))


def predicted_figure(found: Mapping[str, Any]) -> StudyFigure:
    """Draws `predicted_chart` as a figure."""
    title = "Predicted and measured saving"
    chart = predicted_chart(found)
    return StudyFigure("variance_predicted", title, "", [[chart]], legend=2, size=(380, 300))


def predicted_chart(found: Mapping[str, Any]) -> Chart:
    """Plots the predicted noise reduction of a score-weighted constant against the measured one.

    Each pool is a point, with the standard deviation between batches. As in training
    (`score/predicted_saving`), the surprise of a trace is the proxy for the squared norm of its
    score. Pools without a measurement, for example because they have no gradient, are omitted.
    """
    series = list[Series]()
    for number, cell in enumerate(found["cells"], 1):
        pools = [pool for pool in cell["pools"] if pool["measured_saving"] is not None]
        if not pools:
            continue
        of = [pool["scores"]["surprise"] for pool in pools]
        said = [100 * one["predicted_saving"] for one in of]
        spread = [100 * one["deviation_of_saving"] for one in of]
        ends = [(mean - width, mean + width) for mean, width in zip(said, spread)]
        measured = [100 * pool["measured_saving"] for pool in pools]
        name = f"{cell['regime']}, step {cell['step']}"
        style: dict[str, Any] = {"colour": colour(number), "marker": marker(number)}
        series.append(Series(name, said, measured, ends=ends, across=True, line="", **style))
    return Chart(
        "gradient noise that score weights save",
        series,
        Axis("predicted by one batch (%, ± deviation between batches)", low=0.0),
        Axis("measured on the pool (%)", low=0.0),
        diagonal=True,
        note="a point a pool; on the dashed line the prediction is right",
    )


def write(
    folder: Path, size: str, settings: VarianceSettings, results: Sequence[Result], seconds: float
) -> list[Path]:
    """Writes variance.json, variance.md and the figures, and returns their paths."""
    # Converts the summary to JSON and back, so that all keys are strings as in the file.
    found = json.loads(json.dumps(summary(size, settings, results, seconds)))
    paths = [folder / "variance.json", folder / "variance.md"]
    write_json(paths[0], found)
    write_atomically(paths[1], markdown(found))
    for regime in settings.regimes:
        paths += saved(noise_figure(found, regime), folder)
    figure = predicted_figure(found)
    if not figure.rows[0][0].series:
        return paths
    return [*paths, *saved(figure, folder)]
