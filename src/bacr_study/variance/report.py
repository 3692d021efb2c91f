"""Tables and pictures of the variance study."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bacr_jax.documents import write_atomically, write_json
from bacr_jax.report import png
from bacr_jax.report.charts import Axis, Chart, Mark, Series, colour, marker
from bacr_study.variance.baselines import variants
from bacr_study.variance.measurement import Result
from bacr_study.variance.settings import VarianceSettings
from bacr_study.variance.summary import label, middle_group, shown, summary

# Right end of the picture's noise, in units of published BRPO's.
_WIDEST = 2.2
# Of a pool's traces by V, from the lowest; as many as `pool_statistics` makes.
_THIRDS = ("lowest third of V", "middle third", "highest third")

# --- tables ---------------------------------------------------------------------------------------


_UNKNOWN = "can't be told"
# What is said of a regime below its heading.
_OF_REGIME = {
    "common": "",
    "independent": "Every trace has its own budget, so the group baselines mix budgets here, "
    "BRPO's V2 too. AnytimeReasoner itself scores every trace at all budgets and never does.",
    "training": "Every trace has its own budget, from the list that the run trains at. With one "
    "cut BRPO is the group's mean, over all the budgets in the group.",
}


def _percent(reduction: Sequence[float | None]) -> str:
    if None in reduction:
        return _UNKNOWN
    value, low, high = (100 * x for x in reduction if x is not None)
    return f"{value:+.1f} [{low:+.1f}, {high:+.1f}]"


def _number(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.3g}"


def _share(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{100 * value:.0f} %"


def _section(
    title: str, head: Sequence[str], rows: Iterable[Sequence[str]], *, said: str = ""
) -> list[str]:
    """Lines of a table with its heading, and what is said above it."""
    line = lambda cells: f"| {' | '.join(cells)} |"
    above = [title, "", said, ""] if said else [title, ""] if title else []
    return [*above, line(head), line(["---"] + ["---:"] * (len(head) - 1)), *map(line, rows), ""]


def _regime_tables(found: Mapping[str, Any], regime: str) -> Iterator[str]:
    answers, groups = found["settings"]["answers"], found["settings"]["groups"]
    middle, kept = str(middle_group(groups)), shown(variants(answers))
    cells = [cell for cell in found["cells"] if cell["regime"] == regime]
    last = cells[-1]
    name_of = lambda name: label(name, answers)
    yield from ("", f"## {regime} budgets, G = {middle}", "")
    yield from (
        "Less noise than published BRPO, in percent, at equal scale of the expected gradient: "
        "thinking's gradient, same rollouts.",
        "",
    )
    yield from (_OF_REGIME[regime], "") if _OF_REGIME[regime] else ()
    head = ["arm", *(f"step {cell['step']}" for cell in cells), "at equal tokens, last"]
    numbers = ("advantage_variance", "tokens_a_trace", "bias")
    yield from _section(
        "",
        [*head, "advantage variance, last", "tokens", "bias"],
        (
            [
                name_of(name),
                *(_percent(cell["groups"][middle][name]["reduction"]) for cell in cells),
                _percent(arm["reduction_at_equal_tokens"]),
                *(_number(arm[key]) for key in numbers),
            ]
            for name, arm in last["groups"][middle].items()
        ),
    )
    by_group = last["groups"]
    yield from _section(
        "### By group size, last checkpoint",
        ["arm", *(f"G = {group}" for group in groups)],
        (
            [name_of(name), *(_percent(by_group[str(g)][name]["reduction"]) for g in groups)]
            for name in kept
        ),
    )
    bins = last["by_budget"]
    yield from _section(
        "### By budget, last checkpoint",
        ["arm", *bins],
        ([name_of(name), *(_percent(bins[b][name]) for b in bins)] for name in kept),
    )
    yield from _pair_tables(cells, name_of)
    if last["with_answers"]:
        rows = ([name_of(name), _percent(x)] for name, x in last["with_answers"].items())
        title = "### With the gradient of the answers, last checkpoint"
        yield from _section(title, ["arm", "reduction"], rows)
    yield from _pool_tables(cells)


def _pair_tables(
    cells: Sequence[Mapping[str, Any]], name_of: Callable[[str], str]
) -> Iterator[str]:
    """Arms by V, and arm against arm."""
    thirds = cells[-1]["by_value"]
    if thirds:
        ends = (
            f"seed {pool['seed']}: {', '.join(f'{x:.2f}' for x in pool['value_edges'])}"
            for pool in cells[-1]["pools"]
        )
        yield from _section(
            "### By V, last checkpoint",
            ["arm", *_THIRDS],
            (
                [name_of(name), *(_percent(third["arms"][name]) for third in thirds)]
                for name in thirds[0]["arms"]
            ),
            said="V as a share of the most there is to get; ends of the thirds, "
            f"{'; '.join(ends)}.",
        )
    else:
        yield from ("### By V, last checkpoint", "")
    yield from _section(
        "### Arm against arm",
        ["arms", *(f"step {cell['step']}" for cell in cells), *_THIRDS[: len(thirds)]],
        (
            [pair, *(_percent(part["compared"][pair]) for part in (*cells, *thirds))]
            for pair in cells[0]["compared"]
        ),
        said="Less noise than the second arm has, in percent; thirds of V at the last checkpoint.",
    )


def _pool_tables(cells: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What one batch says of weighing returns by scores; how good the values are."""
    of_pool = lambda cell, pool, name: f"seed {pool['seed']}, step {cell['step']}, {name}"
    pools = [(cell, pool) for cell in cells for pool in cell["pools"]]
    head = ["w", "corr(w, norm) by segment", "CV(w)", "corr(w, G)", "effective traces"]
    yield from _section(
        "### Scores and returns",
        [*head, "predicted saving", "measured saving"],
        (
            [
                of_pool(cell, pool, name),
                ", ".join(f"{x:.2f}" for x in of["with_norm"]),
                f"{of['cv']:.2f}",
                f"{of['correlation']:+.2f}",
                f"{of['effective_traces']:.0f}",
                f"{100 * of['predicted_saving']:.0f} ± {100 * of['deviation_of_saving']:.0f} %",
                _share(pool["measured_saving"]),
            ]
            for cell, pool in pools
            for name, of in pool["scores"].items()
        ),
        said="w stands for the squared norm of a segment's score. A batch has one group of every "
        "question; the predicted saving is that of one number against the leave-one-out mean, "
        "± the deviation from batch to batch, and beside it what this arm saves on the pool.",
    )
    head = ["value", "v^2 of the return", "sigma^2 / (G - 1)", "ICC", "variance across questions"]
    yield from _section(
        "### Values and budgets",
        [*head, "right at the budget"],
        (
            [
                of_pool(cell, pool, name),
                f"{of['squared_error']:.4f} ± {1.96 * of['standard_error']:.4f}",
                f"{of['threshold']:.4f}",
                f"{pool['icc']:.3f}",
                _share(pool["across_questions"]),
                _share(pool["right"]),
            ]
            for cell, pool in pools
            for name, of in pool["values"].items()
        ),
    )


