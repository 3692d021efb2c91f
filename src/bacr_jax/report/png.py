"""Draws charts as PNG or PDF files with Matplotlib, from the same descriptions as `svg`."""

import io
import math
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bacr_jax import errors
from bacr_jax.files import write_atomically
from bacr_jax.report.charts import COLOURS, MISSING, Axis, Chart, Scale, Series

# Matplotlib's colour map of ordered curves (easy to hard, early to late). A single map is used so
# that readers see the order. First and last are the ends of the part of the map that is used.
_ORDERED = "viridis"
_FIRST = 0.05
_LAST = 0.85
_DPI = 150
# Empty space beyond each end of an axis, as a share of the axis.
_MARGIN = 0.025
# A curve with more than twice this number of points has about this number of markers.
_MARKED = 6
# Maximum number of steps between the ticks of a linear axis. Pages have fewer, because their tick
# labels are larger.
_STEPS = 8.0
# Maximum number of characters per line of the note below a chart.
_WRAPPED = 60
# Width of a letter in inches, in the caption and in a legend, and of the line before a legend name.
_CAPTION_LETTER = 0.064
_LEGEND_LETTER = 0.075
_LEGEND_HANDLE = 0.5
# Height of a line in inches.
_CAPTION_LINE = 0.17
_LEGEND_LINE = 0.2
_TICK_LABEL = 0.22
_ARROWS = "open arrows: points or intervals beyond the axis"
_MARKS: dict[str, dict[str, Any]] = {
    "line": {"color": "0.4", "linewidth": 1.0},
    "grid": {"color": "0.85", "linewidth": 0.8},
    "broad": {"color": "0.85", "linewidth": 5.0},
    "dotted": {"color": "0.4", "linewidth": 1.0, "linestyle": ":"},
}
_LINE_WIDTHS = {"faint": 0.8, "broad": 7.0}


def figure(
    title: str,
    rows: Sequence[Sequence[Chart]],
    *,
    legend: int = 0,
    caption: str = "",
    size: tuple[float, float] = (4.6, 3.5),
) -> Any:
    """Draws charts into a new Matplotlib figure, without Matplotlib's global state.

    Args:
      rows: charts, row by row; a row can have fewer charts than the first. Neighbours with the same
        vertical axis share one label.
      legend: number of columns of one legend below the charts and the caption. If 0, the first
        chart of each set of curves has a legend.
      size: width and height of a chart in inches; the height grows with the number of named ticks.
    """
    # Imported here because Matplotlib's import is slow and only figures need it.
    from matplotlib.figure import Figure

    num_ticks = max(len(chart.y.ticks or ()) for charts in rows for chart in charts)
    width, least_height = size
    height = max(least_height, _TICK_LABEL * num_ticks + 0.9)
    inches = (width * len(rows[0]), height * len(rows) + 0.3)
    picture = Figure(figsize=inches, layout="constrained", dpi=_DPI)
    axes = picture.subplots(len(rows), len(rows[0]), squeeze=False)
    explained_curves = list[Any]()
    for row, charts in zip(axes, rows):
        for axis in row[len(charts) :]:
            axis.set_axis_off()
        left_axis: Axis | None = None
        for axis, chart in zip(row, charts):
            _draw_chart(axis, chart, left_axis)
            left_axis = chart.y
            curves = [(series.label, series.colour) for series in chart.drawn if series.label]
            # A later panel with the same curves needs no second legend.
            if legend == 0 and len(curves) > 1 and curves not in explained_curves:
                axis.legend(frameon=False, fontsize=8, loc="best")
                explained_curves.append(curves)
    picture.suptitle(_escaped(title), x=0.01, ha="left", fontsize=12)
    if legend:
        _add_legend(picture, list(axes.flat), legend, caption)
    return picture


