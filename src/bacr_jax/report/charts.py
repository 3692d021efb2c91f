"""Describes charts as dataclasses, which `vega` converts to Vega-Lite for pages and for files."""

import dataclasses
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

# Colours of text, lines and background, each for light and for dark mode.
INK: Mapping[str, tuple[str, str]] = {
    "ink": ("#1c1e21", "#e4e6ea"),
    "soft": ("#5b6070", "#a2a8b4"),
    "line": ("#d9dce4", "#363b45"),
    "paper": ("#ffffff", "#15171b"),
}
# Colours of curves, each for light and for dark mode. They are the colours of Okabe and Ito, which
# colour-blind readers can distinguish. Yellow is left out, because it is invisible on white, and
# colours with a contrast below 3 were changed. The last colour is from Tol's muted scheme (2021).
# The grey `s0` is used for the policy with which others are compared.
COLOURS: Mapping[str, tuple[str, str]] = {
    "s0": ("#6f7683", "#a2a8b4"),
    "s1": ("#0072b2", "#4fa8e0"),
    "s2": ("#d55e00", "#ff8f4d"),
    "s3": ("#008a64", "#35cc9a"),
    "s4": ("#b4538c", "#e79bc4"),
    "s5": ("#a97a00", "#f0b93a"),
    "s6": ("#2f9bd6", "#9bd7fb"),
    "s7": ("#000000", "#ffffff"),
    "s8": ("#882255", "#e08ab0"),
}
# Shades of ordered curves (easy to hard, early to late), from the viridis colour map.
SHADES: Mapping[str, tuple[str, str]] = {
    "o0": ("#440154", "#d3a4e8"),
    "o1": ("#414487", "#a3a7f0"),
    "o2": ("#2a788e", "#63bfd8"),
    "o3": ("#1f8f76", "#3fd0ab"),
    "o4": ("#4f9c2f", "#8be06a"),
    "o5": ("#a39100", "#f2e35c"),
}
MARKERS = ("s", "o", "^", "D", "v", "P", "X", "<", ">")
# Line styles of ordered curves that have the same shade.
_LINES = ("-", "--", ":")
# Text that replaces a chart whose curves have no values.
MISSING = "not recorded"
# Curves with at least this many steps are smoothed, because single batches are noisy.
SMOOTH_FROM = 30
# Number of colours that are used in rotation for curves without an order.
_IN_TURN = 7
# Maximum number of points of a curve. A chart is about 300 pixels wide, and a page has many curves.
_MOST_POINTS = 200
# Minimum height in pixels of each tick on a vertical axis with text labels instead of numbers.
TICK_HEIGHT = 20
# Maximum number of ticks on a logarithmic axis.
_MOST_TICKS = 8


