"""The figures of a study, from its results.json."""

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bacr_jax.evaluation.samples import SAMPLED
from bacr_jax.report import png
from bacr_jax.report.charts import COLOURS, Axis, Chart, Mark, Series, marker, shade, stepped
from bacr_study.items import Results, budget_phrase, estimate_of, variant_name
from bacr_study.spec import PARTS, Study, Sweep, Task, Variant

# Of arms, which are told apart by colours first.
_LINES = ("-", "--", ":")
# Of difficulty groups, the easiest first.
_GROUPS = ("-", "--", "-.", ":")
Estimate = Mapping[str, Any]
# Cost and gain.
Point = tuple[float | int, float | int]

# Of one figure; the table has them all. Of one panel, where there are more than that.
MOST_CURVES = 16
_TOGETHER = 12
# Panels: more tasks than this go on below.
_IN_A_ROW = 3
_AXIS_NAMES = {"step": "steps", "tokens": "generated tokens"}
# What is drawn: key, its axis, and what a number of it is multiplied by.
_CURVES = (("reward", "mean reward", 1.0), ("accuracy", "held-out accuracy (%)", 100.0))
_SCHEDULE = (
    ("mean_budget", "median sampled budget", "tokens", 1.0),
    ("weight", "share of sampled questions", "%", 100.0),
    ("mu", "scheduled location of budgets", "tokens", 1.0),
    ("pass_rate", "pass rate", "%", 100.0),
)
_ACCURACY = Axis(f"accuracy (%, {SAMPLED} decoding)")
_APART = "Methods stand side by side, up to a tenth left or right of their budget."
_TOKENS = Axis("mean tokens used: thinking, forced, answer", log2=True)
_THINKING = Axis("mean thinking tokens used", log2=True)
# Above the table and the figure of a study's contrasts.
CONTRASTS = "Pairs that the study asks about"


# --- how every figure draws arms, their numbers with intervals, and curves ------------------------


@dataclass(frozen=True)
class Drawn:
    """A figure, with the name of its files and the columns of its legend."""

    name: str
    title: str
    caption: str
    rows: Sequence[Sequence[Chart]]
    legend: int = 3


