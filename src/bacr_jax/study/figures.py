"""The figures of a study, from its results.json."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bacr_jax.report.figures import COLOURS, panels
from bacr_jax.study.drawing import (
    Drawn,
    Look,
    accuracy_unit,
    apart,
    bars,
    legend,
    log2_axis,
    looks_of,
    panel_title,
    points,
    variant_label,
)
from bacr_jax.study.info import StudyInfo, Sweep, Task, Variant, study_of
from bacr_jax.study.items import Results, budget_phrase, estimate_of
from bacr_jax.study.training_figures import convergence_figures, curriculum_figures

# Cost and gain.
Point = tuple[float | int, float | int]

# Of one panel; the table has them all.
MOST_CURVES = 16


@dataclass(frozen=True)
class Picture:
    """A figure that was drawn.

    Attributes:
      name: of its files.
      title: above it.
      caption: below it: what is shown.
      png: file.
      pdf: file.
    """

    name: str
    title: str
    caption: str
    png: Path
    pdf: Path


def draw_figures(folder: Path, results: Results) -> list[Picture]:
    """Draws every figure that the study shows.

    Args:
      folder: gets NAME.png and NAME.pdf.
      results: results.json.

    Returns:
      The figures in the order of the study's page.
    """
    import matplotlib

    study = study_of(results["study"])
    makers: Mapping[str, Callable[[Results, StudyInfo], Iterator[Drawn]]] = {
        "accuracy": accuracy_figures,
        "hard": hard_figures,
        "ablation": effect_figures,
        "scale": sweep_figures,
        "efficiency": efficiency_figures,
        "curriculum": curriculum_figures,
        "convergence": convergence_figures,
        "difficulty": difficulty_figures,
        "sensitivity": sweep_figures,
    }
    pictures = []
    for make in dict.fromkeys(makers[view] for view in study.views):
        for name, title, caption, figure in make(results, study):
            picture = Picture(name, title, caption, folder / f"{name}.png", folder / f"{name}.pdf")
            # Without versions and dates in the files, equal pictures are equal files.
            figure.savefig(picture.png, format="png", metadata={"Software": None})
            dates = {"CreationDate": None, "Producer": None, "Creator": None}
            # Fonts that journals take (TrueType) instead of matplotlib's Type 3.
            with matplotlib.rc_context({"pdf.fonttype": 42}):
                figure.savefig(picture.pdf, format="pdf", metadata=dates)
            pictures.append(picture)
    return pictures


def _by_budget(
    results: Results, study: StudyInfo, task: Task, name: str, variant: Variant
) -> dict[int, Mapping[str, Any]]:
    found = {b: estimate_of(results, study, task, name, variant, str(b)) for b in task.budgets}
    return {budget: entry for budget, entry in found.items() if entry is not None}


def accuracy_figures(results: Results, study: StudyInfo) -> Iterator[Drawn]:
    """Accuracy against the budget; no picture of more curves than can be told apart."""
    yield from _accuracy(results, study, "accuracy", "Accuracy by budget", "main")


def hard_figures(results: Results, study: StudyInfo) -> Iterator[Drawn]:
    """The same on harder problems."""
    yield from _accuracy(results, study, "hard", "Accuracy on harder problems", "hard")


def _accuracy(
    results: Results, study: StudyInfo, file: str, title: str, which: str
) -> Iterator[Drawn]:
    tasks = [task for task in study.tasks if getattr(task, which)]
    looks, variants = looks_of(study), study.variants()
    if len(variants) > MOST_CURVES:
        return
    figure, axes = panels(len(tasks), 1, title)
    for axis, task in zip(axes[0], tasks):
        for index, variant in enumerate(variants):
            found = _by_budget(results, study, task, getattr(task, which), variant)
            x = [budget * apart(index, len(variants)) for budget in found]
            name, entries = variant_label(study, variant), [e["accuracy"] for e in found.values()]
            if found:
                points(axis, x, entries, name, looks[variant.arm])
        log2_axis(axis, task.budgets)
        axis.set_xlabel("thinking budget (tokens)")
        panel_title(axis, task.label)
    axes[0, 0].set_ylabel(accuracy_unit(study))
    legend(figure, axes.flat)
    yield (
        file,
        title,
        f"Mean accuracy with 95 % intervals over {len(study.seeds)} seeds. Methods stand a little "
        "apart, so that their intervals can be seen.",
        figure,
    )


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Points (cost, gain) that no other beats: less cost with at least the gain.

    Args:
      points: in any order.

    Returns:
      Those of the front by rising cost; their gains rise too.
    """
    front: list[Point] = []
    for cost, gain in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or gain > front[-1][1]:
            front.append((cost, gain))
    return front


