"""Draws charts as SVG for HTML pages.

Drawings follow the page's colours and width, and show the number of a point in a tooltip. The
template escapes every text; all other values are numbers that are formatted in this module.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from bacr_jax.report.charts import MISSING, Bars, Chart, Scale, Series, colour, number, thinned
from bacr_jax.report.html_page import render

# Size of the drawing and its margins, in SVG user units. The page scales the drawing to its width.
_WIDTH = 420.0
_HEIGHT = 250.0
_LEFT = 60.0
_RIGHT = 10.0
_TOP = 10.0
_BOTTOM = 42.0
# Position of the horizontal axis, and right end of the plot area.
_AXIS_Y = _HEIGHT - _BOTTOM
_AXIS_END = _WIDTH - _RIGHT
# Space between the vertical axis and the smallest value, so that markers do not overlap the axis.
_PADDING = 6
# Distance between the rows of a bar chart.
_BAR_ROW_HEIGHT = 44.0
# Number of shades that page.css defines for ordered curves, as classes `o0` to `o5`.
_SHADES = 6
Point = tuple[float, float]


def figure(chart: Chart | Bars) -> Markup:
    """Draws a chart with its title and legend."""
    if isinstance(chart, Bars):
        return _draw_bars(chart)
    return _draw_chart(chart)


@dataclass(frozen=True)
class _Frame:
    """Converts values to positions in the drawing."""

    x: Scale
    y: Scale

    def x_position(self, value: float) -> float:
        width = _AXIS_END - _LEFT - 2 * _PADDING
        return _LEFT + _PADDING + self.x.share(value) * width

    def y_position(self, value: float) -> float:
        return _AXIS_Y - self.y.share(value) * (_AXIS_Y - _TOP)

    def point(self, x: float, y: float) -> Point:
        return self.x_position(x), self.y_position(y)


def _path(points: Sequence[Point], style: str) -> dict[str, str]:
    """Returns the template's values for a line through points."""
    coordinates = [f"{x:.1f} {y:.1f}" for x, y in points]
    return {
        "style": style,
        "d": "M" + "L".join(coordinates),
    }


def _horizontal(y: float, style: str) -> dict[str, str]:
    """Returns a horizontal line across the plot area."""
    return _path([(_LEFT, y), (_AXIS_END, y)], style)


def _vertical(x: float, top: float, bottom: float, style: str) -> dict[str, str]:
    return _path([(x, top), (x, bottom)], style)


def _text(x: float, y: float, text: str, style: str) -> dict[str, str]:
    return {
        "x": f"{x:.1f}",
        "y": f"{y:.1f}",
        "text": text,
        "style": style,
    }


def _group(
    style: str,
    paths: Sequence[dict[str, str]] = (),
    dots: Sequence[tuple[str, str, str]] = (),
    box: tuple[str, str, str, str] | None = None,
) -> dict[str, Any]:
    """Returns the template's values for shapes of one colour.

    Args:
      style: CSS class of the colour.
      dots: x, y and tooltip of each point.
      box: left edge, top edge, width and tooltip of a bar.
    """
    return {
        "style": style,
        "paths": paths,
        "dots": dots,
        "box": box,
    }


def _css_class(series: Series) -> str:
    if isinstance(series.colour, str):
        return series.colour
    return f"o{round(series.colour * (_SHADES - 1))}"


def _all_finite(*values: float) -> bool:
    return all(map(math.isfinite, values))


def _draw_chart(chart: Chart) -> Markup:
    curves = [thinned(series) for series in chart.drawn]
    if not curves:
        return render("chart.html", title=chart.title, note=MISSING)
    x_scale, y_scale = chart.scales()
    frame = _Frame(x_scale, y_scale)
    lines, texts = _draw_axes(chart, frame)
    for mark in chart.marks:
        style = f"mark {mark.kind}"
        if mark.axis == "x":
            x = frame.x_position(mark.at)
            lines.append(_vertical(x, _TOP, _AXIS_Y, style))
        else:
            y = frame.y_position(mark.at)
            lines.append(_horizontal(y, style))
    if chart.diagonal:
        low = max(frame.x.low, frame.y.low)
        high = min(frame.x.high, frame.y.high)
        start = frame.point(low, low)
        end = frame.point(high, high)
        lines.append(_path([start, end], "diagonal"))
    return render(
        "chart.html",
        title=chart.title,
        note=chart.note,
        size=(_WIDTH, _HEIGHT),
        legend=[(_css_class(series), series.label) for series in curves if series.label],
        lines=lines,
        texts=texts,
        upright=(f"{(_TOP + _AXIS_Y) / 2:.1f}", chart.y.label),
        groups=[_draw_curve(series, frame) for series in curves],
    )


