"""Draws the figure of README and docs/index.md from committed cells, for light and dark pages.

    python docs/images/make_front_figure.py

Writes front-light.png and front-dark.png next to this file, two pixels per pixel of the page.
"""

import json
import lzma
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle
from PIL import Image

from bacr_study.statistics import Estimate, mean_interval

FOLDER = Path(__file__).resolve().parent
CELLS = FOLDER.parent / "results" / "main-cpu" / "cells.jsonl.xz"
TASK = "tradeoff"
# Size on a page, in CSS pixels.
WIDTH = 840
HEIGHT = 420
PIXELS_PER_CSS_PIXEL = 2
# Matplotlib measures text in points; one CSS pixel is .72 points at 100 dots per inch.
POINTS = 0.72


@dataclass(frozen=True)
class Theme:
    """Colours of a page. The methods have their colours in reports and studies."""

    name: str
    paper: str
    ink: str
    soft: str
    line: str
    token: str
    cut: str
    grpo: str
    published: str
    robust: str


LIGHT = Theme(
    name="light",
    paper="#ffffff",
    ink="#1c1e21",
    soft="#5b6070",
    line="#d9dce4",
    token="#8fa3c4",
    cut="#c62828",
    grpo="#d55e00",
    published="#882255",
    robust="#0072b2",
)
DARK = Theme(
    name="dark",
    paper="#0d1117",
    ink="#e4e6ea",
    soft="#a2a8b4",
    line="#363b45",
    token="#6b7f9f",
    cut="#ff7b72",
    grpo="#ff8f4d",
    published="#e08ab0",
    robust="#4fa8e0",
)


@dataclass(frozen=True)
class Curve:
    """A method in the right panel.

    Attributes:
      arm: name of the arm in the study `main`.
      label: text next to the curve, at the position `label_at` (budget, accuracy in percent).
      colour: attribute of the theme.
    """

    arm: str
    label: str
    colour: str
    marker: str
    label_at: tuple[float, float]


CURVES = (
    Curve("grpo", "GRPO", "grpo", "o", (11.6, 35.5)),
    Curve("bacr-paper", "BACR as published", "published", "^", (7.7, 94)),
    Curve("bacr-robust", "bacr-robust", "robust", "*", (8.0, 66)),
)


def accuracy_by_budget(arm: str) -> dict[int, Estimate]:
    """Computes sampled accuracy in percent at each budget: mean and 95 % t interval over seeds."""
    text = lzma.decompress(CELLS.read_bytes()).decode()
    cells = [json.loads(line) for line in text.splitlines()]
    by_budget: dict[int, list[float]] = {}
    for cell in cells:
        if cell["task"] == TASK and cell["arm"] == arm:
            for budget, entry in cell["sets"]["ledger"]["sampled"].items():
                by_budget.setdefault(int(budget), []).append(100 * entry["accuracy"])
    return {budget: mean_interval(values) for budget, values in sorted(by_budget.items())}


def chip(
    axes: Axes, x: float, y: float, text: str, theme: Theme, *, colour: str, mono: bool = False
) -> float:
    """Draws a text in a rounded box with its left end at x. Returns the right end of the box."""
    size = 15.0 if mono else 17.0
    width = (0.605 if mono else 0.62) * size * len(text) + 14
    box = FancyBboxPatch(
        (x, y - 14),
        width,
        28,
        boxstyle="round,pad=0,rounding_size=6",
        facecolor=theme.paper,
        edgecolor=colour,
        linewidth=1.3,
    )
    axes.add_patch(box)
    axes.text(
        x + width / 2,
        y - 1,
        text,
        ha="center",
        va="center",
        color=colour,
        fontsize=size * POINTS,
        family="monospace" if mono else None,
    )
    return x + width


def draw_trace(
    axes: Axes, theme: Theme, *, top: float, budget: int, thinking: int, answer: str, reward: int
) -> None:
    """Draws one trace: prompt with its budget, thinking tokens, forced answer and reward.

    Args:
      top: vertical position of the trace's upper end.
      thinking: tokens of the policy's thinking if it is not cut.
    """
    rows = {"prompt": top - 16, "thinking": top - 64, "answer": top - 112}
    for label, y in rows.items():
        axes.text(0, y - 1, label, color=theme.soft, fontsize=17 * POINTS, va="center", ha="left")
    start = 88
    x = chip(axes, start, rows["prompt"], "question", theme, colour=theme.soft)
    chip(axes, x + 8, rows["prompt"], f"budget {budget}", theme, colour=theme.robust)

    cell = 10
    tokens = min(thinking, budget)
    for token in range(tokens):
        corner = (start + token * cell, rows["thinking"] - 11)
        axes.add_patch(Rectangle(corner, cell - 2.5, 22, facecolor=theme.token))
    is_cut = thinking > budget
    if is_cut:
        end = start + tokens * cell + 1
        axes.plot(
            [end, end], [rows["thinking"] - 18, rows["thinking"] + 18], color=theme.cut, lw=2.4
        )
        axes.text(
            end + 8,
            rows["thinking"] - 1,
            f"cut at {budget}",
            color=theme.cut,
            fontsize=17 * POINTS,
            va="center",
        )

    y = rows["answer"]
    tags = "</think><answer>" if is_cut else "<answer>"
    x = chip(axes, start, y, tags, theme, colour=theme.soft, mono=True)
    x = chip(axes, x + 6, y, answer, theme, colour=theme.ink, mono=True)
    style = {"arrowstyle": "->", "color": theme.soft, "lw": 1.4}
    axes.annotate("", (x + 24, y), (x + 4, y), arrowprops=style)
    colour = theme.robust if reward else theme.cut
    axes.text(x + 32, y - 1, f"reward {reward}", color=colour, va="center", fontsize=18 * POINTS)


