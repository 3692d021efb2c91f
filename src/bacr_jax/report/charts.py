"""Charts as data: each curve is described once, and drawn for pages (`svg`) and files (`png`)."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

# Okabe and Ito's colours, which the colour-blind can tell apart, without yellow, which can't be
# seen on white; the last is of Tol's muted scheme (2021). Grey, the first, is for what the others
# are compared with. page.css has `s0` to `s8` for light and dark pages.
COLOURS = (
    *("#7f7f7f", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"),
    *("#000000", "#882255"),
)
MARKERS = ("s", "o", "^", "D", "v", "P", "X", "<", ">")
# Said instead of a chart where no curve has a value.
MISSING = "not recorded"
# From this many steps on, curves are drawn smoothed over the noise of single batches.
SMOOTH_FROM = 30
# Colours that pages take in turn.
_IN_TURN = 7
# More points than this of a curve no screen shows.
_MOST_POINTS = 400
_MOST_TICKS = 8
# Of a linear axis of a page: whole steps, and what is left at its ends.
_MOST_STEPS = 5.5


@dataclass(frozen=True)
class Series:
    """A curve.

    Attributes:
      label: in the legend; empty: in none.
      y: values; what is not finite is a gap.
      colour: a class of the style sheet, `s0`; or a share: from easy to hard, or early to late.
      ends: lower and upper end at each place.
      across: the ends lie along the horizontal axis.
      kind: band: the ends are an area instead of bars; faint: pale, behind the others; broad: a
        broad and pale line.
      line: as Matplotlib has it: `-`, `--`, `:`, or empty for none.
      marker: at every place, as Matplotlib has it; a page draws circles.
      hollow: the marker is not filled.
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
      log2: doublings are equally far apart.
      low: smallest value shown; None: that of the data.
      ticks: values with their names; None: round numbers.
      whole: values between whole numbers have no ticks.
    """

    label: str
    log2: bool = False
    low: float | None = None
    high: float | None = None
    ticks: Sequence[tuple[float, str]] | None = None
    whole: bool = False


@dataclass(frozen=True)
class Mark:
    """A straight line from edge to edge: `x` is upright at a value of x, `y` lies at one of y."""

    axis: Literal["x", "y"]
    at: float
    kind: Literal["line", "grid", "broad", "dotted"] = "line"


@dataclass(frozen=True)
class Chart:
    """Axes with curves.

    Attributes:
      series: curves, the last one on top.
      diagonal: a line where both axes have the same value.
      marks: behind the curves.
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
        """Curves with points; none where no value is finite."""
        there = [one for one in self.series if len(one.x)]
        return there if any(math.isfinite(v) for one in there for v in one.y) else []

    def scales(self) -> tuple["Scale", "Scale"]:
        """Of both axes."""
        x, y = ([v for one in self.drawn for v in getattr(one, axis)] for axis in "xy")
        for one in self.drawn:
            (x if one.across else y).extend(v for pair in one.ends or () for v in pair)
        x += [mark.at for mark in self.marks if mark.axis == "x"]
        y += [mark.at for mark in self.marks if mark.axis == "y"]
        return Scale.of(self.x, x), Scale.of(self.y, y)


@dataclass(frozen=True)
class Bars:
    """A bar for each row, made of parts of the same names: name, and parts with their values."""

    title: str
    rows: Sequence[tuple[str, Sequence[tuple[str, float]]]]
    unit: str
    note: str = ""


def colour(place: int) -> str:
    """Of the place-th of several curves that have no order."""
    return f"s{place % _IN_TURN}"


def marker(place: int) -> str:
    """Of the place-th of several curves."""
    return MARKERS[place % len(MARKERS)]


def shade(place: int, count: int) -> float:
    """Colour of the place-th of `count` curves that have an order."""
    return place / max(count - 1, 1)


def number(value: float) -> str:
    """A number for an axis or a point: `0.25`, `1,024`, `1.5M`, `3e-09`."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) >= 1e6:
        return f"{value / 1e6:,.4g}M"
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def linear_ticks(low: float, high: float, *, most: float = _MOST_STEPS) -> list[float]:
    """Round numbers from low to high: at most so many steps of 1, 2 or 5 times a power of ten."""
    span = high - low
    # Below this, a step of it would be 0.
    if not span > 1e-300:
        return [low]
    step = 10.0 ** math.floor(math.log10(span / most))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (factor * step) <= most)
    first = math.ceil(low / step - 1e-9)
    return [step * k for k in range(first, math.floor(high / step + 1e-9) + 1)]


def doublings(low: float, high: float) -> list[float]:
    """Powers of two from low to high, some of many; where few, halves and quarters between them."""
    powers = range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)
    for parts in ((4,), (4, 6), (4, 5, 6, 7)):
        found = [2.0**k * part / 4 for k in powers for part in parts]
        found = [value for value in found if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]
        if len(found) > 2:
            break
    return found[:: math.ceil(len(found) / _MOST_TICKS)] if found else [low]


@dataclass(frozen=True)
class Scale:
    """An axis with its ends."""

    axis: Axis
    low: float
    high: float

    @classmethod
    def of(cls, axis: Axis, values: Iterable[float]) -> "Scale":
        """The ends that the axis states, or that these values have."""
        known = [v for v in values if math.isfinite(v) and (v > 0 or not axis.log2)]
        low = min(known, default=1.0) if axis.low is None else axis.low
        high = max(known, default=2.0) if axis.high is None else axis.high
        if not low < high:
            room = abs(low) / 2 or 0.5
            low, high = (low / 2, low * 2) if axis.log2 else (low - room, low + room)
        return cls(axis, low, high)

    def share(self, value: float) -> float:
        """Where a value lies, from 0 to 1; values outside lie at the edge."""
        value = min(max(value, self.low), self.high)
        if self.axis.log2:
            return math.log2(value / self.low) / math.log2(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, *, most: float = _MOST_STEPS) -> list[tuple[float, str]]:
        """Values with their names; at most so many steps of a linear axis."""
        if self.axis.ticks is not None:
            return [(v, name) for v, name in self.axis.ticks if self.low <= v <= self.high]
        ends = self.low, self.high
        found = doublings(*ends) if self.axis.log2 else linear_ticks(*ends, most=most)
        if self.axis.whole:
            found = [v for v in found if abs(v - round(v)) < 1e-9] or found
        rounded = lambda v: round(v) if self.axis.log2 and v >= 10 else v
        return [(value, number(rounded(value))) for value in found]


def thinned(series: Series) -> Series:
    """The same curve with no more points than a screen shows."""
    step = math.ceil(len(series.x) / _MOST_POINTS)
    if step <= 1:
        return series
    keep = sorted({*range(0, len(series.x), step), len(series.x) - 1})
    x, y = ([values[i] for i in keep] for values in (series.x, series.y))
    ends = None if series.ends is None else [series.ends[i] for i in keep]
    return dataclasses.replace(series, x=x, y=y, ends=ends)


def stepped(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """Places and values of a curve that stays where it is until the next place."""
    return np.repeat(x, 2)[1:].tolist(), np.repeat(y, 2)[:-1].tolist()


def smoothed(values: np.ndarray) -> np.ndarray:
    """Centred mean over about a fifteenth of the values, narrower at the ends."""
    half = max(len(values) // 30, 1)
    known = np.isfinite(values)
    window = np.ones(2 * half + 1)
    total = np.convolve(np.where(known, values, 0.0), window, mode="same")
    count = np.convolve(known.astype(float), window, mode="same")
    return np.where(count > 0, total / np.maximum(count, 1.0), math.nan)
