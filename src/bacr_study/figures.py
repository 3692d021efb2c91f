"""The figures of a study, from its results.json."""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bacr_jax.evaluation.samples import SAMPLED
from bacr_jax.report import png
from bacr_jax.report.charts import COLOURS, Axis, Chart, Mark, Series, marker, shade, stepped
from bacr_study.curves import AXES
from bacr_study.info import StudyInfo, Sweep, Task, Variant
from bacr_study.items import Results, budget_phrase, estimate_of

# Of arms, which are told apart by colours first.
_LINES = ("-", "--", ":")
Estimate = Mapping[str, Any]
# Cost and gain.
Point = tuple[float | int, float | int]

# Of one panel; the table has them all.
MOST_CURVES = 16
# Panels: more tasks than this go on below.
_IN_A_ROW = 3
_AXIS_NAMES = {"step": "steps", "tokens": "generated tokens", "seconds": "seconds"}
# What is drawn: key, its axis, and what a number of it is multiplied by.
_CURVES = (("reward", "mean reward", 1.0), ("accuracy", "held-out accuracy (%)", 100.0))
_SCHEDULE = (
    ("mean_budget", "mean sampled budget", "tokens", 1.0),
    ("weight", "share of sampled questions", "%", 100.0),
    ("mu", "scheduled mean budget", "tokens", 1.0),
    ("pass_rate", "pass rate", "%", 100.0),
)
_ACCURACY = Axis(f"accuracy (%, {SAMPLED} decoding)")
# Above the table and the figure of a study's contrasts.
CONTRASTS = "Pairs that the study asks about"


# --- how every figure draws arms, their numbers with intervals, and curves ------------------------


@dataclass(frozen=True)
class Drawn:
    """A figure, with the name of its files and the columns of the legend below it."""

    name: str
    title: str
    caption: str
    rows: Sequence[Sequence[Chart]]
    legend: int = 3


@dataclass(frozen=True)
class Look:
    """How an arm is drawn, in every figure alike."""

    colour: str
    marker: str
    line: str

    def series(self, label: str, x: Iterable[float], y: Iterable[float], **how: Any) -> Series:
        """A curve of the arm; arms of one colour are told apart by their markers' filling, too."""
        style = {"line": self.line, "marker": self.marker, "hollow": self.line != "-"}
        return Series(label, list(x), list(y), self.colour, **{**style, **how})


