"""Charts for pages, as SVG: they follow the page's colours and width, and say numbers when touched.

Every text is escaped by the template, and everything else is a number that was formatted here.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from bacr_jax.report.charts import MISSING, Bars, Chart, Scale, Series, colour, number, thinned
from bacr_jax.report.html_page import render

# Units of the drawing; a page scales it to the width that it has.
_WIDTH, _HEIGHT = 420.0, 250.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 60.0, 10.0, 10.0, 42.0
_SHADES = 6
Point = tuple[float, float]


def figure(chart: Chart | Bars) -> Markup:
    """A chart with its title, legend and curves."""
    return _bars(chart) if isinstance(chart, Bars) else _chart(chart)


@dataclass(frozen=True)
class _Frame:
    """From values to places of the drawing."""

    x: Scale
    y: Scale

    def across(self, value: float) -> float:
        return _LEFT + 6 + self.x.share(value) * (_WIDTH - _RIGHT - _LEFT - 12)

    def up(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - self.y.share(value) * (_HEIGHT - _BOTTOM - _TOP)

    def at(self, x: float, y: float) -> Point:
        return self.across(x), self.up(y)


def _path(points: Sequence[Point], style: str) -> dict[str, str]:
    return {"style": style, "d": "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)}


def _text(x: float, y: float, text: str, style: str) -> dict[str, str]:
    return {"x": f"{x:.1f}", "y": f"{y:.1f}", "text": text, "style": style}


def _class(one: Series) -> str:
    return one.colour if isinstance(one.colour, str) else f"o{round(one.colour * (_SHADES - 1))}"


def _finite(*values: float) -> bool:
    return all(map(math.isfinite, values))


def _chart(chart: Chart) -> Markup:
    series = [thinned(one) for one in chart.drawn]
    if not series:
        return render("chart.html", title=chart.title, note=MISSING)
    frame = _Frame(*chart.scales())
    floor, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    lines, texts = [], []
    for value, name in frame.y.ticks():
        at = frame.up(value)
        lines.append(_path([(_LEFT, at), (right, at)], "grid"))
        texts.append(_text(_LEFT - 6, at + 4, name, "tick end"))
    for value, name in frame.x.ticks():
        at = frame.across(value)
        lines.append(_path([(at, floor), (at, floor + 4)], "axis"))
        texts.append(_text(at, floor + 17, name, "tick middle"))
    lines.append(_path([(_LEFT, floor), (right, floor)], "axis"))
    texts.append(_text((_LEFT + right) / 2, _HEIGHT - 6, chart.x.label, "label middle"))
    for mark in chart.marks:
        at = frame.across(mark.at) if mark.axis == "x" else frame.up(mark.at)
        ends = [(at, _TOP), (at, floor)] if mark.axis == "x" else [(_LEFT, at), (right, at)]
        lines.append(_path(ends, f"mark {mark.kind}"))
    if chart.diagonal:
        low, high = max(frame.x.low, frame.y.low), min(frame.x.high, frame.y.high)
        lines.append(_path([frame.at(low, low), frame.at(high, high)], "diagonal"))
    return render(
        "chart.html",
        title=chart.title,
        note=chart.note,
        size=(_WIDTH, _HEIGHT),
        legend=[(_class(one), one.label) for one in series if one.label],
        lines=lines,
        texts=texts,
        upright=(f"{(_TOP + floor) / 2:.1f}", chart.y.label),
        groups=[_drawn(one, frame) for one in series],
    )


def _drawn(one: Series, frame: _Frame) -> dict[str, Any]:
    """A curve with its ends and points; a gap where a value is not finite."""
    paths = []
    runs = [
        [frame.at(*point) for point in run]
        for known, run in itertools.groupby(zip(one.x, one.y), lambda point: _finite(*point))
        if known
    ]
    known = [(p, v, e) for p, v, e in zip(one.x, one.y, one.ends or ()) if _finite(*e)]
    if one.kind == "band" and known:
        high = [frame.at(place, end) for place, _, (_, end) in known]
        low = [frame.at(place, end) for place, _, (end, _) in known]
        paths.append(_path([*high, *reversed(low)], "band"))
    else:
        for place, value, ends in known:
            places = [(end, value) if one.across else (place, end) for end in ends]
            paths.append(_path([frame.at(*place) for place in places], "bar"))
    dashed = " dashed" if one.line in ("--", ":") else ""
    kind = f" {one.kind}" if one.kind in ("faint", "broad") else ""
    if one.line:
        paths += [_path(points, f"curve{kind}{dashed}") for points in runs if len(points) > 1]
    dots = []
    if one.marker or any(len(points) == 1 for points in runs):
        for place, value in zip(one.x, one.y):
            if _finite(place, value):
                tip = f"{one.label}: {number(value)} at {number(place)}".removeprefix(": ")
                dots.append((*(f"{at:.1f}" for at in frame.at(place, value)), tip))
    return {"style": _class(one), "paths": paths, "dots": dots, "box": None}


def _bars(bars: Bars) -> Markup:
    names = list(dict.fromkeys(name for _, parts in bars.rows for name, _ in parts))
    styles = {name: colour(place + 1) for place, name in enumerate(names)}
    total = max((sum(value for _, value in parts) for _, parts in bars.rows), default=0.0)
    if not total > 0:
        return render("chart.html", title=bars.title, note=MISSING)
    floor, texts, groups = 0.0, [], []
    for place, (label, parts) in enumerate(bars.rows):
        floor, left = 14 + place * 44.0, 4.0
        whole = sum(value for _, value in parts)
        texts.append(_text(4, floor, f"{label}: {number(whole)} {bars.unit}", "tick"))
        for name, value in parts:
            width = max(value / total * (_WIDTH - 8), 0.0)
            tip = f"{name}: {number(value)} {bars.unit} ({value / whole:.0%})"
            box = (f"{left:.1f}", f"{floor + 5:.1f}", f"{width:.1f}", tip)
            groups.append({"style": styles[name], "paths": [], "dots": [], "box": box})
            left += width
    return render(
        "chart.html",
        title=bars.title,
        note=bars.note,
        size=(_WIDTH, floor + 32),
        legend=[(style, name) for name, style in styles.items()],
        lines=[],
        texts=texts,
        upright=None,
        groups=groups,
    )
