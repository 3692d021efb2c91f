"""Tables and pictures of the variance study."""

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from bacr_jax.documents import write_atomically, write_json
from bacr_jax.report import png
from bacr_jax.report.charts import Axis, Chart, Mark, Series, colour, marker
from bacr_study.figures import saved
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


def _percent(reduction: Sequence[float | None]) -> str:
    if None in reduction:
        return _UNKNOWN
    value, low, high = (100 * x for x in reduction if x is not None)
    return f"{value:+.1f} [{low:+.1f}, {high:+.1f}]"


def _number(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.3g}"


def _share(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{100 * value:.0f} %"


def markdown(found: Mapping[str, Any]) -> str:
    """The tables of a summary."""
    settings = found["settings"]
    return _markdown.get_template("variance.md").render(
        found=found,
        middle=str(middle_group(settings["groups"])),
        kept=shown(variants(settings["answers"])),
        names=_THIRDS,
        label=functools.partial(label, answers=settings["answers"]),
    )


_markdown = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parents[1] / "templates"),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_markdown.filters |= {"percent": _percent, "number": _number, "share": _share}


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
    return [*saved(figure, folder, f"variance_{regime}")]


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
    return [*paths, *saved(figure, folder, "variance_predicted")]