def looks_of(study: Study) -> dict[str, Series]:
    """How arms and variants are drawn, in every figure alike, by key: curves without points.

    No two of 27 arms are alike, and the first reference is grey. Arms of one colour are told apart
    by their lines and by their markers' filling.
    """
    looks = {}
    arms = sorted(study.arms, key=lambda arm: arm.id not in study.references[:1])
    for i, arm in enumerate(arms):
        line = _LINES[i // len(COLOURS) % len(_LINES)]
        style: dict[str, Any] = {"line": line, "marker": marker(i), "hollow": line != "-"}
        for variant in (Variant(arm.id), *study.variants_of(arm)):
            label = variant_name(study, variant)
            looks[variant.key] = Series(label, [], [], f"s{i % len(COLOURS)}", **style)
    return looks


def ends_of(estimate: Estimate) -> tuple[float, float]:
    """An interval; a mean without one is its own."""
    low, high = (estimate["mean"] if estimate[k] is None else estimate[k] for k in ("low", "high"))
    return low, high


def accuracies(look: Series, x: Iterable[float], estimates: Collection[Estimate]) -> Series:
    """Accuracies in % with their intervals, joined by a line."""
    share = lambda end: 100 * min(max(end, 0.0), 1.0)
    ends = [(share(low), share(high)) for low, high in map(ends_of, estimates)]
    return replace(look, x=list(x), y=[100 * one["mean"] for one in estimates], ends=ends)


def band(curve: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """What a `Series` has of a curve whose interval is a shade."""
    scaled = lambda key: [scale * value for value in curve[key]]
    known = curve["low"] and curve["low"][0] is not None
    ends = list(zip(scaled("low"), scaled("high"))) if known else None
    return {"x": curve["x"], "y": scaled("mean"), "ends": ends, "kind": "band"}


def alike(charts: Sequence[Chart], name: str = "y") -> list[Chart]:
    """The same charts with one scale of x or y, so that they can be compared."""
    ends = [s for c in charts if c.drawn for s in [c.scales()["xy".index(name)]]]
    low, high = min((s.low for s in ends), default=None), max((s.high for s in ends), default=None)
    return [replace(c, **{name: replace(getattr(c, name), low=low, high=high)}) for c in charts]


def told_apart(study: Study, looks: Mapping[str, Series]) -> list[list[Variant]]:
    """Variants of a row of panels each: of many, those of one kind of line, and the reference."""
    variants, first = study.variants(), study.references[:1]
    lines = [looks[variant.key].line * (len(variants) > _TOGETHER) for variant in variants]
    kept = lambda line: [v for v, own in zip(variants, lines) if own == line or v.arm in first]
    return list(map(kept, dict.fromkeys(lines)))


def budget_axis(budgets: Sequence[int], label: str = "thinking budget (tokens)") -> Axis:
    """An axis of doublings with a tick at each budget."""
    ticks = [(float(budget), f"{budget:,}") for budget in budgets]
    return Axis(label, log2=True, low=0.87 * min(budgets), high=1.15 * max(budgets), ticks=ticks)


# --- the figures ----------------------------------------------------------------------------------


def draw_figures(folder: Path, results: Results, study: Study) -> list[tuple[Drawn, Path, Path]]:
    """Draws the figures that the study shows, in the order of its page; with their two files."""
    makers: Mapping[str, Callable[[Results, Study], Iterator[Drawn]]] = {
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
        for one in make(results, study):
            figure = png.figure(one.title, one.rows, legend=one.legend, caption=one.caption)
            pictures.append((one, *saved(figure, folder, one.name)))
    return pictures


def saved(figure: Any, folder: Path, name: str) -> tuple[Path, Path]:
    """A figure's two files, PNG and PDF."""
    files = folder / f"{name}.png", folder / f"{name}.pdf"
    for file in files:
        png.save(figure, file)
    return files


def _basis(study: Study) -> str:
    return f"{n} seeds" if (n := len(study.seeds)) > 1 else "problems, one seed"


def _by_budget(
    results: Results, task: Task, name: str, variants: Sequence[Variant], key: str = "accuracy"
) -> Iterator[dict[float, Estimate]]:
    """A number of each variant by budget, at places a little apart from those of the others."""
    count = len(variants)
    for at, variant in enumerate(variants):
        apart = float(2 ** (0.3 * (at - (count - 1) / 2) / max(count, 6)))
        yield {
            budget * apart: estimate
            for budget in task.budgets
            if (estimate := estimate_of(results, task, name, variant, str(budget), key)) is not None
        }


def accuracy_figures(results: Results, study: Study, *, hard: bool = False) -> Iterator[Drawn]:
    """Accuracy against the budget; no picture of more curves than can be told apart."""
    looks = looks_of(study)
    if len(study.variants()) > MOST_CURVES:
        return

    def chart(task: Task, group: Sequence[Variant]) -> Chart:
        by_budget = _by_budget(results, task, task.hard if hard else task.main, group)
        pairs = zip(group, by_budget)
        series = [accuracies(looks[v.key], found, found.values()) for v, found in pairs]
        return Chart(task.label, series, budget_axis(task.budgets), _ACCURACY)

    groups = told_apart(study, looks)
    rows = list(zip(*(alike([chart(task, group) for group in groups]) for task in study.tasks)))
    yield Drawn(
        "hard" if hard else "accuracy",
        "Accuracy on harder problems" if hard else "Accuracy by budget",
        f"Mean accuracy with 95 % intervals over {_basis(study)}. {_APART}",
        [row[at : at + _IN_A_ROW] for row in rows for at in range(0, len(row), _IN_A_ROW)],
    )


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Points (cost, gain) that no other beats by less cost with at least the gain, both rising."""
    front: list[Point] = []
    for cost, gain in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or gain > front[-1][1]:
            front.append((cost, gain))
    return front


def efficiency_figures(results: Results, study: Study) -> Iterator[Drawn]:
    """Fig. 1a of the paper: accuracy against tokens really used, and how budgets are used."""
    looks, variants, rows = looks_of(study), study.variants(), list[list[Chart]]()
    for task in study.tasks:
        gained, used = list[Series](), list[Series]()
        floor = min(task.budgets) / 4
        keys = ("accuracy", "mean_total_tokens", "mean_thinking_tokens")
        columns = [_by_budget(results, task, task.main, variants, key) for key in keys]
        for variant, gains, cost, thought in zip(variants, *columns):
            if not gains:
                continue
            look, tokens = looks[variant.key], [one["mean"] for one in cost.values()]
            gained.append(accuracies(look, tokens, gains.values()))
            thought = {place: one for place, one in thought.items() if one["mean"] > 0}
            # A logarithmic axis has no room for ends at or below 0.
            ends = [(max(low, floor / 2), high) for low, high in map(ends_of, thought.values())]
            y = [one["mean"] for one in thought.values()]
            used.append(replace(look, x=list(thought), y=y, ends=ends))
        if gained:
            points = [point for one in gained for point in zip(one.x, one.y)]
            front = stepped(*zip(*pareto_front(points)))
            gained.insert(0, Series("Pareto front", *front, "s2", kind="broad"))
        line = f"{task.label}; the line: all that is asked for"
        asked = budget_axis(task.budgets, "budget asked for (tokens)")
        # Whatever thinks next to nothing would press all else together.
        least = max(floor, min((low for one in used for low, _ in one.ends or ()), default=floor))
        thinking = replace(_THINKING, low=least)
        left = Chart(task.label, gained, _TOKENS, _ACCURACY)
        rows.append([left, Chart(line, used, asked, thinking, diagonal=True)])
    yield Drawn(
        "efficiency",
        "Accuracy against tokens really used",
        f"Left: a point per budget, 95 % intervals over {_basis(study)}; the shaded steps "
        f"are the Pareto front of the means. Right: thinking tokens used by budget. {_APART}",
        rows,
    )


def difficulty_figures(results: Results, study: Study) -> Iterator[Drawn]:
    """Fig. 3b of the paper: difference from the reference arm by level."""
    if not study.references:
        return
    looks, rows = looks_of(study), list[Sequence[Chart]]()
    groups = told_apart(study, looks)

    def chart(task: Task, budget: str, group: Sequence[Variant]) -> Chart:
        by_variant = results["difficulty"].get(task.id, {}).get(budget, {})
        levels = sorted({int(level) for found in by_variant.values() for level in found})
        drawn = {}
        for variant in group:
            by_level = by_variant.get(variant.key, {}).items()
            if known := {int(n): e["difference"] for n, e in by_level if e["difference"]}:
                drawn[variant.key] = known
        series = []
        for index, (key, found) in enumerate(drawn.items()):
            shift = 0.8 * (index - (len(drawn) - 1) / 2) / max(len(drawn), 4)
            points, ends = _points(found.values())
            places = [level + shift for level in found]
            series.append(replace(looks[key], x=places, y=points, ends=ends, line=""))
        low, high = (min(levels) - 0.5, max(levels) + 0.5) if levels else (0.0, 1.0)
        ticks = [(float(level), str(level)) for level in levels]
        x = Axis("level, the hardest last", low=low, high=high, ticks=ticks)
        y = Axis("difference (percentage points)")
        marks = [Mark("y", 0.0), *(Mark("x", n - 0.5, "grid") for n in levels[1:])]
        return Chart(_panel(task, budget), series, x, y, marks=marks)

    for task in study.tasks:
        budgets = study.focus_budgets(task)
        rows += zip(*(alike([chart(task, b, group) for group in groups]) for b in budgets))
    reference = study.arm(study.references[0]).name
    yield Drawn(
        "difficulty",
        f"Accuracy by level, difference from {reference}",
        f"Percentage points from {reference}, paired by seed and problem, 95 % intervals.",
        rows,
        4,
    )


def _points(
    differences: Iterable[Mapping[str, Any]],
) -> tuple[list[float], list[tuple[float, float]]]:
    """Differences in percentage points, and the ends of their intervals."""
    found = [[100 * one[key] for key in ("difference", "low", "high")] for one in differences]
    return [value for value, *_ in found], [(low, high) for _, low, high in found]


def sweep_figures(results: Results, study: Study) -> Iterator[Drawn]:
    """Fig. 4 and Table 4 of the paper: accuracy against the swept value."""
    for sweep in study.sweeps():
        by_task = [
            [_swept(results, study, sweep, task, budget) for budget in study.focus_budgets(task)]
            for task in study.tasks
        ]
        default = " The grey bar marks the default." if sweep.default is not None else ""
        yield Drawn(
            f"sweep_{sweep.file_name}",
            f"Accuracy by {sweep.label}",
            f"Mean accuracy with 95 % intervals over {_basis(study)}.{default}",
            list(map(list, zip(*by_task))),
        )


def _swept(results: Results, study: Study, sweep: Sweep, task: Task, budget: str) -> Chart:
    # Numbers stand where they are; words side by side.
    numbers = all(isinstance(value, int | float) for value in sweep.values)
    places = {v: float(v) if numbers else float(i) for i, v in enumerate(sweep.values)}
    looks, series = looks_of(study), list[Series]()
    for arm in study.sweeps()[sweep]:
        measured = {
            place: found
            for value, place in places.items()
            if (found := estimate_of(results, task, task.main, Variant(arm.id, value), budget))
        }
        series.append(accuracies(looks[arm.id], measured, measured.values()))
    known = sweep.default is not None
    return Chart(
        _panel(task, budget),
        series,
        Axis(sweep.label, ticks=[(place, str(value)) for value, place in places.items()]),
        _ACCURACY,
        marks=[Mark("x", places[sweep.default], "broad")] if known else [],
    )


def effect_figures(results: Results, study: Study) -> Iterator[Drawn]:
    """Table 3 of the paper as a picture: what each part adds."""

    def chart(task: Task, budget: str) -> Chart:
        found = results["ablation"][task.id][budget]["effects"]
        named = {f"{e['kind']}: {e['part']}" if e["part"] else e["kind"]: e for e in found}
        return _forest(_panel(task, budget), named)

    yield Drawn(
        "effects",
        "What each part adds",
        "Percentage points, 95 % intervals over seeds and problems. Main effect: mean gain "
        "over all combinations of the others. Alone: its gain over none. Joint: that of all. "
        f"Surplus: joint less the sum of each alone. On top of {PARTS[0]}: all with {PARTS[0]}.",
        [alike([chart(task, b) for b in study.focus_budgets(task)], "x") for task in study.tasks],
    )


def contrast_figures(results: Results, study: Study) -> Iterator[Drawn]:
    """A row for each pair of arms that the study names, a panel for each budget in focus."""
    found = {(e["name"], e["task"], e["budget"]): e for e in results["contrasts"]}

    def chart(task: Task, budget: str) -> Chart:
        named = {name: found.get((name, task.id, budget)) for name in study.contrasts}
        return _forest(_panel(task, budget), named, unclear="s0")

    caption = "Percentage points, 95 % intervals over seeds and problems; blue: 0 lies outside."
    for task in study.tasks:
        charts = [chart(task, budget) for budget in study.focus_budgets(task)]
        yield Drawn(f"contrasts_{task.id}", CONTRASTS, caption, [alike(charts, "x")])


def _panel(task: Task, budget: str) -> str:
    return f"{task.label}, {budget_phrase(budget)}"


def _forest(
    title: str, named: Mapping[str, Mapping[str, Any] | None], *, unclear: str = "s1"
) -> Chart:
    """A row for each name, with its difference and interval; `unclear` if the interval holds 0."""
    places = {name: -float(row) for row, name in enumerate(named)}
    series = []
    for colour in dict.fromkeys((unclear, "s1")):
        found = {
            places[name]: entry
            for name, entry in named.items()
            if entry and colour == (unclear if entry["low"] <= 0 <= entry["high"] else "s1")
        }
        x, ends = _points(found.values())
        series.append(Series("", x, list(found), colour, ends, across=True, line="", marker="o"))
    ticks = [(place, name) for name, place in places.items()]
    y = Axis("", low=0.5 - len(named), high=0.5, ticks=ticks)
    return Chart(title, series, Axis("percentage points"), y, marks=[Mark("x", 0.0)])


def convergence_figures(results: Results, study: Study) -> Iterator[Drawn]:
    """Fig. 3a of the paper: reward and held-out accuracy over training."""
    looks = looks_of(study)
    for task in study.tasks:
        curves = results["convergence"][task.id]["curves"]
        if not curves:
            continue
        rows = []
        for kind, unit, scale in _CURVES:
            charts = []
            for name, axis in _AXIS_NAMES.items():
                series = [
                    replace(looks[key], **band(found[kind][name], scale))
                    for key in looks
                    if name in (found := curves.get(key, {})).get(kind, {})
                ]
                charts.append(Chart("", series, Axis(axis), Axis(unit)))
            rows.append(charts)
        yield Drawn(
            f"convergence_{task.id}",
            f"Training: {task.label}",
            f"Means over {len(study.seeds)} seeds, shades: 95 % intervals. Above: reward as each "
            "method defines it, averaged in thirtieths of the run; rewards of methods can't "
            "be compared. Below: greedy accuracy on held-out problems, mean over budgets.",
            rows,
        )


def curriculum_figures(results: Results, study: Study) -> Iterator[Drawn]:
    """Fig. 2 of the paper: budgets and weights of the difficulty groups over training."""
    for task, variant in itertools.product(study.tasks, study.variants()):
        if groups := results["curriculum"].get(task.id, {}).get(variant.key):
            words = {0: " (easiest)", len(groups) - 1: " (hardest)"}
            charts = []
            for kind, heading, unit, scale in _SCHEDULE:
                series = []
                for number, group in enumerate(groups):
                    label = f"group {number}{words.get(number, '')}"
                    line, curve = _GROUPS[number % 4], band(group[kind], scale)
                    tint = shade(number, len(groups))
                    series.append(Series(label, colour=tint, line=line, **curve))
                charts.append(Chart(heading, series, Axis("step", whole=True), Axis(unit, low=0.0)))
            yield Drawn(
                f"curriculum_{task.id}_{variant.key}",
                f"Curriculum: {variant_name(study, variant)}, {task.label}",
                f"Means over {len(study.seeds)} seeds, shades: 95 % intervals.",
                [charts[:2], charts[2:]],
                4,
            )