def save(picture: Any, path: Path) -> None:
    """Writes a figure as .png or .pdf.

    Version and date are left out of the file, so equal figures have equal bytes.
    """
    import matplotlib

    content = io.BytesIO()
    if path.suffix == ".pdf":
        # Journals accept TrueType fonts (42), but not always Matplotlib's default, Type 3.
        with matplotlib.rc_context({"pdf.fonttype": 42}):
            dates = {"CreationDate": None, "Producer": None, "Creator": None}
            picture.savefig(content, format="pdf", metadata=dates)
    else:
        picture.savefig(content, format="png", metadata={"Software": None})
    write_atomically(path, content.getvalue())


def attempt(
    path: Path, title: str, rows: Callable[..., Sequence[Sequence[Chart]]], *args: Any
) -> bool:
    """Draws `rows(*args)` into a file; returns True if it succeeds.

    A failure is only a warning, because the results of a run must not depend on its figures.
    """

    def draw() -> None:
        save(figure(title, rows(*args)), path)

    return errors.attempt(f"{path}: can't be drawn", draw)


def _escaped(text: str) -> str:
    """Escapes a text for Matplotlib, which reads text between dollar signs as mathematics.

    A leading blank is added before an underscore, because Matplotlib leaves labels that begin with
    an underscore out of the legend.
    """
    text = errors.printable(text).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def _colour(series: Series) -> Any:
    import matplotlib

    if isinstance(series.colour, str):
        return COLOURS[int(series.colour.removeprefix("s"))]
    position = _FIRST + series.colour * (_LAST - _FIRST)
    return matplotlib.colormaps[_ORDERED](position)


def _add_legend(picture: Any, axes: Sequence[Any], columns: int, caption: str) -> None:
    """Adds a caption and one legend with the curves of all panels below the panels."""
    handles: dict[str, Any] = {}
    for axis in axes:
        for handle, name in zip(*axis.get_legend_handles_labels()):
            handles.setdefault(name, handle)
    width = picture.get_figwidth()
    lines = textwrap.wrap(caption, int(width / _CAPTION_LETTER))
    if not handles and not lines:
        return
    longest_name = max(map(len, handles), default=1)
    max_columns = int(width / (_LEGEND_HANDLE + _LEGEND_LETTER * longest_name))
    columns = max(min(columns, len(handles), max_columns), 1)
    num_rows = -(-len(handles) // columns)
    added_height = _LEGEND_LINE * num_rows + _CAPTION_LINE * len(lines)
    picture.set_figheight(picture.get_figheight() + added_height)
    picture.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower left",
        ncols=columns,
        frameon=False,
        fontsize=8.5,
        title="\n".join(map(_escaped, lines)),
        title_fontsize=8.5,
        alignment="left",
    )


