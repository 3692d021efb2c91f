"""Numbers, tables and pictures of the variance study."""

import dataclasses
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from bacr_jax.report.figures import COLOURS, MARKERS
from bacr_jax.runs.files import write_atomically, write_json
from bacr_jax.runs.provenance import VERSIONED
from bacr_jax.study import noise
from bacr_jax.study.baselines import BY_NAME
from bacr_jax.study.measurement import AGAINST, NAMES, TRAINED, Result
from bacr_jax.study.noise import Noise
from bacr_jax.study.variance_settings import KIND, VarianceSettings

_READ = {"one": "1 answer", "several": "{answers} answers", "pooled": "{answers} answers, pooled"}
# Right end of the picture's noise, in units of published BRPO's.
_WIDEST = 2.2
# Drawn and tabulated by group size and budget; the others stand in variance.json.
SHOWN = (
    *("none/several", "group_mean/several", "loo/several", "brpo/several", "brpo_loo/several"),
    *("v1/several", "value_saved/several", "value_cut/several", "value/several"),
    *("value_trajectory/several", "residual_loo/several", "shrink/several", "history/several"),
    *("shrink_history/several", "everything/pooled", "rescaled/several"),
    *("score_weighted/several", "score_weighted_saved/several", "score_weighted_shrink/several"),
    *("rescaled_everything/pooled", "oracle/several", "oracle_history/several"),
    *("oracle_weighted/several", "brpo/one", "value/one", "shrink/one", "shrink_history/one"),
)


def label(name: str, answers: int) -> str:
    """An arm and how it reads the answers, for people."""
    arm, reading = name.split("/")
    return f"{BY_NAME[arm].label}; {_READ[reading].format(answers=answers)}"


def _joined(parts: Sequence[Noise]) -> Noise:
    names = ("variance", "own", "shared", "signal", "parts")
    stacked = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    return dataclasses.replace(parts[0], **stacked)


def _merged(
    results: Sequence[Result], group: int, take: str = "noise", questions: str = "questions"
) -> tuple[Noise, np.ndarray]:
    """Noise of all seeds, and the question of each entry, a number of its own for each seed."""
    measured = [result.by_group[group] for result in results]
    clusters = [1_000_000 * index + getattr(one, questions) for index, one in enumerate(measured)]
    return _joined([getattr(one, take) for one in measured]), np.concatenate(clusters)


def _part(noises: Noise, keep: np.ndarray) -> Noise:
    names = ("variance", "own", "shared", "signal", "parts")
    return dataclasses.replace(noises, **{name: getattr(noises, name)[keep] for name in names})


def _rounded(value: Any) -> Any:
    """Five significant digits, so that the file is small; null for what can't be told."""
    if isinstance(value, Mapping):
        return {str(name): _rounded(x) for name, x in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_rounded(x) for x in value]
    if not isinstance(value, float | np.floating):
        return value
    return float(f"{value:.5g}") if np.isfinite(value) else None


def _arms(results: Sequence[Result], group: int, resamples: int) -> dict[str, dict[str, Any]]:
    """Every number of every arm at one group size, over all seeds."""
    entries, clusters = _merged(results, group)
    whole = noise.by_question(entries, clusters)
    cost = np.mean([result.by_group[group].cost for result in results], axis=0)
    spread = np.mean([result.by_group[group].spread for result in results], axis=0)
    reduction = whole.reduction(AGAINST, resamples=resamples)
    at_cost = whole.reduction(AGAINST, costs=cost, resamples=resamples)
    alone = [
        result.by_group[group].noise.reduction(AGAINST, resamples=1)[:, 0] for result in results
    ]
    scale, measured, bias, ratio = (
        whole.scale(np.ones(len(whole.signal))),
        whole.measured_scale(),
        whole.bias(),
        whole.ratio(),
    )
    return {
        name: {
            "reduction": reduction[i],
            "reduction_at_equal_tokens": at_cost[i],
            "by_seed": [one[i] for one in alone],
            "noise_to_signal": ratio[i],
            "scale": scale[i],
            "measured_scale": measured[i],
            "bias": bias[i],
            "advantage_variance": spread[i],
            "tokens_a_trace": cost[i],
        }
        for i, name in enumerate(NAMES)
    }


def _by_budget(results: Sequence[Result], group: int, resamples: int) -> dict[str, dict[str, Any]]:
    """Reductions by budget: of cells under one budget, or of the traces in a range."""
    entries, clusters = _merged(results, group)
    budgets = np.concatenate([result.by_group[group].budgets for result in results])
    parts: dict[str, tuple[Noise, np.ndarray]] = {}
    if (budgets > 0).all():
        for budget in np.unique(budgets):
            keep = budgets == budget
            parts[str(budget)] = _part(entries, keep), clusters[keep]
    else:
        bins = [list(result.by_group[group].bins.items()) for result in results]
        for place, (name, _) in enumerate(bins[0]):
            parts[name] = _joined([of_seed[place][1] for of_seed in bins]), clusters
    found = {}
    for name, (part, cluster) in parts.items():
        reduction = noise.by_question(part, cluster).reduction(AGAINST, resamples=resamples)
        found[name] = {arm: reduction[i] for i, arm in enumerate(NAMES) if arm in SHOWN}
    return found