def efficiency_figures(results: Results, study: StudyInfo) -> Iterator[Drawn]:
    """Fig. 2a of the paper: accuracy against tokens really used, and how budgets are used."""
    title, looks = "Accuracy against tokens really used", looks_of(study)
    figure, axes = panels(2, len(study.tasks), title)
    for (left, right), task in zip(axes, study.tasks):
        seen = []
        for index, variant in enumerate(study.variants()):
            found = _by_budget(results, study, task, task.main, variant)
            if not found:
                continue
            look, name = looks[variant.arm], variant_label(study, variant)
            tokens = [entry["mean_total_tokens"]["mean"] for entry in found.values()]
            accuracies = [entry["accuracy"] for entry in found.values()]
            points(left, tokens, accuracies, name, look)
            seen += [(t, 100 * a["mean"]) for t, a in zip(tokens, accuracies)]
            _used(right, found, look, name, apart(index, len(study.variants())))
        if seen:
            x, y = zip(*pareto_front(seen))
            left.plot(
                x,
                y,
                color="#f0c9a8",
                linewidth=7,
                solid_capstyle="round",
                zorder=0.5,
                label="Pareto front",
                drawstyle="steps-post",
            )
        log2_axis(left)
        left.set(xlabel="mean tokens used: thinking, forced, answer", ylabel=accuracy_unit(study))
        panel_title(left, task.label)
        right.plot(task.budgets, task.budgets, color="0.75", linewidth=1, zorder=0.5)
        right.set_yscale("log", base=2)
        log2_axis(right, task.budgets)
        right.yaxis.set_major_formatter(lambda value, _: f"{value:,.3g}")
        right.yaxis.minorticks_off()
        right.set(xlabel="budget asked for (tokens)", ylabel="mean thinking tokens used")
        panel_title(right, f"{task.label}; the line: all that is asked for")
    legend(figure, axes.flat)
    yield (
        "efficiency",
        title,
        f"Left: a point per budget, 95 % intervals over {len(study.seeds)} seeds; the shaded steps "
        "are the Pareto front of the means. Right: thinking tokens used against the budget.",
        figure,
    )


def _used(
    axis: Any, found: Mapping[int, Mapping[str, Any]], look: Look, name: str, shift: float
) -> None:
    used = [entry["mean_thinking_tokens"] for entry in found.values()]
    mean = np.array([e["mean"] for e in used])
    # A logarithmic axis has no room for ends at or below 0.
    low = np.array([e["mean"] if e["low"] is None else max(e["low"], 0.5) for e in used])
    high = np.array([e["mean"] if e["high"] is None else e["high"] for e in used])
    keep = mean > 0
    x = np.array([budget * shift for budget in found])
    bars(axis, x[keep], mean[keep], low[keep], high[keep], look, label=name)


def _columns(study: StudyInfo) -> int:
    """Budgets in focus, which are as many in every task."""
    return len(study.focus_budgets(study.tasks[0]))


def difficulty_figures(results: Results, study: StudyInfo) -> Iterator[Drawn]:
    """Fig. 4b of the paper: difference from the reference arm by level."""
    looks = looks_of(study)
    if not study.references:
        return
    reference = study.arm(study.references[0]).name
    title = f"Accuracy by level, difference from {reference}"
    figure, axes = panels(_columns(study), len(study.tasks), title)
    for row, task in zip(axes, study.tasks):
        for axis, budget in zip(row, study.focus_budgets(task)):
            by_variant = results["difficulty"].get(task.id, {}).get(budget, {})
            shown = [v for v in study.variants() if _differences(by_variant, v)]
            levels = sorted({int(level) for found in by_variant.values() for level in found})
            for index, variant in enumerate(shown):
                found = _differences(by_variant, variant)
                shift = 0.8 * (index - (len(shown) - 1) / 2) / max(len(shown), 4)
                x = [int(level) + shift for level in found]
                ends = [[100 * e[k] for e in found.values()] for k in ("difference", "low", "high")]
                mean, low, high = np.array(ends)
                name = variant_label(study, variant)
                bars(axis, x, mean, low, high, looks[variant.arm], linestyle="none", label=name)
            for level in levels[1:]:
                axis.axvline(level - 0.5, color="0.85", linewidth=0.8)
            axis.grid(visible=False, axis="x")
            axis.axhline(0.0, color="0.4", linewidth=1)
            axis.set_xticks(levels)
            axis.set_xlabel("level, the hardest last")
            panel_title(axis, f"{task.label}, {budget_phrase(budget)}")
        row[0].set_ylabel("difference (percentage points)")
    legend(figure, axes.flat, 4)
    yield (
        "difficulty",
        title,
        f"Percentage points from {reference}, paired by seed and problem, 95 % intervals.",
        figure,
    )


