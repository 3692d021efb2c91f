"""Converts charts to Vega-Lite descriptions (JSON), for pages and for files.

`plots` embeds the descriptions in HTML, and `pictures` draws them as PNG, SVG and PDF. This module
neither reads nor writes files.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from bacr_jax.report.charts import (
    COLOURS,
    INK,
    SHADES,
    SMOOTH_FROM,
    Bars,
    Chart,
    Mark,
    Scale,
    Series,
    colour,
    shade_name,
    thinned,
)

Spec = dict[str, Any]
# With the theme `page`, the colours are CSS variables, so that they follow the reader's choice of
# light or dark mode.
Theme = Literal["light", "dark", "page"]

ARROWS = "open arrows: points or intervals beyond the axis"
# Maps the names of markers in Matplotlib and `Series` to shapes in Vega.
_SHAPES = {
    "s": "square",
    "o": "circle",
    "^": "triangle-up",
    "D": "diamond",
    "v": "triangle-down",
    "P": "cross",
    "X": "M-1,-0.6L-0.6,-1L0,-0.4L0.6,-1L1,-0.6L0.4,0L1,0.6L0.6,1L0,0.4L-0.6,1L-1,0.6L-0.4,0Z",
    "<": "triangle-left",
    ">": "triangle-right",
    # A star. Its tips extend further than other markers, but it still fits into a row of a legend.
    "*": "M0.00,-1.40L0.32,-0.44L1.34,-0.43L0.52,0.17L0.83,1.13"
    "L0.00,0.56L-0.83,1.13L-0.52,0.17L-1.34,-0.43L-0.32,-0.44Z",
}
# Dash patterns of the line styles. Solid lines come last, so that they are drawn over dashed lines.
_DASHES = {":": [2, 3], "-.": [7, 3, 2, 3], "--": [5, 3], "-": [1, 0]}
# Width and opacity of a line by its kind.
_STROKES: Mapping[str, tuple[float, float]] = {
    "line": (2.0, 1.0),
    "band": (2.0, 1.0),
    "faint": (1.0, 0.3),
    "broad": (7.0, 0.25),
}
_MARK_STROKES: Mapping[str, Spec] = {
    "line": {"strokeWidth": 1},
    "grid": {"strokeWidth": 1, "opacity": 0.4},
    "broad": {"strokeWidth": 5, "opacity": 0.3},
    "dotted": {"strokeWidth": 1, "strokeDash": [2, 3]},
}
# Space in pixels between the axes and the first and last values, so that no marker touches an axis.
_PADDING = 7
_MARKER_SIZE = 50
# Maximum number of markers on a curve with `Series.has_few_markers`.
_FEW_MARKERS = 10
# Number format of D3: four significant digits, with commas between thousands.
_FORMAT = ",.4~r"
_ZOOM = {
    "name": "zoom",
    "select": {"type": "interval", "zoom": "wheel![event.ctrlKey || event.altKey]"},
    "bind": "scales",
}
_HOVER = {
    "name": "hover",
    "select": {"type": "point", "on": "pointerover", "clear": "pointerout", "nearest": True},
}


def ink(name: str, theme: Theme) -> str:
    """Returns a colour in a theme. The name is a key of `INK`, `COLOURS` or `SHADES`."""
    if theme == "page":
        return f"var(--{name})"
    return {**INK, **COLOURS, **SHADES}[name][theme == "dark"]


def colour_name(series: Series) -> str:
    """Returns the name of a curve's colour, as accepted by `ink`."""
    if isinstance(series.colour, str):
        return series.colour
    return shade_name(series.colour)


def config(theme: Theme) -> Spec:
    """Returns the Vega-Lite config with the colours and sizes of all charts."""
    soft = ink("soft", theme)
    line = ink("line", theme)
    text = ink("ink", theme)
    return {
        "background": "transparent" if theme == "page" else ink("paper", theme),
        "font": "system-ui, sans-serif" if theme == "page" else "sans-serif",
        "view": {"stroke": None},
        "axis": {
            "labelColor": soft,
            "titleColor": text,
            "gridColor": line,
            "tickColor": soft,
            "domainColor": soft,
            "labelFontSize": 12,
            "titleFontSize": 12,
            "titleFontWeight": "normal",
            "labelLimit": 320,
        },
        "axisX": {"grid": False, "labelOverlap": True},
        "axisY": {"domain": False, "ticks": False, "labelPadding": 6},
        "legend": {
            "labelColor": text,
            "labelFontSize": 12,
            "labelLimit": 420,
            # Size and stroke are the same as in the chart. With a wider stroke, the legend row of a
            # star would be higher than the others.
            "symbolSize": _MARKER_SIZE,
            "symbolStrokeWidth": 1,
            "symbolOpacity": 1,
            "labelOffset": 7,
            "title": None,
        },
        "title": {"color": text, "subtitleColor": soft, "anchor": "start", "frame": "group"},
    }