def looks_of(study: StudyInfo) -> dict[str, Look]:
    """A look for every arm: no two of 27 alike, and the first reference in grey."""
    first = study.references[:1]
    return {
        id_: Look(f"s{i % len(COLOURS)}", marker(i), _LINES[i // len(COLOURS) % len(_LINES)])
        for i, id_ in enumerate([*first, *(arm.id for arm in study.arms if arm.id not in first)])
    }


def ends_of(estimate: Estimate, *, least: float = -math.inf) -> tuple[float, float]:
    """An interval; a mean without one is its own."""
    low, high = (estimate["mean"] if estimate[k] is None else estimate[k] for k in ("low", "high"))
    return max(low, least), high


def accuracies(look: Look, label: str, x: Iterable[float], estimates: Sequence[Estimate]) -> Series:
    """Accuracies in % with their intervals, joined by a line."""
    share = lambda end: 100 * min(max(end, 0.0), 1.0)
    ends = [(share(low), share(high)) for low, high in map(ends_of, estimates)]
    return look.series(label, x, [100 * e["mean"] for e in estimates], ends=ends)


def band(curve: Mapping[str, Any], scale: float, draw: Callable[..., Series], label: str) -> Series:
    """A curve with its interval as a shade."""
    scaled = lambda key: [scale * value for value in curve[key]]
    known = curve["low"] and curve["low"][0] is not None
    ends = list(zip(scaled("low"), scaled("high"))) if known else None
    return draw(label, curve["x"], scaled("mean"), ends=ends, kind="band")


def apart(index: int, count: int) -> float:
    """Factor that sets arms a little apart on a logarithmic axis."""
    return float(2 ** (0.3 * (index - (count - 1) / 2) / max(count, 6)))


def budget_axis(budgets: Sequence[int], label: str = "thinking budget (tokens)") -> Axis:
    """An axis of doublings with a tick at each budget."""
    ticks = [(float(budget), f"{budget:,}") for budget in budgets]
    return Axis(label, log2=True, low=0.87 * min(budgets), high=1.15 * max(budgets), ticks=ticks)


def variant_label(study: StudyInfo, variant: Variant) -> str:
    """A variant in legends."""
    name = study.arm(variant.arm).name
    return name if variant.value is None else f"{name}, {variant.value}"


# --- the figures ----------------------------------------------------------------------------------


def draw_figures(
    folder: Path, results: Results, study: StudyInfo
) -> list[tuple[Drawn, Path, Path]]:
    """Draws the figures that the study shows, in the order of its page; with their two files."""
    makers: Mapping[str, Callable[[Results, StudyInfo], Iterator[Drawn]]] = {
        "accuracy": accuracy_figures,
        "hard": functools.partial(accuracy_figures, hard=True),
        "ablation": effect_figures,
        "scale": sweep_figures,
        "efficiency": efficiency_figures,
        "curriculum": curriculum_figures,
        "convergence": convergence_figures,
        "difficulty": difficulty_figures,
        "sensitivity": sweep_figures,
        "contrasts": contrast_figures,
    }
    pictures = []
    for make in dict.fromkeys(makers[view] for view in study.views):
        for drawn in make(results, study):
            figure = png.figure(drawn.title, drawn.rows, legend=drawn.legend)
            pictures.append((drawn, *saved(figure, folder, drawn.name)))
    return pictures


def saved(figure: Any, folder: Path, name: str) -> tuple[Path, Path]:
    """A figure's two files, PNG and PDF."""
    files = folder / f"{name}.png", folder / f"{name}.pdf"
    for file in files:
        png.save(figure, file)
    return files


def _by_budget(
    results: Results, task: Task, name: str, variant: Variant
) -> dict[int, Mapping[str, Any]]:
    found = {b: estimate_of(results, task, name, variant, str(b)) for b in task.budgets}
    return {budget: entry for budget, entry in found.items() if entry is not None}


def accuracy_figures(results: Results, study: StudyInfo, *, hard: bool = False) -> Iterator[Drawn]:
    """Accuracy against the budget; no picture of more curves than can be told apart."""
    looks, variants, charts = looks_of(study), study.variants(), list[Chart]()
    if len(variants) > MOST_CURVES:
        return
    for task in study.tasks:
        name = task.hard if hard else task.main
        if not name:
            continue
        series = []
        for index, variant in enumerate(variants):
            found = _by_budget(results, task, name, variant)
            x = [budget * apart(index, len(variants)) for budget in found]
            entries = [entry["accuracy"] for entry in found.values()]
            label = variant_label(study, variant)
            series.append(accuracies(looks[variant.arm], label, x, entries))
        charts.append(Chart(task.label, series, budget_axis(task.budgets), _ACCURACY))
    yield Drawn(
        "hard" if hard else "accuracy",
        "Accuracy on harder problems" if hard else "Accuracy by budget",
        f"Mean accuracy with 95 % intervals over {len(study.seeds)} seeds. Methods stand a little "
        "apart, so that their intervals can be seen.",
        [charts[first : first + _IN_A_ROW] for first in range(0, len(charts), _IN_A_ROW)],
    )


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Points (cost, gain) that no other beats by less cost with at least the gain, both rising."""
    front: list[Point] = []
    for cost, gain in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or gain > front[-1][1]:
            front.append((cost, gain))
    return front


def efficiency_figures(results: Results, study: StudyInfo) -> Iterator[Drawn]:
    """Fig. 2a of the paper: accuracy against tokens really used, and how budgets are used."""
    looks, variants = looks_of(study), study.variants()
    rows = []
    for task in study.tasks:
        gained, used, seen = list[Series](), list[Series](), list[Point]()
        for index, variant in enumerate(variants):
            found = _by_budget(results, task, task.main, variant)
            if not found:
                continue
            look, label = looks[variant.arm], variant_label(study, variant)
            tokens = [entry["mean_total_tokens"]["mean"] for entry in found.values()]
            entries = [entry["accuracy"] for entry in found.values()]
            gained.append(accuracies(look, label, tokens, entries))
            seen += [(t, 100 * e["mean"]) for t, e in zip(tokens, entries)]
            means = {b: entry["mean_thinking_tokens"] for b, entry in found.items()}
            means = {b: entry for b, entry in means.items() if entry["mean"] > 0}
            x = [budget * apart(index, len(variants)) for budget in means]
            # A logarithmic axis has no room for ends at or below 0.
            ends = [ends_of(entry, least=0.5) for entry in means.values()]
            y = [entry["mean"] for entry in means.values()]
            used.append(look.series(label, x, y, ends=ends))
        if seen:
            front = stepped(*zip(*pareto_front(seen)))
            gained.insert(0, Series("Pareto front", *front, "s2", kind="broad"))
        rows.append(
            [
                Chart(
                    task.label,
                    gained,
                    Axis("mean tokens used: thinking, forced, answer", log2=True),
                    _ACCURACY,
                ),
                Chart(
                    f"{task.label}; the line: all that is asked for",
                    used,
                    budget_axis(task.budgets, "budget asked for (tokens)"),
                    Axis("mean thinking tokens used", log2=True),
                    diagonal=True,
                ),
            ]
        )
    yield Drawn(
        "efficiency",
        "Accuracy against tokens really used",
        f"Left: a point per budget, 95 % intervals over {len(study.seeds)} seeds; the shaded steps "
        "are the Pareto front of the means. Right: thinking tokens used against the budget.",
        rows,
    )


def difficulty_figures(results: Results, study: StudyInfo) -> Iterator[Drawn]:
    """Fig. 4b of the paper: difference from the reference arm by level."""
    looks = looks_of(study)
    if not study.references:
        return
    rows = []
    for task in study.tasks:
        charts = []
        for budget in study.focus_budgets(task):
            by_variant = results["difficulty"].get(task.id, {}).get(budget, {})
            shown = [v for v in study.variants() if _differences(by_variant, v)]
            levels = sorted({int(level) for found in by_variant.values() for level in found})
            series = []
            for index, variant in enumerate(shown):
                found = _differences(by_variant, variant)
                shift = 0.8 * (index - (len(shown) - 1) / 2) / max(len(shown), 4)
                series.append(
                    looks[variant.arm].series(
                        variant_label(study, variant),
                        [int(level) + shift for level in found],
                        [100 * entry["difference"] for entry in found.values()],
                        ends=[(100 * e["low"], 100 * e["high"]) for e in found.values()],
                        line="",
                    )
                )
            ends = (min(levels) - 0.5, max(levels) + 0.5) if levels else (0.0, 1.0)
            ticks = [(float(level), str(level)) for level in levels]
            charts.append(
                Chart(
                    _panel(task, budget),
                    series,
                    Axis("level, the hardest last", low=ends[0], high=ends[1], ticks=ticks),
                    Axis("difference (percentage points)"),
                    marks=[Mark("y", 0.0), *(Mark("x", n - 0.5, "grid") for n in levels[1:])],
                )
            )
        rows.append(charts)
    reference = study.arm(study.references[0]).name
    yield Drawn(
        "difficulty",
        f"Accuracy by level, difference from {reference}",
        f"Percentage points from {reference}, paired by seed and problem, 95 % intervals.",
        rows,
        4,
    )


def _differences(by_variant: Mapping[str, Any], variant: Variant) -> dict[str, Any]:
    found = by_variant.get(variant.key, {})
    return {level: e["difference"] for level, e in found.items() if e["difference"]}


def sweep_figures(results: Results, study: StudyInfo) -> Iterator[Drawn]:
    """Fig. 5 and Table 4 of the paper: accuracy against the swept value."""
    for sweep in study.sweeps():
        focus = range(len(study.focus_budgets(study.tasks[0])))
        rows = [
            [_swept(results, study, sweep, t, study.focus_budgets(t)[i]) for t in study.tasks]
            for i in focus
        ]
        default = " The shade marks the default." if sweep.default is not None else ""
        yield Drawn(
            f"sweep_{sweep.file_name}",
            f"Accuracy by {sweep.label}",
            f"Mean accuracy with 95 % intervals over {len(study.seeds)} seeds.{default}",
            rows,
        )


def _swept(results: Results, study: StudyInfo, sweep: Sweep, task: Task, budget: str) -> Chart:
    places, looks, series = _places(sweep), looks_of(study), list[Series]()
    for arm in study.sweeps()[sweep]:
        measured = {}
        for value in sweep.values:
            variant = Variant(arm.id, value)
            found = estimate_of(results, task, task.main, variant, budget)
            if found is not None:
                measured[value] = found["accuracy"]
        x = [places[value] for value in measured]
        series.append(accuracies(looks[arm.id], arm.name, x, list(measured.values())))
    known = sweep.default is not None
    return Chart(
        _panel(task, budget),
        series,
        Axis(sweep.label, ticks=[(place, str(value)) for value, place in places.items()]),
        _ACCURACY,
        marks=[Mark("x", places[sweep.default], "broad")] if known else [],
    )


def _places(sweep: Sweep) -> dict[Any, float]:
    """Numbers stand where they are; words side by side."""
    numbers = all(isinstance(value, int | float) for value in sweep.values)
    return {v: float(v) if numbers else float(i) for i, v in enumerate(sweep.values)}


def effect_figures(results: Results, study: StudyInfo) -> Iterator[Drawn]:
    """Table 3 of the paper as a picture: what each part adds."""

    def chart(task: Task, budget: str) -> Chart:
        found = results["ablation"].get(task.id, {}).get(budget, {}).get("effects", [])
        names = [f"{e['kind']}: {e['part']}" if e["part"] else e["kind"] for e in found]
        return _forest(_panel(task, budget), names, {"s1": dict(enumerate(found))})

    yield Drawn(
        "effects",
        "What each part adds",
        "Percentage points with 95 % intervals over seeds and problems. Main effect: mean over "
        "all combinations of the other parts. Surplus: all parts together less the sum of each "
        "alone.",
        [[chart(task, budget) for budget in study.focus_budgets(task)] for task in study.tasks],
    )


def contrast_figures(results: Results, study: StudyInfo) -> Iterator[Drawn]:
    """A row for each pair of arms that the study names, a panel for each budget in focus."""
    found = {(e["name"], e["task"], e["budget"]): e for e in results["contrasts"]}
    names = [name for name, *_ in study.contrasts]

    def chart(task: Task, budget: str) -> Chart:
        places = {row: (name, task.id, budget) for row, name in enumerate(names)}
        known = {row: found[place] for row, place in places.items() if place in found}
        grey = {row: entry for row, entry in known.items() if entry["low"] <= 0 <= entry["high"]}
        others = {row: entry for row, entry in known.items() if row not in grey}
        return _forest(_panel(task, budget), names, {"s0": grey, "s1": others})

    caption = (
        "Percentage points with 95 % intervals over seeds and problems; grey: the interval holds 0."
    )
    for task in study.tasks:
        charts = [chart(task, budget) for budget in study.focus_budgets(task)]
        yield Drawn(f"contrasts_{task.id}", CONTRASTS, caption, [charts])


def _panel(task: Task, budget: str) -> str:
    return f"{task.label}, {budget_phrase(budget)}"


def _forest(
    title: str, names: Sequence[str], groups: Mapping[str, Mapping[int, Mapping[str, Any]]]
) -> Chart:
    """A row for each name, and in each colour the differences of some rows with intervals."""
    series = [
        Series(
            "",
            [100 * entry["difference"] for entry in found.values()],
            [-float(row) for row in found],
            colour,
            [(100 * entry["low"], 100 * entry["high"]) for entry in found.values()],
            across=True,
            line="",
            marker="o",
        )
        for colour, found in groups.items()
    ]
    ticks = [(-float(row), name) for row, name in enumerate(names)]
    y = Axis("", low=0.5 - len(names), high=0.5, ticks=ticks)
    return Chart(title, series, Axis("percentage points"), y, marks=[Mark("x", 0.0)])


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
