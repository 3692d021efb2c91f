"""Figures of what happens during training: curves, and the curriculum's budgets."""

import functools
from collections.abc import Iterator

from bacr_jax.report.charts import Axis, Chart, Series, shade
from bacr_study.curves import AXES
from bacr_study.drawing import Drawn, band, looks_of, variant_label
from bacr_study.info import StudyInfo
from bacr_study.items import Results

_AXIS_NAMES = {"step": "steps", "tokens": "generated tokens", "seconds": "seconds"}
# What is drawn: key, its axis, and what a number of it is multiplied by.
_CURVES = (("reward", "mean reward", 1.0), ("accuracy", "held-out accuracy (%)", 100.0))
_SCHEDULE = (
    ("mean_budget", "mean sampled budget", "tokens", 1.0),
    ("weight", "share of sampled questions", "%", 100.0),
    ("mu", "scheduled mean budget", "tokens", 1.0),
    ("pass_rate", "pass rate", "%", 100.0),
)


def convergence_figures(results: Results, study: StudyInfo) -> Iterator[Drawn]:
    """Fig. 4a of the paper: reward and held-out accuracy over training."""
    looks = looks_of(study)
    for task in study.tasks:
        curves = results["convergence"].get(task.id, {}).get("curves", {})
        if not curves:
            continue
        rows = []
        for kind, unit, scale in _CURVES:
            charts = []
            for name in AXES:
                series = [
                    band(curve, scale, looks[variant.arm].series, variant_label(study, variant))
                    for variant in study.variants()
                    if (curve := curves.get(variant.key, {}).get(kind, {}).get(name))
                ]
                charts.append(Chart("", series, Axis(_AXIS_NAMES[name]), Axis(unit)))
            rows.append(charts)
        yield Drawn(
            f"convergence_{task.id}",
            f"Training: {task.label}",
            f"Means over {len(study.seeds)} seeds, shades: 95 % intervals. Above: reward as each "
            "method defines it, averaged in thirtieths of the run; rewards of methods differ in "
            "what they count. Below: greedy accuracy on held-out problems, mean over budgets.",
            rows,
            5,
        )


def curriculum_figures(results: Results, study: StudyInfo) -> Iterator[Drawn]:
    """Fig. 3 of the paper: budgets and weights of the difficulty groups over training."""
    for task in study.tasks:
        for key, groups in results["curriculum"].get(task.id, {}).items():
            variant = next(v for v in study.variants() if v.key == key)
            words = {0: " (easiest)", len(groups) - 1: " (hardest)"}
            charts = []
            for kind, heading, unit, scale in _SCHEDULE:
                series = []
                for number, group in enumerate(groups):
                    draw = functools.partial(
                        Series,
                        colour=shade(number, len(groups)),
                        line=("-", "--", "-.", ":")[number % 4],
                    )
                    label = f"group {number}{words.get(number, '')}"
                    series.append(band(group[kind], scale, draw, label))
                charts.append(Chart(heading, series, Axis("step", whole=True), Axis(unit, low=0.0)))
            yield Drawn(
                f"curriculum_{task.id}_{key}",
                f"Curriculum: {variant_label(study, variant)}, {task.label}",
                f"Means over {len(study.seeds)} seeds, shades: 95 % intervals.",
                [charts[:2], charts[2:]],
                4,
            )