@dataclasses.dataclass(frozen=True)
class CurveStyles:
    """Styles of the curves that share a legend.

    Attributes:
      curves: maps each label to a curve with its style, in the order of the legend.
    """

    curves: Mapping[str, Series]

    @classmethod
    def of(cls, series: Iterable[Series]) -> "CurveStyles":
        """Returns the styles of curves. Of several curves with the same label, the last is used."""
        return cls({curve.label: curve for curve in series})

    def channels(self, theme: Theme, *, legend: Spec | None) -> dict[str, Spec]:
        """Returns the Vega-Lite encodings of colour and marker, which share a legend."""
        curves = self.curves.values()
        named = [name for name in self.curves if not name.startswith(_UNNAMED)]
        shared = None if legend is None or not named else {**legend, "values": named}
        shapes = [_SHAPES[curve.marker or "o"] for curve in curves]
        ranges: Mapping[str, list[Any]] = {
            "color": [ink(colour_name(curve), theme) for curve in curves],
            "shape": shapes,
        }
        return {
            channel: {
                "field": "curve",
                "type": "nominal",
                "scale": {"domain": list(self.curves), "range": values},
                "legend": shared,
            }
            for channel, values in ranges.items()
        }


# Prefix of the names of curves that are not in the legend: an invisible character, which labels
# never contain.
_UNNAMED = "\u2060"


def named_curves(chart: Chart) -> list[Series]:
    """Returns the curves of a chart, each with a label.

    Curves without a label do not appear in the legend. If another curve of the same colour has a
    label, such as the smoothed curve that is drawn over pale raw values, they get this label.
    Otherwise, they get a label that starts with `_UNNAMED`.
    """
    curves = [thinned(series) for series in chart.drawn]
    labels = {curve.colour: curve.label for curve in curves if curve.label}
    named = []
    for index, curve in enumerate(curves):
        label = curve.label or labels.get(curve.colour, f"{_UNNAMED}{index}")
        named.append(dataclasses.replace(curve, label=label))
    return named


def chart_spec(
    chart: Chart,
    theme: Theme,
    *,
    styles: CurveStyles | None = None,
    legend: Spec | None = None,
    interactive: bool = False,
) -> Spec:
    """Returns the Vega-Lite description of a chart, without size and title.

    Args:
      styles: styles of the curves in a shared legend, or None to use only the curves of this chart.
      legend: position of the legend, or None for a chart without a legend.
      interactive: True to show values at the mouse pointer and to enable zooming.
    """
    curves = named_curves(chart)
    styles = styles or CurveStyles.of(curves)
    scales = chart.scales()
    arrows = _arrows(curves, *scales)
    x_title = [chart.x.label, ARROWS] if arrows else chart.x.label
    frame = {
        "x": _position("x", scales[0], x_title),
        "y": _position("y", scales[1], chart.y.label),
    }
    channels = styles.channels(theme, legend=legend)
    layers = [_mark_layer(mark, frame, theme) for mark in chart.marks]
    if chart.diagonal:
        low = max(scale.low for scale in scales)
        high = min(scale.high for scale in scales)
        layers.append(_diagonal_layer(low, high, frame, theme))
    layers += _curve_layers(curves, frame, channels)
    layers += _marker_layers(curves, frame, channels, theme)
    if arrows:
        layers.append(_arrow_layer(arrows, frame, channels))
    if interactive:
        layers.append(_pointer_layer(chart, curves, frame, channels))
    return {"layer": layers}


def _position(field: str, scale: Scale, title: str | list[str]) -> Spec:
    """Returns the Vega-Lite encoding of an axis."""
    kind: Spec = {"domain": [scale.low, scale.high], "nice": False}
    kind["padding"] = _PADDING
    if scale.axis.log2:
        kind |= {"type": "log", "base": 2}
    else:
        kind["zero"] = False
    return {
        "field": field,
        "type": "quantitative",
        "scale": kind,
        "title": title or None,
        "axis": _ticks(scale),
    }


