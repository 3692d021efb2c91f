"""Pictures of summaries and of metrics; `run_figures` draws those of a run folder."""

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bacr_jax.errors import printable
from bacr_jax.evaluation.samples import UNLIMITED
from bacr_jax.evaluation.summary import Summary
from bacr_jax.report.charts import smoothed
from bacr_jax.report.table import budget_name, by_size

# Okabe and Ito's colours, which the colour-blind can tell apart. Grey, the first, is for the policy
# that the others are compared with.
COLOURS = ("#7f7f7f", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("s", "o", "^", "D", "v", "P", "X")
# Shades from easy to hard, or early to late: one colour, so that their order shows.
_ORDERED = "viridis"
# From this many steps on, curves are drawn smoothed over the noise of single batches.
SMOOTH_FROM = 30
_DPI = 150
# More budgets than this, and their names no longer stand side by side.
_MOST_TICKS = 9
# What the metrics say of the budgets of a group.
_QUANTILES = ("p10", "median", "p90")


def panels(columns: int, rows: int, title: str) -> tuple[Any, Any]:
    """A figure with an array of clean axes; nothing global, so it can be drawn anywhere."""
    # Matplotlib takes a while to import; only pictures need it.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * columns, 3.5 * rows + 0.3), layout="constrained", dpi=_DPI)
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.grid(color="0.92", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color("0.6")
        axis.tick_params(color="0.6", labelsize=9)
    figure.suptitle(_plain(title), x=0.01, ha="left", fontsize=12)
    return figure, axes


def _plain(text: str) -> str:
    """A text as it is, which Matplotlib would read as mathematics between dollars.

    Labels that begin with an underscore it leaves out.
    """
    shown = printable(text).replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def attempt(path: Path, draw: Callable[..., None], *args: Any) -> bool:
    """Draws a picture; one that fails is a warning, since results must not depend on pictures.

    Args:
      path: PNG to write.
      draw: one of the functions here.
      args: what it takes after the path.

    Returns:
      Whether the picture is there.
    """
    try:
        draw(path, *args)
    # Matplotlib raises whatever a font, a disk or an odd number made of it.
    except Exception as error:
        reason = printable(str(error).splitlines()[0] if str(error) else type(error).__name__)
        print(f"warning: {path}: can't be drawn ({reason})", file=sys.stderr)
        return False
    return True


def _save(figure: Any, path: Path) -> None:
    # Without the version in the file, equal pictures are equal files.
    figure.savefig(path, format="png", metadata={"Software": None})


def _heading(axis: Any, text: str) -> None:
    axis.set_title(_plain(text), loc="left", fontsize=10)


def places(budgets: Iterable[str]) -> dict[str, float]:
    """Where budgets stand on an axis of doublings: 0 below the smallest, none above the largest."""
    numbers = [int(budget) for budget in budgets if budget != UNLIMITED and int(budget)]
    ends = {"0": min(numbers, default=2) / 2, UNLIMITED: 2.0 * max(numbers, default=1)}
    return {budget: ends.get(budget) or float(budget) for budget in budgets}


def accuracy_by_budget(
    path: Path, policies: Mapping[str, Summary], title: str, *, bars: str = "95 % interval"
) -> None:
    """Accuracy against the budget, for each decoding, and against the tokens really used.

    Policies stand a little apart, so that their intervals can be seen.

    Args:
      path: PNG to write.
      policies: summaries by name, in the order of the legend; the first of several is drawn in
        grey.
      title: above the picture.
      bars: what the `ci95` entries hold, for the axis.
    """
    modes = list(dict.fromkeys(mode for summary in policies.values() for mode in summary))
    figure, axes = panels(len(modes) + 1, 1, title)
    looks = itertools.cycle(zip(COLOURS, MARKERS))
    if len(policies) == 1:
        next(looks)
    drawn = [(name, summary, *next(looks)) for name, summary in policies.items()]
    for axis, mode in zip(axes[0], modes):
        asked = [set(summary[mode]) for summary in policies.values() if mode in summary]
        every: set[str] = set().union(*asked)
        where = places(every)
        for index, (name, summary, colour, marker) in enumerate(drawn):
            # Factors, because the axis is logarithmic: 3.5 % of a doubling from one to the next.
            apart = 2 ** (0.035 * (index - (len(drawn) - 1) / 2))
            entries = summary.get(mode, {})
            budgets = by_size(entries)
            at = [where[budget] * apart for budget in budgets]
            _curve(axis, at, [entries[b] for b in budgets], name, colour, marker)
        ticks = by_size(every if len(every) <= _MOST_TICKS else sorted(asked, key=len)[0])
        axis.set_xscale("log", base=2)
        axis.set_xticks([where[b] for b in ticks], [budget_name(b) for b in ticks])
        axis.minorticks_off()
        axis.set_xlabel("thinking budget (tokens)")
        _heading(axis, f"{mode} decoding")
    used, mode = axes[0, -1], modes[0]
    for name, summary, colour, marker in drawn:
        entries = summary.get(mode, {})
        ordered = [entries[budget] for budget in by_size(entries)]
        tokens = [entry["mean_thinking_tokens"] for entry in ordered]
        _curve(used, tokens, ordered, name, colour, marker)
    used.set(xlabel="mean thinking tokens really used, a point per budget")
    # From 0 on, with room for the bars of an answer without thinking.
    used.set_xlim(left=-0.02 * used.get_xlim()[1])
    used.locator_params(axis="x", integer=True, nbins=7)
    used.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    _heading(used, f"{mode} decoding")
    top = max(axis.get_ylim()[1] for axis in axes[0])
    for axis in axes[0]:
        # The same scale everywhere, from 0 on: heights can be compared.
        axis.set_ylim(-2, min(max(top, 10.0), 102.0))
    axes[0, 0].set_ylabel(f"accuracy (%), {bars}")
    # Curves rise to the right, which leaves the lower right corner.
    axes[0, 0].legend(frameon=False, loc="lower right", fontsize=9)
    _save(figure, path)


def _curve(
    axis: Any,
    places: Sequence[float | int],
    entries: Sequence[Mapping[str, Any]],
    name: str,
    colour: Any,
    marker: str,
) -> None:
    """Accuracies with their intervals, at the given places of the horizontal axis."""
    accuracy = np.array([100 * entry["accuracy"] for entry in entries])
    ends = np.array([entry["ci95"] for entry in entries]).reshape(-1, 2).T * 100
    axis.errorbar(
        places,
        accuracy,
        yerr=np.maximum([accuracy - ends[0], ends[1] - accuracy], 0.0),
        color=colour,
        marker=marker,
        markersize=5,
        linewidth=1.6,
        elinewidth=1.0,
        capsize=2.5,
        label=_plain(name),
    )


def accuracy_over_steps(path: Path, evaluations: Sequence[tuple[int, Summary]], title: str) -> None:
    """Accuracy at each budget over the steps of training, a panel for each decoding.

    Args:
      path: PNG to write.
      evaluations: (step, summary), in the order of the steps.
      title: above the picture.
    """
    import matplotlib

    modes = list(dict.fromkeys(mode for _, summary in evaluations for mode in summary))
    figure, axes = panels(len(modes), 1, title)
    for axis, mode in zip(axes[0], modes):
        budgets = by_size({b for _, s in evaluations for b in s.get(mode, {})})
        shades = matplotlib.colormaps[_ORDERED](np.linspace(0.1, 0.85, len(budgets)))
        for budget, shade, marker in zip(budgets, shades, itertools.cycle(MARKERS)):
            measured = [(t, s[mode][budget]) for t, s in evaluations if budget in s.get(mode, {})]
            steps = [float(step) for step, _ in measured]
            entries = [entry for _, entry in measured]
            _curve(axis, steps, entries, f"{budget_name(budget)} tokens", shade, marker)
        axis.set_ylim(-2, 102)
        axis.locator_params(axis="x", integer=True)
        axis.set_xlabel("step")
        _heading(axis, f"{mode} decoding, by thinking budget")
    axes[0, 0].set_ylabel("accuracy (%), 95 % interval")
    axes[0, 0].legend(frameon=False, loc="best", fontsize=8)
    _save(figure, path)


class Curves:
    """Metrics over steps, ready to be drawn."""

    def __init__(self, records: Sequence[Mapping[str, Any]]):
        self.steps = np.array([int(record["step"]) for record in records])
        self.names = list(dict.fromkeys(name for record in records for name in record))
        self._records = records

    def numbered(self, prefix: str) -> list[str]:
        """Names that are the prefix and a number, in the order of the numbers."""
        names = [n for n in self.names if n.startswith(prefix) and n[len(prefix) :].isdigit()]
        return sorted(names, key=lambda name: int(name[len(prefix) :]))

    def values(self, name: str) -> np.ndarray:
        """A metric at every step, NaN where it is not a number."""
        # Infinities and NaN are text in the file, and float reads them.
        values = np.array([float(record.get(name, math.nan)) for record in self._records])
        return np.where(np.isfinite(values), values, math.nan)

    def draw(
        self, axis: Any, name: str, label: str, colour: Any, *, smooth: bool = True, **style: Any
    ) -> None:
        """One metric; nothing if it was never recorded."""
        if name not in self.names:
            return
        values = self.values(name)
        if smooth and len(values) >= SMOOTH_FROM:
            axis.plot(self.steps, values, color=colour, alpha=0.25, linewidth=0.8)
            values = smoothed(values)
        marker = "o" if len(values) == 1 else None
        axis.plot(self.steps, values, color=colour, label=label, lw=1.8, marker=marker, **style)


def budget_distributions(path: Path, records: Sequence[Mapping[str, Any]], title: str) -> None:
    """Sampled budgets of each difficulty group over the steps: median and the middle 80 %.

    Args:
      path: PNG to write.
      records: lines of metrics.jsonl with `budget/median_GROUP`, `budget/p10_GROUP` and
        `budget/p90_GROUP`; a step without questions of a group has none for it.
      title: above the picture.
    """
    curves = Curves(records)
    groups = [name.rpartition("_")[2] for name in curves.numbered("budget/median_")]
    figure, axes = panels(max(len(groups), 1), 1, title)
    for axis, group, colour in zip(axes[0], groups, itertools.cycle(COLOURS[1:])):
        # A step without questions of the group is no gap in its distribution.
        present = np.isfinite(curves.values(f"budget/median_{group}"))
        steps = curves.steps[present]
        lines = [curves.values(f"budget/{name}_{group}")[present] for name in _QUANTILES]
        if len(steps) >= SMOOTH_FROM:
            lines = [smoothed(line) for line in lines]
        low, median, high = lines
        axis.fill_between(
            steps, low, high, color=colour, alpha=0.2, linewidth=0, label="middle 80 %"
        )
        marker = "o" if len(steps) == 1 else None
        axis.plot(steps, median, color=colour, lw=1.6, marker=marker, label="median")
        place = {groups[0]: " (easiest)", groups[-1]: " (hardest)"} if len(groups) > 1 else {}
        _heading(axis, f"difficulty group {group}{place.get(group, '')}")
        axis.set_xlabel("step")
        axis.locator_params(axis="x", integer=True)
    top = max((axis.get_ylim()[1] for axis in axes[0]), default=1.0)
    for axis in axes[0]:
        axis.set_ylim(0, top)
    if groups:
        axes[0, 0].set_ylabel("thinking budget (tokens)")
        axes[0, 0].legend(frameon=False, loc="best", fontsize=8)
    _save(figure, path)


def training_curves(path: Path, records: Sequence[Mapping[str, Any]], title: str) -> None:
    """Reward, accuracy by cut, thinking length, entropy and the schedule by group, over steps.

    Args:
      path: PNG to write.
      records: lines of metrics.jsonl, at least one.
      title: above the picture.
    """
    import matplotlib

    curves = Curves(records)
    figure, axes = panels(3, 2, title)
    shades = lambda n: matplotlib.colormaps[_ORDERED](np.linspace(0.1, 0.85, max(n, 1)))
    reward, cuts, length, entropy, schedule, rates = axes.flat

    curves.draw(reward, "reward/mean", "reward", COLOURS[1])
    _heading(reward, "mean reward")
    names = curves.numbered("reward/cut_")
    for name, shade in zip(names, shades(len(names))):
        number = name.rpartition("_")[2]
        last = " (the budget)" if name == names[-1] else ""
        curves.draw(cuts, name, f"cut {number}{last}", shade)
    cuts.set_ylim(-0.02, 1.02)
    _heading(cuts, "share correct, by cut")

    curves.draw(length, "budget/mean", "budget", COLOURS[0], linestyle="--")
    curves.draw(length, "rollout/thinking_mean", "thinking", COLOURS[1])
    _heading(length, "mean tokens")
    curves.draw(entropy, "policy/entropy", "entropy", COLOURS[3])
    _heading(entropy, "entropy per token (nats)")

    for axis, prefix, heading in (
        (schedule, "curriculum/mu_", "scheduled mean budget, by difficulty (tokens)"),
        (rates, "curriculum/pass_rate_", "pass rate, by difficulty"),
    ):
        names = curves.numbered(prefix)
        for place, (name, shade) in enumerate(zip(names, shades(len(names)))):
            word = {0: " (easiest)", len(names) - 1: " (hardest)"}.get(place, "")
            label = f"group {name[len(prefix) :]}{word}"
            # A schedule stays where it is between its updates.
            curves.draw(axis, name, label, shade, smooth=False, drawstyle="steps-post")
        _heading(axis, heading)
    rates.set_ylim(-0.02, 1.02)

    for axis in axes.flat:
        if not axis.has_data():
            axis.text(0.5, 0.5, "not recorded", ha="center", color="0.5", transform=axis.transAxes)
            axis.set_axis_off()
            continue
        if len(axis.get_legend_handles_labels()[1]) > 1:
            axis.legend(frameon=False, fontsize=8, loc="best")
        if axis in (length, entropy, schedule):
            axis.set_ylim(bottom=min(0.0, axis.get_ylim()[0]))
        if len(curves.steps) == 1:
            axis.set_xticks(curves.steps)
        else:
            axis.locator_params(axis="x", integer=True)
        axis.set_xlabel("step")
    _save(figure, path)
