"""Charts for files, drawn by Matplotlib from the descriptions that pages draw as SVG."""

import io
import math
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bacr_jax import errors
from bacr_jax.documents import write_atomically
from bacr_jax.report.charts import COLOURS, MISSING, Axis, Chart, Scale, Series

# Shades from easy to hard, or early to late: one colour, so that their order shows.
_ORDERED = "viridis"
_FIRST = 0.05
_LAST = 0.85
_DPI = 150
# Empty space beyond the ends of an axis, as a share of it.
_MARGIN = 0.025
# Of a curve with more points than twice this, so many have a marker.
_MARKED = 6
# Steps between the ticks of a linear axis, whose names are smaller than on a page.
_STEPS = 8.0
# Characters of a note below a chart, a line.
_WRAPPED = 60
_ARROWS = "open arrows: points or intervals beyond the axis"
_MARKS: dict[str, dict[str, Any]] = {
    "line": {"color": "0.4", "linewidth": 1.0},
    "grid": {"color": "0.85", "linewidth": 0.8},
    "broad": {"color": "0.85", "linewidth": 5.0},
    "dotted": {"color": "0.4", "linewidth": 1.0, "linestyle": ":"},
}


def figure(
    title: str,
    rows: Sequence[Sequence[Chart]],
    *,
    legend: int = 0,
    caption: str = "",
    size: tuple[float, float] = (4.6, 3.5),
) -> Any:
    """A Matplotlib figure; nothing global, so it can be drawn anywhere.

    Args:
      rows: charts, fewer in a row that they don't fill; those of a row that have the same vertical
        axis name it once.
      legend: columns of one legend below charts and caption; 0: in the first chart of these curves.
      size: of a chart in inches, more where many rows have names.
    """
    # Matplotlib takes a while to import; only pictures need it.
    from matplotlib.figure import Figure

    names = max(len(chart.y.ticks or ()) for charts in rows for chart in charts)
    inches = size[0] * len(rows[0]), max(size[1], 0.22 * names + 0.9) * len(rows) + 0.3
    picture = Figure(figsize=inches, layout="constrained", dpi=_DPI)
    axes = picture.subplots(len(rows), len(rows[0]), squeeze=False)
    shown = list[Any]()
    for row, charts in zip(axes, rows):
        for axis in row[len(charts) :]:
            axis.set_axis_off()
        for axis, chart, before in zip(row, charts, [None, *charts]):
            _draw(axis, chart, None if before is None else before.y)
            curves = [(one.label, one.colour) for one in chart.drawn if one.label]
            # The same curves in another panel are known by then.
            if legend == 0 and len(curves) > 1 and curves not in shown:
                axis.legend(frameon=False, fontsize=8, loc="best")
                shown.append(curves)
    picture.suptitle(_plain(title), x=0.01, ha="left", fontsize=12)
    if legend:
        _legend(picture, list(axes.flat), legend, caption)
    return picture


def save(picture: Any, path: Path) -> None:
    """Writes a figure as .png or .pdf; equal pictures are equal files, without version and date."""
    import matplotlib

    content = io.BytesIO()
    if path.suffix == ".pdf":
        # Fonts that journals take (TrueType) instead of Matplotlib's Type 3.
        with matplotlib.rc_context({"pdf.fonttype": 42}):
            dates = {"CreationDate": None, "Producer": None, "Creator": None}
            picture.savefig(content, format="pdf", metadata=dates)
    else:
        picture.savefig(content, format="png", metadata={"Software": None})
    write_atomically(path, content.getvalue())


def attempt(
    path: Path, title: str, rows: Callable[..., Sequence[Sequence[Chart]]], *args: Any
) -> bool:
    """Draws a picture; one that fails is a warning, since results must not depend on pictures."""
    return errors.attempt(f"{path}: can't be drawn", lambda: save(figure(title, rows(*args)), path))


def _plain(text: str) -> str:
    """A text as it is, which Matplotlib would read as mathematics between dollars.

    Labels that begin with an underscore it leaves out.
    """
    shown = errors.printable(text).replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def _colour(one: Series) -> Any:
    import matplotlib

    if isinstance(one.colour, str):
        return COLOURS[int(one.colour.removeprefix("s"))]
    return matplotlib.colormaps[_ORDERED](_FIRST + one.colour * (_LAST - _FIRST))