def _ticks(scale: Scale) -> Spec:
    """Returns the ticks of an axis. Vega chooses the ticks of a linear axis without labels."""
    axis = scale.axis
    if axis.ticks is None and not axis.log2:
        largest = max(abs(scale.low), abs(scale.high))
        tick_format = ",~r" if 1e-3 <= largest < 1e6 else "~s" if largest >= 1e6 else ".1~e"
        ticks: Spec = {"tickCount": 5, "format": tick_format}
        if axis.whole:
            ticks["tickMinStep"] = 1
        return ticks
    named = scale.ticks()
    # Vega's values can have rounding errors, so a label is used for all values close to its tick.
    names = "''"
    for value, name in reversed(named):
        tolerance = 1e-6 * max(abs(value), 1e-6)
        names = f"abs(datum.value - {value!r}) <= {tolerance!r} ? {json.dumps(name)} : ({names})"
    return {"values": [value for value, _ in named], "labelExpr": names}


def _mark_layer(mark: Mark, frame: Mapping[str, Spec], theme: Theme) -> Spec:
    """Returns the layer of a line across the chart."""
    style = {"color": ink("soft", theme), "clip": True, **_MARK_STROKES[mark.kind]}
    return {
        "data": {"values": [{mark.axis: mark.at}]},
        "mark": {"type": "rule", **style},
        "encoding": {mark.axis: frame[mark.axis]},
    }


def _diagonal_layer(low: float, high: float, frame: Mapping[str, Spec], theme: Theme) -> Spec:
    style = {"color": ink("soft", theme), "strokeWidth": 1, "strokeDash": [4, 4], "clip": True}
    return {
        "data": {"values": [{"x": low, "y": low}, {"x": high, "y": high}]},
        "mark": {"type": "line", **style},
        "encoding": dict(frame),
    }


def _rows(curve: Series) -> list[Spec]:
    """Returns the points of a curve. Values that are not finite become None, which leaves a gap."""
    rows = []
    for index, (x, y) in enumerate(zip(curve.x, curve.y)):
        row: Spec = {"x": _finite(x), "y": _finite(y), "curve": curve.label}
        if curve.ends is not None:
            low, high = curve.ends[index]
            row |= {"low": _finite(low), "high": _finite(high)}
        rows.append(row)
    return rows


