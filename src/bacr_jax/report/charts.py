"""Describes charts as data, which `svg` draws for pages and `png` draws for files."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

# Okabe and Ito's colours, which colour-blind readers can distinguish, without yellow, which is
# invisible on white; the last colour is from Tol's muted scheme (2021). Grey, the first, marks the
# policy that the others are compared with. page.css has `s0` to `s8` for light and dark pages.
COLOURS = (
    *("#7f7f7f", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"),
    *("#000000", "#882255"),
)
MARKERS = ("s", "o", "^", "D", "v", "P", "X", "<", ">")
# Text instead of a chart whose curves have no values.
MISSING = "not recorded"
# Curves with at least this many steps are smoothed, because single batches are noisy.
SMOOTH_FROM = 30
# Number of colours that pages use in rotation.
_IN_TURN = 7
# Most points of a curve, about the resolution of a screen.
_MOST_POINTS = 400
_MOST_TICKS = 8
# Most steps between ticks on a linear axis of a page, partial steps at the ends included.
_MOST_STEPS = 5.5


@dataclass(frozen=True)
class Series:
    """A curve.

    Attributes:
      label: name in the legend; empty if the legend leaves the curve out.
      y: values; a value that is not finite leaves a gap.
      colour: class of the style sheet, such as `s0`; or a number in [0, 1] for ordered curves.
      ends: lower and upper end of the interval at each point.
      across: True if the intervals are horizontal.
      kind: band: draw intervals as an area instead of bars; faint: pale, behind the other curves;
        broad: a broad and pale line.
      line: Matplotlib's line style `-`, `--` or `:`; empty for no line.
      marker: Matplotlib's marker at every point; pages draw circles.
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
        curves = [one for one in self.series if len(one.x)]
        has_values = any(math.isfinite(value) for one in curves for value in one.y)
        return curves if has_values else []

    def scales(self) -> tuple["Scale", "Scale"]:
        """Returns the scales of the horizontal and the vertical axis."""
        x = [value for one in self.drawn for value in one.x]
        y = [value for one in self.drawn for value in one.y]
        for one in self.drawn:
            values = x if one.across else y
            for ends in one.ends or ():
                values.extend(ends)
        x += [mark.at for mark in self.marks if mark.axis == "x"]
        y += [mark.at for mark in self.marks if mark.axis == "y"]
        return Scale.of(self.x, x), Scale.of(self.y, y)


@dataclass(frozen=True)
class Bars:
    """Stacked bars: each row has a name, and named parts with their values."""

    title: str
    rows: Sequence[tuple[str, Sequence[tuple[str, float]]]]
    unit: str
    note: str = ""


def colour(place: int) -> str:
    """Returns the colour class of a curve by its index, for curves without an order."""
    return f"s{place % _IN_TURN}"


def marker(place: int) -> str:
    """Returns Matplotlib's marker of a curve by its index."""
    return MARKERS[place % len(MARKERS)]


def shade(place: int, count: int) -> float:
    """Returns the colour in [0, 1] of a curve by its index among `count` ordered curves."""
    return place / max(count - 1, 1)


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
    """Returns ticks from low to high, at most `most` steps of 1, 2 or 5 times a power of ten."""
    span = high - low
    # A smaller span would give a step of 0.
    if not span > 1e-300:
        return [low]
    step = 10.0 ** math.floor(math.log10(span / most))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (factor * step) <= most)
    first = math.ceil(low / step - 1e-9)
    return [step * k for k in range(first, math.floor(high / step + 1e-9) + 1)]


def doublings(low: float, high: float) -> list[float]:
    """Returns powers of two from low to high as ticks.

    With few powers, multiples of halves or quarters between them are added; of many powers, only
    some are returned.
    """
    powers = range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)
    for parts in ((4,), (4, 6), (4, 5, 6, 7)):
        candidates = [2.0**k * part / 4 for k in powers for part in parts]
        ticks = [value for value in candidates if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]
        if len(ticks) > 2:
            break
    if not ticks:
        return [low]
    return ticks[:: math.ceil(len(ticks) / _MOST_TICKS)]


@dataclass(frozen=True)
class Scale:
    """An axis with its smallest and largest value."""

    axis: Axis
    low: float
    high: float

    @classmethod
    def of(cls, axis: Axis, values: Iterable[float]) -> "Scale":
        """Returns the scale of an axis, with ends from the axis or else from the values."""
        usable = [v for v in values if math.isfinite(v) and (v > 0 or not axis.log2)]
        low = min(usable, default=1.0) if axis.low is None else axis.low
        high = max(usable, default=2.0) if axis.high is None else axis.high
        if low < high:
            return cls(axis, low, high)
        if axis.log2:
            return cls(axis, low / 2, low * 2)
        margin = abs(low) / 2 or 0.5
        return cls(axis, low - margin, low + margin)

    def share(self, value: float) -> float:
        """Returns a value's position on the axis in [0, 1]; values outside are at the edge."""
        value = min(max(value, self.low), self.high)
        if self.axis.log2:
            return math.log2(value / self.low) / math.log2(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, *, most: float = _MOST_STEPS) -> list[tuple[float, str]]:
        """Returns the ticks: values with their names; at most `most` steps on a linear axis."""
        if self.axis.ticks is not None:
            return [(v, name) for v, name in self.axis.ticks if self.low <= v <= self.high]
        if self.axis.log2:
            values = doublings(self.low, self.high)
        else:
            values = linear_ticks(self.low, self.high, most=most)
        if self.axis.whole:
            values = [v for v in values if abs(v - round(v)) < 1e-9] or values
        return [(value, number(self._rounded(value))) for value in values]

    def _rounded(self, value: float) -> float:
        return round(value) if self.axis.log2 and value >= 10 else value


def thinned(series: Series) -> Series:
    """Returns a curve with at most about as many points as a screen shows."""
    step = math.ceil(len(series.x) / _MOST_POINTS)
    if step <= 1:
        return series
    chosen = sorted({*range(0, len(series.x), step), len(series.x) - 1})
    x = [series.x[i] for i in chosen]
    y = [series.y[i] for i in chosen]
    ends = None if series.ends is None else [series.ends[i] for i in chosen]
    return dataclasses.replace(series, x=x, y=y, ends=ends)


def stepped(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """Returns x and y of a step curve, which keeps each value until the next x."""
    return np.repeat(x, 2)[1:].tolist(), np.repeat(y, 2)[:-1].tolist()


def smoothed(values: np.ndarray) -> np.ndarray:
    """Returns the centred mean over about a fifteenth of the values, narrower at the ends."""
    half = max(len(values) // 30, 1)
    is_finite = np.isfinite(values)
    window = np.ones(2 * half + 1)
    total = np.convolve(np.where(is_finite, values, 0.0), window, mode="same")
    count = np.convolve(is_finite.astype(float), window, mode="same")
    return np.where(count > 0, total / np.maximum(count, 1.0), math.nan)
