"""Figures of what happens during training: curves, and the curriculum's budgets."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from bacr_jax.report.figures import panels
from bacr_jax.study.curves import AXES
from bacr_jax.study.drawing import (
    Drawn,
    band,
    legend,
    looks_of,
    panel_title,
    short_number,
    variant_label,
)
from bacr_jax.study.info import StudyInfo
from bacr_jax.study.items import Results

_AXIS_NAMES = {"step": "steps", "tokens": "generated tokens", "seconds": "seconds"}
_GROUP_SHADES = "viridis"


def convergence_figures(results: Results, study: StudyInfo) -> Iterator[Drawn]:
    """Fig. 4a of the paper: reward and held-out accuracy over training."""
    looks = looks_of(study)
    for task in study.tasks:
        curves = results["convergence"].get(task.id, {}).get("curves", {})
        if not curves:
            continue
        title = f"Training: {task.label}"
        figure, axes = panels(len(AXES), 2, title)
        kinds = (("reward", "mean reward", 1.0), ("accuracy", "held-out accuracy (%)", 100.0))
        for row, (kind, unit, scale) in zip(axes, kinds):
            for axis, name in zip(row, AXES):
                for variant in study.variants():
                    curve = curves.get(variant.key, {}).get(kind, {}).get(name)
                    if curve:
                        look = looks[variant.arm]
                        style: dict[str, Any] = {"color": look.colour, "linestyle": look.line}
                        style |= {"marker": look.marker, "markersize": 4}
                        style["markerfacecolor"] = look.fill
                        style["markevery"] = 1 if kind == "accuracy" else 6
                        label = variant_label(study, variant)
                        band(axis, curve, scale, linewidth=1.5, label=label, **style)
                axis.set_xlabel(_AXIS_NAMES[name])
                axis.locator_params(axis="x", nbins=6)
                axis.xaxis.set_major_formatter(short_number)
            row[0].set_ylabel(unit)
        legend(figure, axes.flat, 5)
        yield (
            f"convergence_{task.id}",
            title,
            f"Means over {len(study.seeds)} seeds, shades: 95 % intervals. Above: reward as each "
            "method defines it, averaged in thirtieths of the run; rewards of methods differ in "
            "what they count. Below: greedy accuracy on held-out problems, mean over budgets.",
            figure,
        )


def curriculum_figures(results: Results, study: StudyInfo) -> Iterator[Drawn]:
    """Fig. 3 of the paper: budgets and weights of the difficulty groups over training."""
    import matplotlib

    kinds = (
        ("mean_budget", "mean sampled budget (tokens)", 1.0),
        ("weight", "share of sampled questions (%)", 100.0),
        ("mu", "scheduled mean budget (tokens)", 1.0),
        ("pass_rate", "pass rate (%)", 100.0),
    )
    for task in study.tasks:
        for key, groups in results["curriculum"].get(task.id, {}).items():
            variant = next(v for v in study.variants() if v.key == key)
            title = f"Curriculum: {variant_label(study, variant)}, {task.label}"
            figure, axes = panels(2, 2, title)
            shades = matplotlib.colormaps[_GROUP_SHADES](np.linspace(0.0, 0.8, len(groups)))
            words = {0: " (easiest)", len(groups) - 1: " (hardest)"}
            for axis, (kind, heading, scale) in zip(axes.flat, kinds):
                for number, (group, shade) in enumerate(zip(groups, shades)):
                    line = ("-", "--", "-.", ":")[number % 4]
                    label = f"group {number}{words.get(number, '')}"
                    band(axis, group[kind], scale, color=shade, linestyle=line, label=label, lw=1.8)
                panel_title(axis, heading)
                axis.set_ylim(bottom=0)
                axis.set_xlabel("step")
                axis.locator_params(axis="x", integer=True)
            legend(figure, axes.flat, 4)
            yield (
                f"curriculum_{task.id}_{key}",
                title,
                f"Means over {len(study.seeds)} seeds, shades: 95 % intervals.",
                figure,
            )
