"""Charts as SVG, for pages that need no other file: they follow the page's colours and width.

Every text is escaped, and everything else is a number that was formatted here.
"""

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

# Units of the drawing; a page scales it to the width that it has.
_WIDTH, _HEIGHT = 420.0, 250.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 60.0, 10.0, 10.0, 42.0
# More points than this of a curve no screen shows.
_MOST_POINTS = 400
_MOST_TICKS = 8
# Colours of the style sheet: `s0`, grey, is for what the others are compared with; `o0` to `o5` go
# from easy to hard, or early to late.
COLOURS, _SHADES = 7, 6


@dataclass(frozen=True)
class Series:
    """A curve.

    Attributes:
      label: in the legend; empty: in none.
      x: places.
      y: values; what is not finite is a gap.
      colour: class of the style sheet.
      ends: lower and upper end at each place, drawn as bars.
      band: the ends are drawn as an area instead.
      faint: drawn pale, behind the others.
      dashed: with a dashed line.
      points: with a point at every place.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str
    ends: Sequence[tuple[float, float]] | None = None
    band: bool = False
    faint: bool = False
    dashed: bool = False
    points: bool = False


@dataclass(frozen=True)
class Axis:
    """An axis.

    Attributes:
      label: what it measures, and in what unit.
      log2: doublings are equally far apart.
      low: smallest value shown; None: that of the data.
      high: largest.
      ticks: values with their names; None: round numbers.
    """

    label: str
    log2: bool = False
    low: float | None = None
    high: float | None = None
    ticks: Sequence[tuple[float, str]] | None = None


def colour(place: int) -> str:
    """Class of the place-th of several curves that have no order."""
    return f"s{place % COLOURS}"


def shade(place: int, count: int) -> str:
    """Class of the place-th of `count` curves that have an order."""
    return f"o{round(place * (_SHADES - 1) / max(count - 1, 1))}"


def number(value: float) -> str:
    """A number for an axis or a point: `0.25`, `1,024`, `3e-09`."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def linear_ticks(low: float, high: float) -> list[float]:
    """Round numbers from low to high: steps of 1, 2 or 5 times a power of ten."""
    span = high - low
    # Below this, a step of it would be 0.
    if not span > 1e-300:
        return [low]
    step = 10.0 ** math.floor(math.log10(span / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (factor * step) <= 5)
    first = math.ceil(low / step - 1e-9)
    return [step * k for k in range(first, math.floor(high / step + 1e-9) + 1)]


def doublings(low: float, high: float) -> list[float]:
    """Powers of two from low to high, every second or third where there are many."""
    first, last = math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9)
    step = max(1, math.ceil((last - first + 1) / _MOST_TICKS))
    return [2.0**k for k in range(first, last + 1, step)] or [low]


class _Scale:
    """From values to places of the drawing."""

    def __init__(self, axis: Axis, values: Iterable[float], begin: float, end: float):
        known = [v for v in values if math.isfinite(v) and (v > 0 or not axis.log2)]
        low = min(known, default=1.0) if axis.low is None else axis.low
        high = max(known, default=2.0) if axis.high is None else axis.high
        if axis.log2 and not low < high:
            low, high = low / 2, low * 2
        elif not low < high:
            low, high = low - (abs(low) / 2 or 0.5), low + (abs(low) / 2 or 0.5)
        self.axis, self.low, self.high = axis, low, high
        self._begin, self._end = begin, end

    def __call__(self, value: float) -> float:
        """Place of a value; values outside are drawn at the edge."""
        value = min(max(value, self.low), self.high)
        share = (value - self.low) / (self.high - self.low)
        if self.axis.log2:
            share = math.log2(value / self.low) / math.log2(self.high / self.low)
        return self._begin + share * (self._end - self._begin)

    def ticks(self) -> list[tuple[float, str]]:
        """Values with their names."""
        if self.axis.ticks is not None:
            return [(v, name) for v, name in self.axis.ticks if self.low <= v <= self.high]
        spread = doublings if self.axis.log2 else linear_ticks
        return [(value, number(value)) for value in spread(self.low, self.high)]