def markdown(found: Mapping[str, Any]) -> str:
    """The tables of a summary."""
    settings = found["settings"]
    lines = [
        f"# Gradient noise under every baseline ({found['size']} size)",
        "",
        f"Seeds {settings['seeds']}, checkpoints {settings['checkpoints']}; "
        f"{settings['questions']} held-out questions x {settings['traces']} traces a budget, "
        f"{settings['answers']} answer{'s' * (settings['answers'] > 1)} a cut; {found['machine']}, "
        f"{found['wall_seconds'] / 60:.0f} minutes. Brackets: 95 % intervals, bootstrap over "
        "questions of all seeds.",
    ]
    for regime in settings["regimes"]:
        lines += _regime_tables(found, regime)
    return "\n".join(lines) + "\n"


# --- pictures -------------------------------------------------------------------------------------


def draw(folder: Path, found: Mapping[str, Any], regime: str) -> list[Path]:
    """Noise relative to published BRPO, and beside it the advantage variance that isn't it."""
    settings = found["settings"]
    middle = str(middle_group(settings["groups"]))
    names = list(reversed(shown(variants(settings["answers"]))))
    noise, spread = list[Series](), list[Series]()
    for number, cell in enumerate(cell for cell in found["cells"] if cell["regime"] == regime):
        places = [i + 0.22 * (1 - number) for i in range(len(names))]
        arms = cell["groups"][middle]
        look: dict[str, Any] = {"colour": colour(number + 1), "line": ""}
        # Noise itself: 1 is that of published BRPO.
        value, high, low = 1.0 - np.array([arms[name]["reduction"] for name in names], float).T
        ends, at = list(zip(low, high)), f"step {cell['step']}"
        inside = [i for i, one in enumerate(value) if one <= _WIDEST]
        beyond = [i for i in range(len(names)) if i not in inside]
        of = lambda values, kept: [values[i] for i in kept]
        noise += [
            Series(at, of(value, inside), of(places, inside), ends=of(ends, inside), across=True,
                   marker=marker(number + 1), **look),
            Series("", [0.985 * _WIDEST] * len(beyond), of(places, beyond), marker=">",
                   hollow=True, **look),
        ]  # fmt: skip
        ratios = [arms[name]["advantage_variance"] for name in names]
        spread.append(Series(at, ratios, places, marker=marker(number + 1), **look))
    arms_axis = Axis(
        "",
        low=-0.6,
        high=len(names) - 0.4,
        ticks=[(i, label(name, settings["answers"])) for i, name in enumerate(names)],
    )
    charts = [
        Chart(
            "gradient noise",
            noise,
            Axis("at equal scale, published BRPO = 1 (95 % interval)", low=0.0, high=_WIDEST),
            arms_axis,
            marks=[Mark("x", 1.0), Mark("x", 0.7, "dotted")],
            note="dotted: 30 % less, the least that is claimed; open arrows: further right",
        ),
        Chart(
            "variance of advantages",
            spread,
            Axis("over the variance of returns", low=0.0),
            arms_axis,
            note="no measure of gradient noise",
        ),
    ]
    seeds = ", ".join(map(str, settings["seeds"]))
    title = f"Same policy, same rollouts: {regime} budgets, G = {middle}, seeds {seeds}"
    figure = png.figure(title, [charts], legend=3, size=(6.2, 0.3 * len(names) + 1.9))
    return _saved(figure, folder, f"variance_{regime}")