def _with_answers(results: Sequence[Result], group: int, resamples: int) -> dict[str, Any]:
    """Reductions of the gradient of thinking and answers together."""
    if results[0].by_group[group].with_answers is None:
        return {}
    entries, clusters = _merged(results, group, "with_answers", "answer_questions")
    against = TRAINED.index(AGAINST)
    reduction = noise.by_question(entries, clusters).reduction(against, resamples=resamples)
    return {NAMES[i]: reduction[place] for place, i in enumerate(TRAINED)}


def summary(
    size: str, settings: VarianceSettings, results: Sequence[Result], seconds: float
) -> dict[str, Any]:
    """What variance.json holds."""
    middle = min(settings.groups, key=lambda group: abs(group - 8))
    places = dict.fromkeys((result.regime, result.step) for result in results)
    cells = []
    for regime, step in places:
        own = [r for r in results if r.regime == regime and r.step == step]
        by_group = {g: _arms(own, g, settings.resamples) for g in settings.groups}
        for group, arms in by_group.items():
            if group != middle:
                by_group[group] = {name: arms[name] for name in SHOWN}
        cells.append(
            {
                "regime": regime,
                "step": step,
                "groups": by_group,
                "by_budget": _by_budget(own, middle, settings.resamples),
                "with_answers": _with_answers(own, middle, settings.resamples),
                "pools": [
                    {
                        "seed": r.seed,
                        "right": r.right,
                        "across_questions": r.across,
                        "seconds_a_trace": r.seconds,
                        **r.diagnostics,
                    }
                    for r in own
                ],
            }
        )
    return {
        "kind": KIND,
        "size": size,
        "settings": json.loads(json.dumps(dataclasses.asdict(settings))),
        "wall_seconds": seconds,
        "versions": {name: version(name) for name in VERSIONED},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "against": NAMES[AGAINST],
        "cells": _rounded(cells),
    }


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
    middle = str(min(groups, key=lambda group: abs(group - 8)))
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
            for name in SHOWN
        ],
    )
    yield from ("### By budget, last checkpoint", "")
    bins = cells[-1]["by_budget"]
    yield from _table(
        ["arm", *bins],
        [[name_of(name), *(_percent(bins[b][name]) for b in bins)] for name in SHOWN],
    )
    together = cells[-1]["with_answers"]
    if together:
        yield from ("### With the gradient of the answers, last checkpoint", "")
        yield from _table(
            ["arm", "reduction"], [[name_of(n), _percent(x)] for n, x in together.items()]
        )
    yield from _value_table(cells)


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
        f"{settings['answers']} answers a cut; {found['machine']}, "
        f"{found['wall_seconds'] / 60:.0f} minutes. Brackets: 95 % intervals, bootstrap over "
        "questions of all seeds.",
    ]
    for regime in settings["regimes"]:
        lines += _regime_tables(found, regime)
    return "\n".join(lines) + "\n"


# --- pictures -------------------------------------------------------------------------------------


def draw(folder: Path, found: Mapping[str, Any], regime: str) -> list[Path]:
    """Noise relative to published BRPO, and beside it the advantage variance that isn't it."""
    from matplotlib.figure import Figure

    settings = found["settings"]
    middle = str(min(settings["groups"], key=lambda group: abs(group - 8)))
    cells = [cell for cell in found["cells"] if cell["regime"] == regime]
    names = list(reversed(SHOWN))
    figure = Figure(figsize=(11.5, 0.34 * len(names) + 1.9), layout="constrained", dpi=150)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for number, (cell, colour, marker) in enumerate(zip(cells, COLOURS[1:], MARKERS[1:])):
        places = np.arange(len(names)) + 0.22 * (1 - number)
        arms = cell["groups"][middle]
        style = {"color": colour, "marker": marker, "ms": 4, "ls": "none", "lw": 1.2}
        # Noise itself: 1 is that of published BRPO.
        value, low, high = 1.0 - np.array([arms[name]["reduction"] for name in names], float).T
        inside = value <= _WIDEST
        ends = np.maximum([value - high, low - value], 0.0)[:, inside]
        shown = f"step {cell['step']}"
        left.errorbar(value[inside], places[inside], xerr=ends, label=shown, **style)
        beyond = np.full((~inside).sum(), 0.985 * _WIDEST)
        left.plot(beyond, places[~inside], color=colour, marker=">", ms=5, ls="none", mfc="none")
        right.plot([arms[name]["advantage_variance"] for name in names], places, **style)
    left.axvline(1.0, color="0.4", lw=1)
    left.axvline(0.7, color="0.4", lw=1, ls=":")
    left.set_xlabel(
        "gradient noise at equal scale, published BRPO = 1 (95 % interval)\n"
        "dotted: 30 % less, the least that is claimed; open arrows: further right"
    )
    right.set_xlabel("variance of advantages / variance of returns\n(no measure of gradient noise)")
    left.set_xlim(0.0, _WIDEST)
    left.set_yticks(range(len(names)), [label(n, settings["answers"]) for n in names], fontsize=8)
    for axis in (left, right):
        axis.grid(axis="x", color="0.92")
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    right.set_xlim(left=0.0)
    figure.legend(*left.get_legend_handles_labels(), frameon=False, fontsize=8, ncols=3,
                  loc="outside upper right")  # fmt: skip
    seeds = ", ".join(map(str, settings["seeds"]))
    title = f"Same policy, same rollouts: {regime} budgets, G = {middle}, seeds {seeds}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    paths = [folder / f"variance_{regime}.{kind}" for kind in ("png", "pdf")]
    figure.savefig(paths[0], metadata={"Software": None})
    figure.savefig(paths[1], metadata={"CreationDate": None, "Producer": None, "Creator": None})
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