def _thinned(series: Series) -> Series:
    """The same curve with no more points than a screen shows."""
    step = math.ceil(len(series.x) / _MOST_POINTS)
    if step <= 1:
        return series
    keep = sorted({*range(0, len(series.x), step), len(series.x) - 1})
    ends = None if series.ends is None else [series.ends[i] for i in keep]
    return Series(
        series.label,
        [series.x[i] for i in keep],
        [series.y[i] for i in keep],
        series.colour,
        ends,
        *(series.band, series.faint, series.dashed, series.points),
    )


def chart(
    title: str,
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    *,
    diagonal: bool = False,
    note: str = "",
) -> str:
    """A figure with its title, legend and curves.

    Args:
      title: above it.
      series: curves, the last one on top.
      x: horizontal axis.
      y: vertical axis.
      diagonal: a line where both axes have the same value.
      note: below it.
    """
    series = [_thinned(one) for one in series if len(one.x)]
    if not any(math.isfinite(v) for one in series for v in one.y):
        return empty(title, "not recorded")
    across = _Scale(x, [v for one in series for v in one.x], _LEFT + 6, _WIDTH - _RIGHT - 6)
    seen = [v for one in series for v in one.y]
    seen += [v for one in series for pair in one.ends or () for v in pair]
    up = _Scale(y, seen, _HEIGHT - _BOTTOM, _TOP)
    parts = [_frame(across, up)]
    if diagonal:
        low, high = max(across.low, up.low), min(across.high, up.high)
        parts.append(_path([(across(low), up(low)), (across(high), up(high))], "diagonal"))
    parts += [_drawn(one, across, up) for one in series]
    return _figure(title, parts, _HEIGHT, [(s.label, s.colour) for s in series if s.label], note)


def _figure(
    title: str,
    parts: Iterable[str],
    height: float,
    legend: Sequence[tuple[str, str]],
    note: str = "",
) -> str:
    keys = "".join(
        f'<li class="{style}"><span class="key"></span>{html.escape(label)}</li>'
        for label, style in legend
    )
    return (
        f'<figure class="chart"><figcaption>{html.escape(title)}</figcaption>\n'
        + (f'<ul class="legend">{keys}</ul>\n' if keys else "")
        + f'<svg viewBox="0 0 {_WIDTH:.0f} {height:.0f}" role="img" '
        f'aria-label="{html.escape(title, quote=True)}">{"".join(parts)}</svg>\n'
        + (f'<p class="note">{html.escape(note)}</p>\n' if note else "")
        + "</figure>\n"
    )


def empty(title: str, why: str) -> str:
    """A figure of which there is nothing to draw."""
    return (
        f'<figure class="chart"><figcaption>{html.escape(title)}</figcaption>'
        f'<p class="note">{html.escape(why)}</p></figure>\n'
    )


def _frame(across: _Scale, up: _Scale) -> str:
    """Grid, ticks and names of the axes."""
    floor, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    for value, name in up.ticks():
        at = up(value)
        parts.append(_line(_LEFT, at, right, at, "grid"))
        parts.append(_text(_LEFT - 6, at + 4, name, "tick end"))
    for value, name in across.ticks():
        at = across(value)
        parts.append(_line(at, floor, at, floor + 4, "axis"))
        parts.append(_text(at, floor + 17, name, "tick middle"))
    parts.append(_line(_LEFT, floor, right, floor, "axis"))
    parts.append(_text((_LEFT + right) / 2, _HEIGHT - 6, across.axis.label, "label middle"))
    middle = (_TOP + floor) / 2
    parts.append(
        f'<text class="label middle" transform="translate(11 {middle:.1f}) rotate(-90)">'
        f"{html.escape(up.axis.label)}</text>"
    )
    return "".join(parts)