def _differences(by_variant: Mapping[str, Any], variant: Variant) -> dict[str, Any]:
    found = by_variant.get(variant.key, {})
    return {level: e["difference"] for level, e in found.items() if e["difference"]}


def sweep_figures(results: Results, study: StudyInfo) -> Iterator[Drawn]:
    """Fig. 5 and Table 4 of the paper: accuracy against the swept value."""
    looks = looks_of(study)
    for sweep in dict.fromkeys(s for arm in study.arms if (s := study.sweep_of(arm))):
        title = f"Accuracy by {sweep.label}"
        figure, axes = panels(len(study.tasks), _columns(study), title)
        places = _places(sweep)
        for place, row in enumerate(axes):
            for axis, task in zip(row, study.tasks):
                budget = study.focus_budgets(task)[place]
                for arm in study.arms:
                    if study.sweep_of(arm) != sweep:
                        continue
                    found = {
                        value: estimate_of(
                            results, study, task, task.main, Variant(arm.id, value), budget
                        )
                        for value in sweep.values
                    }
                    measured = {v: e["accuracy"] for v, e in found.items() if e is not None}
                    if measured:
                        x = [places[value] for value in measured]
                        points(axis, x, list(measured.values()), arm.name, looks[arm.id])
                if sweep.default is not None:
                    axis.axvline(places[sweep.default], color="0.8", linewidth=5, zorder=0.5)
                axis.set_xticks(list(places.values()), [str(value) for value in places])
                axis.set_xlabel(sweep.label)
                panel_title(axis, f"{task.label}, {budget_phrase(budget)}")
            row[0].set_ylabel(accuracy_unit(study))
        legend(figure, axes.flat)
        file = "".join(c if c.isalnum() else "_" for c in sweep.key)
        default = " The shade marks the default." if sweep.default is not None else ""
        yield (
            f"sweep_{file}",
            title,
            f"Mean accuracy with 95 % intervals over {len(study.seeds)} seeds.{default}",
            figure,
        )


def _places(sweep: Sweep) -> dict[Any, float]:
    """Numbers stand where they are; words side by side."""
    numbers = all(isinstance(value, int | float) for value in sweep.values)
    return {v: float(v) if numbers else float(i) for i, v in enumerate(sweep.values)}


def effect_figures(results: Results, study: StudyInfo) -> Iterator[Drawn]:
    """Table 3 of the paper as a picture: what each part adds."""
    title = "What each part adds"
    figure, axes = panels(_columns(study), len(study.tasks), title)
    for row, task in zip(axes, study.tasks):
        for axis, budget in zip(row, study.focus_budgets(task)):
            found = results["ablation"].get(task.id, {}).get(budget, {}).get("effects", [])
            names = [f"{e['kind']}: {e['part']}" if e["part"] else e["kind"] for e in found]
            y = -np.arange(len(found))
            values = np.array([[100 * e[k] for k in ("difference", "low", "high")] for e in found])
            if len(found):
                mean, low, high = values.T
                axis.errorbar(
                    mean,
                    y,
                    xerr=[mean - low, high - mean],
                    color=COLOURS[1],
                    marker="o",
                    linestyle="none",
                    markersize=4.5,
                    elinewidth=1.2,
                    capsize=2,
                )
            axis.axvline(0.0, color="0.4", linewidth=1)
            axis.set_yticks(y, names if axis is row[0] else [""] * len(names), fontsize=8)
            axis.set_xlabel("percentage points")
            panel_title(axis, f"{task.label}, {budget_phrase(budget)}")
    yield (
        "effects",
        title,
        "Percentage points with 95 % intervals over seeds and problems. Main effect: mean over "
        "all combinations of the other parts. Surplus: all parts together less the sum of each "
        "alone.",
        figure,
    )