def _legend(picture: Any, axes: Sequence[Any], columns: int, caption: str) -> None:
    """A caption and one legend below all panels, of every name that any of them has."""
    found: dict[str, Any] = {}
    for axis in axes:
        for handle, name in zip(*axis.get_legend_handles_labels()):
            found.setdefault(name, handle)
    lines = textwrap.wrap(caption, int(picture.get_figwidth() / 0.064))
    if found or lines:
        # A letter is about .075 inches wide, and what stands before a name half an inch.
        fit = int(picture.get_figwidth() / (0.5 + 0.075 * max(map(len, found), default=1)))
        columns = max(min(columns, len(found), fit), 1)
        more = 0.2 * -(-len(found) // columns) + 0.17 * len(lines)
        picture.set_figheight(picture.get_figheight() + more)
        style = {"loc": "outside lower left", "ncols": columns, "frameon": False, "fontsize": 8.5}
        title = "\n".join(map(_plain, lines))
        style |= {"title": title, "title_fontsize": 8.5, "alignment": "left"}
        picture.legend(found.values(), found.keys(), **style)


def _draw(axis: Any, chart: Chart, beside: Axis | None) -> None:
    """A chart; what its vertical axis shares with the one beside it is not said again."""
    axis.set_title(_plain(chart.title), loc="left", fontsize=10)
    if not chart.drawn:
        axis.text(0.5, 0.5, MISSING, ha="center", color="0.5", transform=axis.transAxes)
        axis.set_axis_off()
        return
    axis.grid(color="0.92", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color("0.6")
    axis.tick_params(color="0.6", labelsize=9)
    across, up = chart.scales()
    for mark in chart.marks:
        draw = axis.axvline if mark.axis == "x" else axis.axhline
        draw(mark.at, zorder=0.9, **_MARKS[mark.kind])
    if chart.diagonal:
        ends = max(across.low, up.low), min(across.high, up.high)
        axis.plot(ends, ends, color="0.75", linewidth=1, linestyle="--", zorder=0.5)
    for one in chart.drawn:
        _curve(axis, one)
    beyond = sum(_goes_on(axis, one, across if one.across else up) for one in chart.drawn)
    _scale(axis, "x", across)
    same_names = beside is not None and beside.ticks is not None and beside.ticks == chart.y.ticks
    _scale(axis, "y", up, named=not same_names)
    lines = [chart.x.label, *textwrap.wrap(chart.note, _WRAPPED), *[_ARROWS] * (beyond > 0)]
    axis.set_xlabel("\n".join(map(_plain, lines)), fontsize=9.5)
    if beside is None or beside.label != chart.y.label:
        axis.set_ylabel(_plain(chart.y.label), fontsize=9.5)


def _scale(axis: Any, name: str, scale: Scale, *, named: bool = True) -> None:
    ticks = scale.ticks(most=_STEPS)

    def set_property(what: str, *args: Any, **options: Any) -> None:
        getattr(axis, f"set_{name}{what}")(*args, **options)

    if scale.axis.log2:
        set_property("scale", "log", base=2)
        room = (scale.high / scale.low) ** _MARGIN
        set_property("lim", scale.low / room, scale.high * room)
        axis.minorticks_off()
    else:
        room = _MARGIN * (scale.high - scale.low)
        set_property("lim", scale.low - room, scale.high + room)
    names = [_plain(text) if named else "" for _, text in ticks]
    set_property("ticks", [value for value, _ in ticks], names)


def _goes_on(axis: Any, one: Series, scale: Scale) -> bool:
    """Draws open arrows where points or intervals leave their axis; True if any does."""
    found = list[tuple[float, float, str]]()
    ends = () if one.ends is None or one.kind == "band" else one.ends
    for at, (low, high) in zip(one.y if one.across else one.x, ends):
        found += [(at, scale.low, "v<")] if low < scale.low else []
        found += [(at, scale.high, "^>")] if high > scale.high else []
    for at, edge, arrows in found:
        x, y = (edge, at) if one.across else (at, edge)
        axis.plot(x, y, arrows[one.across], color=_colour(one), markerfacecolor="white")
    return bool(found)


def _curve(axis: Any, one: Series) -> None:
    """A curve with its ends and points; a gap where a value is not finite."""
    colour, x = _colour(one), np.array(one.x, float)
    y = np.where(np.isfinite(np.array(one.y, float)), np.array(one.y, float), math.nan)
    label = _plain(one.label) if one.label else None
    style: dict[str, Any] = {"color": colour, "label": label, "linestyle": one.line or "none"}
    style["linewidth"] = {"faint": 0.8, "broad": 7.0}.get(one.kind, 1.5)
    if one.kind in ("faint", "broad"):
        style |= {"alpha": 0.25, "zorder": 0.8, "solid_capstyle": "round"}
    # A point that stands alone is no line.
    shown = one.marker or ("o" if np.isfinite(y).sum() == 1 else "")
    if shown:
        style |= {"marker": shown, "markersize": 4.5}
        style |= {"markerfacecolor": "white"} if one.hollow else {}
    if one.ends is None or one.kind == "band":
        every = max(len(x) // _MARKED, 1) if one.line and len(x) > 2 * _MARKED else 1
        axis.plot(x, y, markevery=every if shown else None, **style)
        if one.ends is not None:
            low, high = np.array(one.ends, float).reshape(-1, 2).T
            axis.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        return
    low, high = np.array(one.ends, float).reshape(-1, 2).T
    middle = x if one.across else y
    error = np.maximum([middle - low, high - middle], 0.0)
    style |= {"xerr" if one.across else "yerr": error}
    axis.errorbar(x, y, elinewidth=0.9, capsize=2, **style)
