"""Tables and pictures of the variance study."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bacr_jax.documents import write_atomically, write_json
from bacr_jax.report import png
from bacr_jax.report.charts import Axis, Chart, Mark, Series, colour, marker
from bacr_study.variance.measurement import Result
from bacr_study.variance.settings import VarianceSettings
from bacr_study.variance.summary import label, middle_group, shown, summary
from bacr_study.variance.variants import variants

# Right end of the picture's noise, in units of published BRPO's.
_WIDEST = 2.2
# Of a pool's traces by V, from the lowest; as many as `pool_statistics` makes.
_THIRDS = ("lowest third of V", "middle third", "highest third")

# --- tables ---------------------------------------------------------------------------------------


def _percent(reduction: Sequence[float | None]) -> str:
    if None in reduction:
        return "can't be told"
    value, low, high = (100 * x for x in reduction if x is not None)
    return f"{value:+.1f} [{low:+.1f}, {high:+.1f}]"


def _number(value: float | None) -> str:
    return "can't be told" if value is None else f"{value:.3g}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    line = lambda cells: f"| {' | '.join(cells)} |"
    return [line(head), line(["---"] + ["---:"] * (len(head) - 1)), *map(line, rows), ""]


def _regime_tables(found: Mapping[str, Any], regime: str) -> Iterator[str]:
    settings = found["settings"]
    answers, groups = settings["answers"], settings["groups"]
    middle, kept = str(middle_group(groups)), shown(variants(answers))
    cells = [cell for cell in found["cells"] if cell["regime"] == regime]
    name_of = lambda name: label(name, answers)
    yield from ("", f"## {regime} budgets, G = {middle}", "")
    yield from (
        "Less noise than published BRPO, in percent, at equal scale of the expected gradient: "
        "thinking's gradient, same rollouts.",
        "",
    )
    if regime == "independent":
        yield from (
            "Every trace has its own budget, so the group baselines mix budgets here, BRPO's V2 "
            "too. AnytimeReasoner itself scores every trace at all budgets and never does.",
            "",
        )
    if regime == "training":
        yield from (
            "Every trace has its own budget, from the list that the run trains at. With one cut "
            "BRPO is the group's mean, over all the budgets in the group.",
            "",
        )
    steps = [f"step {cell['step']}" for cell in cells]
    arms = cells[0]["groups"][middle]
    yield from _table(
        ["arm", *steps, "at equal tokens, last", "advantage variance, last", "tokens", "bias"],
        [
            [
                name_of(name),
                *(_percent(cell["groups"][middle][name]["reduction"]) for cell in cells),
                _percent(cells[-1]["groups"][middle][name]["reduction_at_equal_tokens"]),
                _number(cells[-1]["groups"][middle][name]["advantage_variance"]),
                _number(cells[-1]["groups"][middle][name]["tokens_a_trace"]),
                _number(cells[-1]["groups"][middle][name]["bias"]),
            ]
            for name in arms
        ],
    )
    yield from ("### By group size, last checkpoint", "")
    yield from _table(
        ["arm", *(f"G = {group}" for group in groups)],
        [
            [
                name_of(name),
                *(_percent(cells[-1]["groups"][str(g)][name]["reduction"]) for g in groups),
            ]
            for name in kept
        ],
    )
    yield from ("### By budget, last checkpoint", "")
    bins = cells[-1]["by_budget"]
    yield from _table(
        ["arm", *bins],
        [[name_of(name), *(_percent(bins[b][name]) for b in bins)] for name in kept],
    )
    yield from _pair_tables(cells, name_of)
    together = cells[-1]["with_answers"]
    if together:
        yield from ("### With the gradient of the answers, last checkpoint", "")
        yield from _table(
            ["arm", "reduction"], [[name_of(n), _percent(x)] for n, x in together.items()]
        )
    yield from _score_table(cells)
    yield from _value_table(cells)


def _pair_tables(
    cells: Sequence[Mapping[str, Any]], name_of: Callable[[str], str]
) -> Iterator[str]:
    """Arms by V, and arm against arm."""
    thirds = cells[-1]["by_value"]
    yield from ("### By V, last checkpoint", "")
    if thirds:
        ends = (
            f"seed {pool['seed']}: {', '.join(f'{x:.2f}' for x in pool['value_edges'])}"
            for pool in cells[-1]["pools"]
        )
        yield f"V as a share of the most there is to get; ends of the thirds, {'; '.join(ends)}."
        yield ""
        names = thirds[0]["arms"]
        yield from _table(
            ["arm", *_THIRDS],
            [[name_of(n), *(_percent(third["arms"][n]) for third in thirds)] for n in names],
        )
    yield from ("### Arm against arm", "")
    yield "Less noise than the second arm has, in percent; thirds of V at the last checkpoint."
    yield ""
    yield from _table(
        ["arms", *(f"step {cell['step']}" for cell in cells), *_THIRDS[: len(thirds)]],
        [
            [
                pair,
                *(_percent(cell["compared"][pair]) for cell in cells),
                *(_percent(third["compared"][pair]) for third in thirds),
            ]
            for pair in cells[0]["compared"]
        ],
    )


def _score_table(cells: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What one batch says of weighing returns by scores, and what that saves."""
    yield from ("### Scores and returns", "")
    yield (
        "w stands for the squared norm of a segment's score. A batch has one group of every "
        "question; the predicted saving is that of one number against the leave-one-out mean, "
        "± the deviation from batch to batch, and beside it what this arm saves on the pool."
    )
    yield ""
    rows = [
        [
            f"seed {pool['seed']}, step {cell['step']}, {name}",
            ", ".join(f"{x:.2f}" for x in of["with_norm"]),
            f"{of['cv']:.2f}",
            f"{of['correlation']:+.2f}",
            f"{of['effective_traces']:.0f}",
            f"{100 * of['predicted_saving']:.0f} ± {100 * of['deviation_of_saving']:.0f} %",
            "can't be told"
            if pool["measured_saving"] is None
            else f"{100 * pool['measured_saving']:.0f} %",
        ]
        for cell in cells
        for pool in cell["pools"]
        for name, of in pool["scores"].items()
    ]
    head = ["w", "corr(w, norm) by segment", "CV(w)", "corr(w, G)", "effective traces"]
    yield from _table([*head, "predicted saving", "measured saving"], rows)


def _value_table(cells: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """How good the values are, and what of the return's variance they could explain."""
    yield from ("### Values and budgets", "")
    rows = [
        [
            f"seed {pool['seed']}, step {cell['step']}, {name}",
            f"{of['squared_error']:.4f} ± {1.96 * of['standard_error']:.4f}",
            f"{of['threshold']:.4f}",
            f"{pool['icc']:.3f}",
            f"{100 * pool['across_questions']:.0f} %",
            f"{100 * pool['right']:.0f} %",
        ]
        for cell in cells
        for pool in cell["pools"]
        for name, of in pool["values"].items()
    ]
    head = ["value", "v^2 of the return", "sigma^2 / (G - 1)", "ICC", "variance across questions"]
    yield from _table([*head, "right at the budget"], rows)


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
    paths = [folder / f"variance_{regime}.{kind}" for kind in ("png", "pdf")]
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
    return paths