def _draw_axes(chart: Chart, frame: _Frame) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Returns the lines and the texts of both axes, except for the label of the vertical axis."""
    lines = []
    texts = []
    for value, name in frame.y.ticks():
        y = frame.y_position(value)
        lines.append(_horizontal(y, "grid"))
        texts.append(_text(_LEFT - 6, y + 4, name, "tick end"))
    for value, name in frame.x.ticks():
        x = frame.x_position(value)
        lines.append(_vertical(x, _AXIS_Y, _AXIS_Y + 4, "axis"))
        texts.append(_text(x, _AXIS_Y + 17, name, "tick middle"))
    lines.append(_horizontal(_AXIS_Y, "axis"))
    middle = (_LEFT + _AXIS_END) / 2
    texts.append(_text(middle, _HEIGHT - 6, chart.x.label, "label middle"))
    return lines, texts


def _draw_curve(series: Series, frame: _Frame) -> dict[str, Any]:
    """Draws a curve with its intervals and points; values that are not finite leave a gap."""
    pieces = _finite_pieces(series, frame)
    paths = _interval_paths(series, frame)
    if series.line:
        style = "curve"
        if series.kind in ("faint", "broad"):
            style += f" {series.kind}"
        if series.line in ("--", ":"):
            style += " dashed"
        paths += [_path(points, style) for points in pieces if len(points) > 1]
    dots = []
    # A single point between two gaps is not visible as a line, so it gets a dot.
    if series.marker or any(len(points) == 1 for points in pieces):
        for x, y in zip(series.x, series.y):
            if not _all_finite(x, y):
                continue
            value_text = f"{number(y)} at {number(x)}"
            tooltip = f"{series.label}: {value_text}".removeprefix(": ")
            dot_x, dot_y = frame.point(x, y)
            dots.append((f"{dot_x:.1f}", f"{dot_y:.1f}", tooltip))
    return _group(_css_class(series), paths, dots)


def _finite_pieces(series: Series, frame: _Frame) -> list[list[Point]]:
    """Splits a curve at values that are not finite; returns the positions of each piece."""
    values = zip(series.x, series.y)
    pieces = []
    for is_finite, piece in itertools.groupby(values, lambda value: _all_finite(*value)):
        if is_finite:
            pieces.append([frame.point(x, y) for x, y in piece])
    return pieces


def _interval_paths(series: Series, frame: _Frame) -> list[dict[str, str]]:
    """Draws the intervals of a curve, as one area for a band, else as a bar for each point."""
    if series.ends is None:
        return []
    intervals = [
        (x, y, ends) for x, y, ends in zip(series.x, series.y, series.ends) if _all_finite(*ends)
    ]
    if series.kind == "band" and intervals:
        upper = [frame.point(x, high) for x, _, (_, high) in intervals]
        lower = [frame.point(x, low) for x, _, (low, _) in intervals]
        return [_path([*upper, *reversed(lower)], "band")]
    paths = []
    for x, y, ends in intervals:
        if series.across:
            bar = [frame.point(end, y) for end in ends]
        else:
            bar = [frame.point(x, end) for end in ends]
        paths.append(_path(bar, "bar"))
    return paths


def _draw_bars(bars: Bars) -> Markup:
    names = dict.fromkeys(name for _, parts in bars.rows for name, _ in parts)
    styles = {name: colour(index) for index, name in enumerate(names, 1)}
    row_sums = [sum(value for _, value in parts) for _, parts in bars.rows]
    largest_sum = max(row_sums, default=0.0)
    if not largest_sum > 0:
        return render("chart.html", title=bars.title, note=MISSING)
    baseline = 0.0
    texts = []
    groups = []
    for index, (label, parts) in enumerate(bars.rows):
        row_sum = row_sums[index]
        baseline = 14 + index * _BAR_ROW_HEIGHT
        left = 4.0
        texts.append(_text(4, baseline, f"{label}: {number(row_sum)} {bars.unit}", "tick"))
        for name, value in parts:
            width = max(value / largest_sum * (_WIDTH - 8), 0.0)
            tooltip = f"{name}: {number(value)} {bars.unit} ({value / row_sum:.0%})"
            top = baseline + 5
            box = (f"{left:.1f}", f"{top:.1f}", f"{width:.1f}", tooltip)
            groups.append(_group(styles[name], box=box))
            left += width
    return render(
        "chart.html",
        title=bars.title,
        note=bars.note,
        size=(_WIDTH, baseline + 32),
        legend=[(style, name) for name, style in styles.items()],
        lines=[],
        texts=texts,
        upright=None,
        groups=groups,
    )