@dataclass(frozen=True)
class Series:
    """A curve of a chart, or the style of a curve if it has no points.

    Attributes:
      label: name in the legend. A curve with an empty label is not in the legend.
      y: values. A value that is not finite leaves a gap.
      colour: key of `COLOURS`, such as `s0`, or a number in [0, 1] that selects a shade for ordered
        curves.
      ends: lower and upper end of the confidence interval at each point.
      across: True if the intervals are horizontal, False if they are vertical.
      kind: `band` draws the intervals as an area instead of bars, `faint` draws a pale curve behind
        the other curves, and `broad` draws a broad and pale line.
      line: line style `-`, `--` or `:` as in Matplotlib, or empty for no line.
      marker: marker at every point, with the name that Matplotlib uses, or empty for no marker.
      hollow: True if the marker is not filled.
      has_few_markers: True if only about ten points of a long curve have a marker.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str | float
    ends: Sequence[tuple[float, float]] | None = None
    across: bool = False
    kind: Literal["line", "band", "faint", "broad"] = "line"
    line: str = "-"
    marker: str = ""
    hollow: bool = False
    has_few_markers: bool = False


@dataclass(frozen=True)
class Axis:
    """An axis of a chart.

    Attributes:
      log2: True for a logarithmic axis with base 2.
      low: smallest value of the axis. None for the smallest value of the data.
      high: largest value of the axis. None for the largest value of the data.
      ticks: value and label of each tick, or None for ticks at round numbers.
      whole: True if only whole numbers have ticks.
    """

    label: str
    log2: bool = False
    low: float | None = None
    high: float | None = None
    ticks: Sequence[tuple[float, str]] | None = None
    whole: bool = False


@dataclass(frozen=True)
class Mark:
    """A line across the chart: vertical at x = `at`, or horizontal at y = `at`."""

    axis: Literal["x", "y"]
    at: float
    kind: Literal["line", "grid", "broad", "dotted"] = "line"


@dataclass(frozen=True)
class Chart:
    """A chart with two axes and any number of curves.

    Attributes:
      series: curves. Later curves are drawn over earlier curves.
      diagonal: True to draw the line x = y.
      marks: lines behind the curves.
      note: text below the chart.
    """

    title: str
    series: Sequence[Series]
    x: Axis
    y: Axis
    diagonal: bool = False
    marks: Sequence[Mark] = ()
    note: str = ""

    @property
    def drawn(self) -> list[Series]:
        """Returns the curves that have points, or no curves if none of their values is finite."""
        curves = [series for series in self.series if len(series.x)]
        for series in curves:
            if any(math.isfinite(value) for value in series.y):
                return curves
        return []

    def scales(self) -> tuple["Scale", "Scale"]:
        """Returns the scales of the horizontal and the vertical axis."""
        x = list[float]()
        y = list[float]()
        for series in self.drawn:
            x.extend(series.x)
            y.extend(series.y)
            values = x if series.across else y
            for ends in series.ends or ():
                values.extend(ends)
        for mark in self.marks:
            values = x if mark.axis == "x" else y
            values.append(mark.at)
        return Scale.of(self.x, x), Scale.of(self.y, y)


@dataclass(frozen=True)
class Bars:
    """A chart of stacked bars.

    Attributes:
      rows: for each bar, its name and the (name, value) pairs of its parts.
      unit: unit of the values.
      note: text below the chart.
    """

    title: str
    rows: Sequence[tuple[str, Sequence[tuple[str, float]]]]
    unit: str
    note: str = ""


def colour(index: int) -> str:
    """Returns the colour of the curve with this index, for curves without an order."""
    return f"s{index % _IN_TURN}"


def marker(index: int) -> str:
    """Returns the marker of the curve with this index, by the name that Matplotlib uses."""
    return MARKERS[index % len(MARKERS)]


def shade(index: int, count: int) -> float:
    """Returns the shade, in [0, 1], of the curve with this index among `count` ordered curves."""
    return index / max(count - 1, 1)


def shade_name(value: float) -> str:
    """Returns the key of `SHADES` for a number in [0, 1]."""
    return f"o{round(value * (len(SHADES) - 1))}"


def ordered_style(index: int, count: int) -> Series:
    """Returns the style of the curve with this index among `count` ordered curves.

    The curves differ in their shade. If there are more curves than shades, each curve also has a
    marker, and curves with the same shade have different line styles.
    """
    style = Series("", [], [], shade(index, count))
    if count <= len(SHADES):
        return style
    shades = [shade_name(shade(other, count)) for other in range(index + 1)]
    repetitions = shades.count(shades[-1]) - 1
    return dataclasses.replace(style, marker=marker(index), line=_LINES[repetitions % len(_LINES)])


def number(value: float) -> str:
    """Formats a number for the axis or tooltip of a chart: `0.25`, `1,024`, `1.5M`, `3e-09`."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) >= 1e6:
        return f"{value / 1e6:,.4g}M"
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def doublings(low: float, high: float) -> list[float]:
    """Returns powers of two from low to high as ticks.

    If fewer than three powers of two lie between low and high, their multiples by 1.5 are added. If
    these are still too few, the multiples by 1.25 and 1.75 are added. If there are more than
    `_MOST_TICKS` ticks, only every n-th tick is returned.
    """
    first = math.floor(math.log2(low))
    last = math.ceil(math.log2(high))
    # Rounding errors must not remove the ticks at the ends.
    lower_bound = low * (1 - 1e-9)
    upper_bound = high * (1 + 1e-9)
    ticks = list[float]()
    for quarters in ((4,), (4, 6), (4, 5, 6, 7)):
        ticks = []
        for exponent in range(first, last + 1):
            ticks += [2.0**exponent * quarter / 4 for quarter in quarters]
        ticks = [value for value in ticks if lower_bound <= value <= upper_bound]
        if len(ticks) > 2:
            break
    if not ticks:
        return [low]
    every = math.ceil(len(ticks) / _MOST_TICKS)
    return ticks[::every]