def _finite(value: float) -> float | None:
    """Rounds a value to six significant digits. Returns None if the value is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _curve_layers(
    curves: Sequence[Series], frame: Mapping[str, Spec], channels: Mapping[str, Spec]
) -> list[Spec]:
    """Returns the layers of bands, intervals and lines. Curves of the same kind share a layer."""
    layers = []
    colour_of = {"color": channels["color"]}
    bands = [curve for curve in curves if curve.kind == "band" and curve.ends is not None]
    if bands:
        encoding = {"x": frame["x"], **_range(frame, across=False), **colour_of}
        mark = {"type": "area", "opacity": 0.2, "clip": True}
        layers.append(_layer(bands, mark, encoding))
    for across in (False, True):
        bars = [
            curve
            for curve in curves
            if curve.kind != "band" and curve.ends is not None and curve.across == across
        ]
        if bars:
            position = frame["y" if across else "x"]
            encoding = {"y" if across else "x": position, **_range(frame, across=across)}
            mark = {"type": "rule", "strokeWidth": 1.3, "opacity": 0.75, "clip": True}
            layers.append(_layer(bars, mark, {**encoding, **colour_of}))
    # Points are connected in the order of the data, and not of x, because x can decrease along a
    # curve.
    encoding = {**frame, **colour_of, "order": {"value": None}}
    for kind, line in itertools.product(_STROKES, _DASHES):
        lines = [curve for curve in curves if curve.kind == kind and curve.line == line]
        if lines:
            layers.append(_layer(lines, _line_mark(kind, line), encoding))
    return layers


def _line_mark(kind: str, line: str) -> Spec:
    """Returns the mark of curves of one kind and one line style.

    The dash pattern is a property of the mark and not an encoding, because an encoding would also
    apply to the outlines of markers in the legend.
    """
    width, opacity = _STROKES[kind]
    return {
        "type": "line",
        "strokeWidth": width,
        "strokeDash": _DASHES[line],
        "opacity": opacity,
        "strokeJoin": "round",
        "clip": True,
    }


def _range(frame: Mapping[str, Spec], *, across: bool) -> dict[str, Spec]:
    """Returns the Vega-Lite encoding of intervals from the field `low` to the field `high`.

    Args:
      frame: encodings of the axes x and y.
      across: True for intervals along x, False for intervals along y.
    """
    axis = "x" if across else "y"
    return {axis: {**frame[axis], "field": "low"}, f"{axis}2": {"field": "high"}}


def _layer(curves: Sequence[Series], mark: Spec, encoding: Spec) -> Spec:
    rows = [row for curve in curves for row in _rows(curve)]
    return {"data": {"values": rows}, "mark": mark, "encoding": encoding}


def _marker_layers(
    curves: Sequence[Series],
    frame: Mapping[str, Spec],
    channels: Mapping[str, Spec],
    theme: Theme,
) -> list[Spec]:
    """Returns the layers with the markers of curves, and of single points that no line connects."""
    filled = list[Series]()
    hollow = list[Series]()
    for curve in curves:
        (hollow if curve.hollow else filled).append(_marked_points(curve))
    layers = []
    # Filled markers are drawn last, because they highlight single points of hollow curves.
    for marked_curves, is_filled in ((hollow, False), (filled, True)):
        if not any(len(curve.x) for curve in marked_curves):
            continue
        mark: Spec = {"type": "point", "size": _MARKER_SIZE, "opacity": 1, "clip": True}
        mark["filled"] = is_filled
        if not is_filled:
            mark["fill"] = ink("paper", theme)
        encoding = {**frame, "color": channels["color"], "shape": channels["shape"]}
        layers.append(_layer(marked_curves, mark, encoding))
    return layers


def _marked_points(curve: Series) -> Series:
    """Returns the points of a curve that have a marker.

    A point between two gaps always has one, because a line would not show the point.
    """
    num_points = len(curve.x)
    is_long = num_points >= SMOOTH_FROM
    if curve.marker and not (curve.has_few_markers and is_long):
        return curve
    marked = set(_single_points(curve))
    if curve.marker:
        marked.update(range(0, num_points, math.ceil(num_points / _FEW_MARKERS)))
    x = [curve.x[index] for index in sorted(marked)]
    y = [curve.y[index] for index in sorted(marked)]
    return dataclasses.replace(curve, x=x, y=y, ends=None)


def _single_points(curve: Series) -> list[int]:
    """Returns the indices of the points of a curve that lie between two gaps."""
    finite = [math.isfinite(x) and math.isfinite(y) for x, y in zip(curve.x, curve.y)]
    return [
        index
        for index, is_finite in enumerate(finite)
        if is_finite and not any(finite[max(index - 1, 0) : index] + finite[index + 1 : index + 2])
    ]


def _arrows(curves: Sequence[Series], x_scale: Scale, y_scale: Scale) -> list[Spec]:
    """Returns an arrow for each interval that extends beyond an edge of the chart."""
    arrows = list[Spec]()
    for curve in curves:
        if curve.ends is None or curve.kind == "band":
            continue
        scale = x_scale if curve.across else y_scale
        positions = curve.y if curve.across else curve.x
        for position, (low, high) in zip(positions, curve.ends):
            for edge, exceeds, angle in (
                (scale.low, low < scale.low, 180),
                (scale.high, high > scale.high, 0),
            ):
                if exceeds:
                    x = edge if curve.across else position
                    y = position if curve.across else edge
                    turn = angle + 90 if curve.across else angle
                    arrows.append({"x": x, "y": y, "angle": turn, "curve": curve.label})
    return arrows


def _arrow_layer(
    arrows: list[Spec], frame: Mapping[str, Spec], channels: Mapping[str, Spec]
) -> Spec:
    angle = {"field": "angle", "type": "quantitative", "scale": None}
    mark = {"type": "point", "shape": "triangle-up", "size": 60, "filled": False}
    encoding = {**frame, "color": channels["color"], "angle": angle}
    return {"data": {"values": arrows}, "mark": mark, "encoding": encoding}


def _pointer_layer(
    chart: Chart,
    curves: Sequence[Series],
    frame: Mapping[str, Spec],
    channels: Mapping[str, Spec],
) -> Spec:
    """Returns the layer that shows the values of the point nearest to the mouse pointer.

    Pale curves are excluded, because the smooth curve that is drawn over them shows its values.
    """
    rows = [row for curve in curves if curve.kind in ("line", "band") for row in _rows(curve)]
    axes = (("x", chart.x.label), ("y", chart.y.label), ("low", "from"), ("high", "to"))
    has_ends = any("low" in row for row in rows)
    tooltip: list[Spec] = [
        {"field": field, "type": "quantitative", "format": _FORMAT, "title": title or field}
        for field, title in axes[: 4 if has_ends else 2]
    ]
    if any(not curve.label.startswith(_UNNAMED) for curve in curves):
        # Vega-Lite shows the tooltip of the nearest point. In this case it finds only numeric
        # fields of a point by their name, so the curve is taken from the point's description.
        tooltip.insert(0, {"field": "description", "type": "nominal", "title": "curve"})
    opacity = {"condition": {"param": "hover", "empty": False, "value": 1}, "value": 0}
    mark = {"type": "point", "size": 110, "filled": False, "strokeWidth": 2, "clip": True}
    return {
        "params": [_HOVER, _ZOOM],
        "data": {"values": rows},
        "mark": mark,
        "encoding": {
            **frame,
            "color": channels["color"],
            "opacity": opacity,
            "description": {"field": "curve", "type": "nominal"},
            "tooltip": tooltip,
        },
    }


def with_shared_data(spec: Spec) -> Spec:
    """Returns a chart's description in which layers with equal points share one data set."""
    datasets: dict[str, Any] = {}
    names: dict[str, str] = {}
    layers = []
    for layer in spec["layer"]:
        values = layer["data"]["values"]
        name = names.setdefault(json.dumps(values), f"points_{len(names)}")
        datasets[name] = values
        layers.append({**layer, "data": {"name": name}})
    return {**spec, "layer": layers, "datasets": datasets}