def _draw_chart(axis: Any, chart: Chart, left_axis: Axis | None) -> None:
    """Draws a chart into a Matplotlib axis.

    Args:
      left_axis: vertical axis of the chart to the left, if there is one. Its label and its tick
        labels are not repeated if they are the same.
    """
    axis.set_title(_escaped(chart.title), loc="left", fontsize=10)
    if not chart.drawn:
        axis.text(0.5, 0.5, MISSING, ha="center", color="0.5", transform=axis.transAxes)
        axis.set_axis_off()
        return
    axis.grid(color="0.92", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color("0.6")
    axis.tick_params(color="0.6", labelsize=9)
    x_scale, y_scale = chart.scales()
    for mark in chart.marks:
        draw = axis.axvline if mark.axis == "x" else axis.axhline
        draw(mark.at, zorder=0.9, **_MARKS[mark.kind])
    if chart.diagonal:
        low = max(x_scale.low, y_scale.low)
        high = min(x_scale.high, y_scale.high)
        ends = (low, high)
        axis.plot(ends, ends, color="0.75", linewidth=1, linestyle="--", zorder=0.5)
    for series in chart.drawn:
        _draw_curve(axis, series)
    num_arrows = 0
    for series in chart.drawn:
        scale = x_scale if series.across else y_scale
        num_arrows += _draw_arrows(axis, series, scale)
    _set_scale(axis, "x", x_scale)
    left_ticks = None if left_axis is None else left_axis.ticks
    repeats_names = left_ticks is not None and left_ticks == chart.y.ticks
    _set_scale(axis, "y", y_scale, show_names=not repeats_names)
    lines = [chart.x.label, *textwrap.wrap(chart.note, _WRAPPED)]
    if num_arrows:
        lines.append(_ARROWS)
    axis.set_xlabel("\n".join(map(_escaped, lines)), fontsize=9.5)
    if left_axis is None or left_axis.label != chart.y.label:
        axis.set_ylabel(_escaped(chart.y.label), fontsize=9.5)


def _set_scale(axis: Any, name: str, scale: Scale, *, show_names: bool = True) -> None:
    """Sets scale, limits and ticks of the axis `name` (`x` or `y`)."""

    def set_property(suffix: str, *args: Any, **options: Any) -> None:
        setter = getattr(axis, f"set_{name}{suffix}")
        setter(*args, **options)

    if scale.axis.log2:
        set_property("scale", "log", base=2)
        margin = (scale.high / scale.low) ** _MARGIN
        set_property("lim", scale.low / margin, scale.high * margin)
        axis.minorticks_off()
    else:
        margin = _MARGIN * (scale.high - scale.low)
        set_property("lim", scale.low - margin, scale.high + margin)
    ticks = scale.ticks(most=_STEPS)
    names = [_escaped(text) if show_names else "" for _, text in ticks]
    set_property("ticks", [value for value, _ in ticks], names)


def _draw_arrows(axis: Any, series: Series, scale: Scale) -> int:
    """Draws open arrows where intervals exceed their axis; returns the number of arrows."""
    if series.ends is None or series.kind == "band":
        return 0
    # Position along the curve, edge of the axis, and markers of a vertical and a horizontal arrow.
    arrows = list[tuple[float, float, str]]()
    positions = series.y if series.across else series.x
    for position, (low, high) in zip(positions, series.ends):
        if low < scale.low:
            arrows.append((position, scale.low, "v<"))
        if high > scale.high:
            arrows.append((position, scale.high, "^>"))
    for position, edge, markers in arrows:
        x, y = (edge, position) if series.across else (position, edge)
        axis.plot(
            x,
            y,
            markers[series.across],
            color=_colour(series),
            markerfacecolor="white",
        )
    return len(arrows)


def _draw_curve(axis: Any, series: Series) -> None:
    """Draws a curve with its intervals and points; values that are not finite leave a gap."""
    x = np.array(series.x, float)
    values = np.array(series.y, float)
    y = np.where(np.isfinite(values), values, math.nan)
    colour = _colour(series)
    style: dict[str, Any] = {
        "color": colour,
        "label": _escaped(series.label) if series.label else None,
        "linestyle": series.line or "none",
        "linewidth": _LINE_WIDTHS.get(series.kind, 1.5),
    }
    if series.kind in ("faint", "broad"):
        style |= {"alpha": 0.25, "zorder": 0.8, "solid_capstyle": "round"}
    marker = series.marker
    # A single point is not visible as a line.
    if not marker and np.isfinite(y).sum() == 1:
        marker = "o"
    if marker:
        style |= {"marker": marker, "markersize": 4.5}
        if series.hollow:
            style["markerfacecolor"] = "white"
    if series.ends is None or series.kind == "band":
        if marker:
            has_few_markers = series.line and len(x) > 2 * _MARKED
            style["markevery"] = max(len(x) // _MARKED, 1) if has_few_markers else 1
        axis.plot(x, y, **style)
    if series.ends is None:
        return
    low, high = np.array(series.ends, float).reshape(-1, 2).T
    if series.kind == "band":
        axis.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        return
    middle = x if series.across else y
    error = np.maximum([middle - low, high - middle], 0.0)
    style["xerr" if series.across else "yerr"] = error
    axis.errorbar(x, y, elinewidth=0.9, capsize=2, **style)