@dataclass(frozen=True)
class Scale:
    """An axis whose smallest and largest value are known."""

    axis: Axis
    low: float
    high: float

    @classmethod
    def of(cls, axis: Axis, values: Iterable[float]) -> "Scale":
        """Returns the scale of an axis. Missing ends of the axis are computed from `values`.

        Values without a position on the axis, such as infinity or negative values on a logarithmic
        axis, are ignored.
        """
        usable = [value for value in values if math.isfinite(value)]
        if axis.log2:
            # An axis with a single value begins at half of this value. Half of a smaller number may
            # be rounded to 0, which has no logarithm.
            usable = [value for value in usable if value > 2 * sys.float_info.min]
        low = min(usable, default=1.0) if axis.low is None else axis.low
        high = max(usable, default=2.0) if axis.high is None else axis.high
        if low < high:
            return cls(axis, low, high)
        if axis.log2:
            return cls(axis, low / 2, low * 2)
        margin = abs(low) / 2 or 0.5
        return cls(axis, low - margin, low + margin)

    def ticks(self) -> list[tuple[float, str]]:
        """Returns the ticks of a logarithmic axis or of an axis with given ticks.

        Each tick is a pair of a value and its label. Vega chooses the ticks of other axes.
        """
        if self.axis.ticks is not None:
            ticks = self.axis.ticks
            return [(value, name) for value, name in ticks if self.low <= value <= self.high]
        return [(value, _doubling_name(value)) for value in doublings(self.low, self.high)]


def _doubling_name(value: float) -> str:
    """Returns the label of a tick of a logarithmic axis."""
    # Round ticks between powers of two, because fractions would have long labels.
    return number(round(value) if value >= 10 else value)


def thinned(series: Series) -> Series:
    """Reduces the number of points of a curve by keeping every n-th point and the last one."""
    num_points = len(series.x)
    step = math.ceil(num_points / _MOST_POINTS)
    if step <= 1:
        return series
    indices = list(range(0, num_points, step))
    if indices[-1] != num_points - 1:
        indices.append(num_points - 1)
    ends = None
    if series.ends is not None:
        ends = [series.ends[index] for index in indices]
    return dataclasses.replace(
        series,
        x=[series.x[index] for index in indices],
        y=[series.y[index] for index in indices],
        ends=ends,
    )


def grouped_by_colour(curves: Sequence[Series]) -> list[Series]:
    """Sorts curves by colour. Colours are in the order in which they first occur."""
    colours = list(dict.fromkeys(curve.colour for curve in curves))
    return sorted(curves, key=lambda curve: colours.index(curve.colour))


def stepped(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """Returns the x and y values of a step curve, which is constant between the given points."""
    return np.repeat(x, 2)[1:].tolist(), np.repeat(y, 2)[:-1].tolist()


def smoothed(values: np.ndarray) -> np.ndarray:
    """Returns the moving average of the values.

    The window is centred, contains about a fifteenth of the values, and is shorter at the ends.
    Values that are not finite are ignored.
    """
    half = max(len(values) // 30, 1)
    window = np.ones(2 * half + 1)
    is_finite = np.isfinite(values)
    finite_values = np.where(is_finite, values, 0.0)
    total = np.convolve(finite_values, window, mode="same")
    count = np.convolve(is_finite.astype(float), window, mode="same")
    return np.where(count > 0, total / np.maximum(count, 1.0), math.nan)