def _drawn(one: Series, across: _Scale, up: _Scale) -> str:
    """A curve with its ends and points; a gap where a value is not finite."""
    parts, stretch, runs = [], list[tuple[float, float]](), list[list[tuple[float, float]]]()
    for place, value in zip(one.x, one.y):
        if math.isfinite(value) and math.isfinite(place):
            stretch.append((across(place), up(value)))
        elif stretch:
            runs.append(stretch)
            stretch = []
    runs += [stretch] if stretch else []
    ends = one.ends or ()
    if one.band and ends:
        high = [(across(p), up(e[1])) for p, e in zip(one.x, ends) if all(map(math.isfinite, e))]
        low = [(across(p), up(e[0])) for p, e in zip(one.x, ends) if all(map(math.isfinite, e))]
        parts.append(_path([*high, *reversed(low)], "band"))
    elif ends:
        for place, (low_end, high_end) in zip(one.x, ends):
            if math.isfinite(low_end) and math.isfinite(high_end):
                at = across(place)
                parts.append(_line(at, up(low_end), at, up(high_end), "bar"))
    kind = "curve" + (" faint" if one.faint else "") + (" dashed" if one.dashed else "")
    parts += [_path(points, kind) for points in runs if len(points) > 1]
    if one.points or any(len(points) == 1 for points in runs):
        shown = (
            (place, value)
            for place, value in zip(one.x, one.y)
            if math.isfinite(place) and math.isfinite(value)
        )
        for place, value in shown:
            tip = f"{one.label}: {number(value)} at {number(place)}".removeprefix(": ")
            parts.append(
                f'<circle cx="{across(place):.1f}" cy="{up(value):.1f}" r="3">'
                f"<title>{html.escape(tip)}</title></circle>"
            )
    return f'<g class="{one.colour}">{"".join(parts)}</g>'


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<path class="{style}" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"/>'


def _path(points: Sequence[tuple[float, float]], style: str) -> str:
    return f'<path class="{style}" d="M' + "L".join(f"{x:.1f} {y:.1f}" for x, y in points) + '"/>'


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{html.escape(text)}</text>'


def stacked_bars(
    title: str, rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], unit: str, *, note: str
) -> str:
    """A bar for each row, made of parts of the same names.

    Args:
      title: above it.
      rows: name and parts with their values.
      unit: of the values.
      note: below it.
    """
    names = list(dict.fromkeys(name for _, parts in rows for name, _ in parts))
    styles = {name: colour(place + 1) for place, name in enumerate(names)}
    total = max((sum(value for _, value in parts) for _, parts in rows), default=0.0)
    if not total > 0:
        return empty(title, "not recorded")
    high, floor = 44.0, 0.0
    drawn = []
    for place, (label, parts) in enumerate(rows):
        floor = 14 + place * high
        whole = sum(value for _, value in parts)
        drawn.append(_text(4, floor, f"{label}: {number(whole)} {unit}", "tick"))
        left = 4.0
        for name, value in parts:
            width = value / total * (_WIDTH - 8)
            tip = html.escape(f"{name}: {number(value)} {unit} ({value / whole:.0%})")
            drawn.append(
                f'<g class="{styles[name]}"><rect x="{left:.1f}" y="{floor + 5:.1f}" '
                f'width="{max(width, 0.0):.1f}" height="18"><title>{tip}</title></rect></g>'
            )
            left += width
    return _figure(title, drawn, floor + 32, list(styles.items()), note)


def smoothed(values: np.ndarray) -> np.ndarray:
    """Centred mean over about a fifteenth of the values, narrower at the ends."""
    half = max(len(values) // 30, 1)
    known = np.isfinite(values)
    window = np.ones(2 * half + 1)
    total = np.convolve(np.where(known, values, 0.0), window, mode="same")
    count = np.convolve(known.astype(float), window, mode="same")
    return np.where(count > 0, total / np.maximum(count, 1.0), math.nan)