def draw_mechanism(axes: Axes, theme: Theme) -> None:
    """Draws the left panel: one question under two budgets, as in README's `bacr generate`."""
    axes.set_xlim(-2, 398)
    axes.set_ylim(0, 400)
    axes.axis("off")
    axes.text(
        0,
        386,
        "Thinking is cut at the budget",
        color=theme.ink,
        fontsize=20 * POINTS,
        va="center",
        weight="bold",
    )
    draw_trace(axes, theme, top=356, budget=16, thinking=30, answer="7", reward=0)
    axes.plot([0, 388], [211, 211], color=theme.line, lw=1)
    draw_trace(axes, theme, top=197, budget=64, thinking=30, answer="8", reward=1)
    notes = ("The tags are forced, the answer is graded.", "RL trains one policy for all budgets.")
    for y, note in zip((31, 5), notes, strict=True):
        axes.text(0, y, note, color=theme.soft, fontsize=17 * POINTS)


def draw_accuracy(axes: Axes, theme: Theme) -> None:
    """Draws the right panel: accuracy by budget of three methods."""
    for curve in CURVES:
        estimates = accuracy_by_budget(curve.arm)
        colour = getattr(theme, curve.colour)
        means = [estimate.mean for estimate in estimates.values()]
        low = [estimate.mean - _end(estimate.low) for estimate in estimates.values()]
        high = [_end(estimate.high) - estimate.mean for estimate in estimates.values()]
        strong = curve.arm == "bacr-robust"
        axes.errorbar(
            list(estimates),
            means,
            yerr=[low, high],
            color=colour,
            marker=curve.marker,
            # A star looks smaller, because only its tips reach as far.
            markersize=15 if strong else 6.5,
            linewidth=3.2 if strong else 2,
            elinewidth=1.2,
            capsize=3,
            zorder=3 if strong else 2,
        )
        axes.text(
            *curve.label_at,
            curve.label,
            color=colour,
            fontsize=18 * POINTS,
            weight="bold" if strong else "normal",
            va="center",
        )
    axes.set_xscale("log", base=2)
    budgets = list(accuracy_by_budget("grpo"))
    axes.set_xticks(budgets, [str(budget) for budget in budgets])
    axes.set_yticks([40, 60, 80, 100])
    axes.set_xlim(7.3, 36)
    axes.set_ylim(27, 103)
    axes.tick_params(colors=theme.ink, labelsize=17 * POINTS, length=0, pad=6)
    axes.minorticks_off()
    axes.grid(color=theme.line, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(theme.soft)
    axes.set_xlabel("thinking budget (tokens)", color=theme.ink, fontsize=17 * POINTS, labelpad=4)


def _end(value: float | None) -> float:
    """Returns an end of an interval, which five seeds always have."""
    if value is None:
        raise ValueError("an interval needs more than one seed")
    return value


def draw(theme: Theme) -> Path:
    """Draws the figure and writes it with a palette of 64 colours. Returns the file."""
    settings: dict[str, Any] = {"font.family": "DejaVu Sans"}
    with plt.rc_context(settings):
        figure = plt.figure(figsize=(WIDTH / 100, HEIGHT / 100), facecolor=theme.paper)
        margin = 14
        left = figure.add_axes((margin / WIDTH, 10 / HEIGHT, 400 / WIDTH, 400 / HEIGHT))
        draw_mechanism(left, theme)
        right = figure.add_axes((486 / WIDTH, 62 / HEIGHT, 340 / WIDTH, 296 / HEIGHT))
        right.set_facecolor(theme.paper)
        draw_accuracy(right, theme)
        start = 448 / WIDTH
        figure.text(
            start,
            396 / HEIGHT,
            "Accuracy (%) by budget",
            color=theme.ink,
            va="center",
            fontsize=20 * POINTS,
            weight="bold",
        )
        figure.text(
            start,
            371 / HEIGHT,
            "toy task, 130k parameters, 5 seeds, 95 % CI",
            color=theme.soft,
            va="center",
            fontsize=16 * POINTS,
        )
        path = FOLDER / f"front-{theme.name}.png"
        figure.savefig(path, dpi=100 * PIXELS_PER_CSS_PIXEL, facecolor=theme.paper)
        plt.close(figure)
    image = Image.open(path).convert("RGB").quantize(64, dither=Image.Dither.NONE)
    image.save(path, optimize=True)
    return path


if __name__ == "__main__":
    for page_theme in (LIGHT, DARK):
        print(draw(page_theme))
