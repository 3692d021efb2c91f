"""Describes charts as data, which `vega` translates for pages and for files."""

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
# `s0`, grey, is used for the policy that others are compared with.
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
# Text instead of a chart whose curves have no values.
MISSING = "not recorded"
# Curves with at least this many steps are smoothed, because single batches are noisy.
SMOOTH_FROM = 30
# Number of colours that pages use in rotation.
_IN_TURN = 7
# Maximum number of points of a curve. A chart is about 300 pixels wide, and a page has many curves.
_MOST_POINTS = 200
# Maximum number of ticks on a logarithmic axis.
_MOST_TICKS = 8
# Maximum length of a linear axis of a page, as a multiple of the distance between two ticks.
_MOST_STEPS = 5.5


@dataclass(frozen=True)
class Series:
    """A curve.

    Attributes:
      label: name in the legend. A curve with an empty label is not in the legend.
      y: values. A value that is not finite leaves a gap.
      colour: class of the style sheet, such as `s0`; or a number in [0, 1] for ordered curves.
      ends: lower and upper end of the interval at each point.
      across: True if the intervals are horizontal.
      kind: `band` draws the intervals as an area instead of bars, `faint` draws a pale curve behind
        the other curves, and `broad` draws a broad and pale line.
      line: Matplotlib's line style `-`, `--` or `:`; empty for no line.
      marker: Matplotlib's marker at every point. Pages draw circles instead.
      hollow: True if the marker is not filled.
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


@dataclass(frozen=True)
class Axis:
    """An axis.

    Attributes:
      log2: True for a logarithmic axis with base 2.
      low: smallest value of the axis; None for the smallest value of the data.
      high: largest value of the axis; None for the largest value of the data.
      ticks: values with their names; None for round numbers.
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
    """A line across the chart: vertical at a value of x, or horizontal at a value of y."""

    axis: Literal["x", "y"]
    at: float
    kind: Literal["line", "grid", "broad", "dotted"] = "line"


@dataclass(frozen=True)
class Chart:
    """Axes with curves.

    Attributes:
      series: curves; later curves are drawn over earlier ones.
      diagonal: True to draw the line on which both axes have the same value.
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
        """Returns the curves with points; no curves if no value is finite."""
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
      rows: name of each bar, and the names and values of its parts.
      unit: unit of the values.
      note: text below the chart.
    """

    title: str
    rows: Sequence[tuple[str, Sequence[tuple[str, float]]]]
    unit: str
    note: str = ""


def colour(index: int) -> str:
    """Returns the colour class of a curve by its index, for curves without an order."""
    return f"s{index % _IN_TURN}"


def marker(index: int) -> str:
    """Returns Matplotlib's marker of a curve by its index."""
    return MARKERS[index % len(MARKERS)]


def shade(index: int, count: int) -> float:
    """Returns the colour in [0, 1] of a curve by its index among `count` ordered curves."""
    return index / max(count - 1, 1)


def number(value: float) -> str:
    """Formats a number for an axis or a point: `0.25`, `1,024`, `1.5M`, `3e-09`."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) >= 1e6:
        return f"{value / 1e6:,.4g}M"
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def linear_ticks(low: float, high: float, *, most: float = _MOST_STEPS) -> list[float]:
    """Returns ticks from low to high, whose distance is 1, 2 or 5 times a power of ten.

    Args:
      most: maximum number of steps between ticks, including partial steps at the ends.
    """
    span = high - low
    # For a smaller span, the distance between two ticks would be rounded to 0.
    if not span > 1e-300:
        return [low]
    power = 10.0 ** math.floor(math.log10(span / most))
    factor = next(factor for factor in (1, 2, 5, 10) if span / (factor * power) <= most)
    step = power * factor
    # Rounding errors must not remove the ticks at the ends.
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [step * k for k in range(first, last + 1)]


def doublings(low: float, high: float) -> list[float]:
    """Returns powers of two from low to high as ticks.

    If fewer than three powers lie between low and high, 1.5 times the powers are added, and if that
    is not enough, 1.25 and 1.75 times the powers. Of many powers, only every n-th is returned.
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
    """An axis with its smallest and largest value."""

    axis: Axis
    low: float
    high: float

    @classmethod
    def of(cls, axis: Axis, values: Iterable[float]) -> "Scale":
        """Returns the scale of an axis. Ends that the axis does not specify follow from the values.

        Values without a position on the axis, such as infinity or negative values on a logarithmic
        axis, are ignored.
        """
        usable = [value for value in values if math.isfinite(value)]
        if axis.log2:
            # An axis with a single value begins at half of it. Half of a smaller number may be
            # rounded to 0, which has no logarithm.
            usable = [value for value in usable if value > 2 * sys.float_info.min]
        low = min(usable, default=1.0) if axis.low is None else axis.low
        high = max(usable, default=2.0) if axis.high is None else axis.high
        if low < high:
            return cls(axis, low, high)
        if axis.log2:
            return cls(axis, low / 2, low * 2)
        margin = abs(low) / 2 or 0.5
        return cls(axis, low - margin, low + margin)

    def share(self, value: float) -> float:
        """Returns a value's position on the axis, in [0, 1].

        Values below or above the scale are at its ends.
        """
        value = min(max(value, self.low), self.high)
        if self.axis.log2:
            num_doublings = math.log2(self.high / self.low)
            return math.log2(value / self.low) / num_doublings
        return (value - self.low) / (self.high - self.low)

    def ticks(self, *, most: float = _MOST_STEPS) -> list[tuple[float, str]]:
        """Returns the ticks of the axis, as pairs of a value and its label.

        Args:
          most: maximum number of intervals between ticks on a linear axis.
        """
        if self.axis.ticks is not None:
            ticks = self.axis.ticks
            return [(value, name) for value, name in ticks if self.low <= value <= self.high]
        if self.axis.log2:
            values = doublings(self.low, self.high)
        else:
            values = linear_ticks(self.low, self.high, most=most)
        if self.axis.whole:
            whole_values = [value for value in values if abs(value - round(value)) < 1e-9]
            values = whole_values or values
        return [(value, self._tick_name(value)) for value in values]

    def _tick_name(self, value: float) -> str:
        # Ticks between powers of two can be fractions, whose names would be long.
        if self.axis.log2 and value >= 10:
            value = round(value)
        return number(value)


def thinned(series: Series) -> Series:
    """Returns a curve with every n-th point and the last one, so that it has few points."""
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
    """Returns the curves grouped by colour. Colours are in the order of their first curves."""
    colours = list(dict.fromkeys(curve.colour for curve in curves))
    return sorted(curves, key=lambda curve: colours.index(curve.colour))


def stepped(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """Returns x and y of a step curve, which keeps each value until the next x."""
    return np.repeat(x, 2)[1:].tolist(), np.repeat(y, 2)[:-1].tolist()


def smoothed(values: np.ndarray) -> np.ndarray:
    """Returns the centred mean over about a fifteenth of the values, narrower at the ends."""
    half = max(len(values) // 30, 1)
    window = np.ones(2 * half + 1)
    is_finite = np.isfinite(values)
    finite_values = np.where(is_finite, values, 0.0)
    total = np.convolve(finite_values, window, mode="same")
    count = np.convolve(is_finite.astype(float), window, mode="same")
    return np.where(count > 0, total / np.maximum(count, 1.0), math.nan)