def with_packed_data(spec: Spec) -> Spec:
    """Returns the same description with its points as tables, which take less space in a page.

    Each list of points becomes a list of tables, one per curve. A table has the names of the
    `fields`, and `rows` of values. page.js converts the tables back to points.

    Args:
      spec: a description from `with_shared_data`.
    """
    datasets = {name: _tables(points) for name, points in spec["datasets"].items()}
    return {**spec, "datasets": datasets}


def _tables(points: Sequence[Spec]) -> list[Spec]:
    """Returns the points of each curve as a table. The name of the curve is stored once."""
    tables = []
    for (curve, fields), members in itertools.groupby(points, _curve_and_fields):
        table: Spec = {} if curve is None else {"curve": curve}
        table["fields"] = list(fields)
        table["rows"] = [[point[field] for field in fields] for point in members]
        tables.append(table)
    return tables


def _curve_and_fields(point: Spec) -> tuple[str | None, tuple[str, ...]]:
    """Returns the name of a point's curve, or None, and the names of its other fields."""
    return point.get("curve"), tuple(field for field in point if field != "curve")


def bars_spec(bars: Bars, theme: Theme) -> Spec:
    """Returns the Vega-Lite description of stacked bars, without size and title."""
    names = list(dict.fromkeys(name for _, parts in bars.rows for name, _ in parts))
    rows = []
    for label, parts in bars.rows:
        total = sum(value for _, value in parts)
        for name, value in parts:
            share = f"{value / total:.0%}" if total > 0 else ""
            rows.append({"row": label, "part": name, "value": _finite(value), "share": share})
    colours = [ink(name, theme) for _, name in bar_colours(bars)]
    return {
        "data": {"values": rows},
        "mark": "bar",
        "encoding": {
            "y": {"field": "row", "type": "nominal", "sort": None, "title": None},
            "x": {
                "field": "value",
                "type": "quantitative",
                "title": bars.unit,
                "axis": {"tickCount": 5},
            },
            "color": {
                "field": "part",
                "type": "nominal",
                "scale": {"domain": names, "range": colours},
                "legend": None,
            },
            "tooltip": [
                {"field": "part", "type": "nominal", "title": "part"},
                {"field": "value", "type": "quantitative", "format": _FORMAT, "title": bars.unit},
                {"field": "share", "type": "nominal", "title": "share"},
            ],
        },
    }


def bar_colours(bars: Bars) -> list[tuple[str, str]]:
    """Returns the name and the colour of each part of stacked bars."""
    names = dict.fromkeys(name for _, parts in bars.rows for name, _ in parts)
    return [(name, colour(index)) for index, name in enumerate(names, 1)]