def predicted_chart(found: Mapping[str, Any]) -> Chart:
    """What a batch says that one score-weighted number saves, and what it saves on its pool.

    A point a pool, with the deviation from batch to batch; a trace's own surprises stand for its
    score's squared norm, as in training (`score/predicted_saving`). Pools on which nothing could be
    measured, such as those without a gradient, are left out.
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
        look: dict[str, Any] = {"colour": colour(number), "marker": marker(number)}
        series.append(Series(name, said, measured, ends=ends, across=True, line="", **look))
    return Chart(
        "gradient noise that score weights save",
        series,
        Axis("predicted by one batch (%, ± deviation between batches)", low=0.0),
        Axis("measured on the pool (%)", low=0.0),
        diagonal=True,
        note="a point a pool; on the dashed line the prediction is right",
    )


def _saved(figure: Any, folder: Path, name: str) -> list[Path]:
    """A picture as PNG and PDF."""
    paths = [folder / f"{name}.{kind}" for kind in ("png", "pdf")]
    for path in paths:
        png.save(figure, path)
    return paths


def write(
    folder: Path,
    size: str,
    settings: VarianceSettings,
    results: Sequence[Result],
    seconds: float,
) -> list[Path]:
    """Writes variance.json, variance.md and the pictures; returns their paths."""
    # As a reader of the file will see it: keys are text.
    found = json.loads(json.dumps(summary(size, settings, results, seconds)))
    paths = [folder / "variance.json", folder / "variance.md"]
    write_json(paths[0], found)
    write_atomically(paths[1], markdown(found))
    for regime in settings.regimes:
        paths += draw(folder, found, regime)
    chart = predicted_chart(found)
    if not chart.series:
        return paths
    figure = png.figure("Predicted and measured saving", [[chart]], legend=2, size=(5.0, 4.2))
    return paths + _saved(figure, folder, "variance_predicted")
