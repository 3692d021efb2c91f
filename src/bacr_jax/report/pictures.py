"""Draws charts into PNG, SVG and PDF files.

`figures` and studies call these functions. vl-convert draws the Vega-Lite descriptions of charts
without a browser and without network access.
"""

import dataclasses
import json
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

from bacr_jax import errors
from bacr_jax.files import write_atomically
from bacr_jax.report import vega
from bacr_jax.report.charts import MISSING, TICK_HEIGHT, Chart, grouped_by_colour
from bacr_jax.report.vega import CurveStyles, Spec, Theme, ink

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
# Width and minimum height of a chart in pixels. PNG files have twice as many pixels.
SIZE = (340, 225)
_SCALE = 2
# Widths in pixels that the layout assumes: of a letter in a caption, of a letter in a legend, and
# of a marker in a legend.
_CAPTION_LETTER = 5.6
_LEGEND_LETTER = 6.6
_LEGEND_MARKER = 40
# Matches the name of a clip path in an SVG file, as in `id="clip7"` and `url(#clip7)`.
_CLIP_NAME = re.compile(r'(?:(?<=id=")|(?<=#))clip\d+')
# Matches consecutive lines of a resource list in a PDF file, such as `/xo13 34 0 R`.
_RESOURCES = re.compile(rb"(?:^ +/[a-z]+\d+ \d+ 0 R\n)+", re.MULTILINE)
# Number of legend columns below a chart that does not share its legend with other charts.
_COLUMNS = 3


def picture(
    title: str,
    rows: Sequence[Sequence[Chart]],
    theme: Theme = "light",
    *,
    legend: int = 0,
    caption: str = "",
    size: tuple[int, int] = SIZE,
) -> Spec:
    """Returns the Vega-Lite description of a picture with several charts.

    Args:
      rows: charts of each row.
      legend: maximum number of columns of a single legend below all charts, which is sorted by
        colour. If 0, a chart has its own legend, unless an earlier chart has the same legend.
      size: width and minimum height of a chart in pixels. The height grows with the number of
        labeled ticks.
    """
    width, least_height = size
    charts = [chart for row in rows for chart in row]
    num_ticks = max((len(chart.y.ticks or ()) for chart in charts), default=0)
    height = max(least_height, TICK_HEIGHT * num_ticks)
    total_width = max(map(len, rows)) * width
    styles = None
    position: Spec | None = None
    if legend:
        curves = [curve for chart in charts for curve in vega.named_curves(chart)]
        styles = CurveStyles.of(grouped_by_colour(curves))
        position = {"orient": "bottom", "columns": _columns(styles, legend, total_width)}
    explained: list[list[tuple[str, str]]] = []
    drawn_rows = []
    for row in rows:
        drawn = []
        for chart in _with_shared_names(row):
            spec = _chart(chart, theme, styles, position or _own_legend(chart, explained, width))
            drawn.append({"width": width, "height": height, **spec})
        drawn_rows.append({"hconcat": drawn, **_sharing(shared=bool(legend))})
    return {
        "$schema": SCHEMA,
        "config": vega.config(theme),
        "title": {**_title(title, caption, total_width), "fontSize": 16, "offset": 14},
        "vconcat": drawn_rows,
        "padding": 12,
        **_sharing(shared=bool(legend)),
    }


def _with_shared_names(row: Sequence[Chart]) -> list[Chart]:
    """Removes the tick labels of a row's y axes that are equal to the labels of the first chart."""
    charts = list(row[:1])
    for chart in row[1:]:
        named = chart.y.ticks
        if named and named == row[0].y.ticks:
            unnamed = [(value, "") for value, _ in named]
            chart = dataclasses.replace(chart, y=dataclasses.replace(chart.y, ticks=unnamed))
        charts.append(chart)
    return charts


def _title(text: str, caption: str, width: int) -> Spec:
    """Returns a title, with its caption wrapped to a width in pixels."""
    title: Spec = {"text": errors.printable(text)}
    if caption:
        lines = textwrap.wrap(errors.printable(caption), int(width / _CAPTION_LETTER))
        title |= {"subtitle": lines, "subtitlePadding": 5}
    return title


def _sharing(*, shared: bool) -> Spec:
    kind = "shared" if shared else "independent"
    channels = ("color", "shape")
    return {"resolve": {"scale": dict.fromkeys(channels, kind)}}


def _columns(styles: CurveStyles, most: int, width: int) -> int:
    """Returns the number of legend columns, at most `most`, that fit into `width` pixels."""
    longest = max(map(len, styles.curves), default=1)
    fitting = int(width / (_LEGEND_MARKER + _LEGEND_LETTER * longest))
    return max(min(most, fitting, len(styles.curves)), 1)


def _own_legend(chart: Chart, explained: list[list[tuple[str, str]]], width: int) -> Spec | None:
    """Returns the legend of a chart, or None if it needs none or an earlier chart has the same one.

    Args:
      explained: names and colours of the curves in each earlier legend. A new legend is added.
    """
    curves = vega.named_curves(chart)
    names = [(curve.label, vega.colour_name(curve)) for curve in curves]
    labels = [series.label for series in chart.drawn if series.label]
    if len(labels) < 2 or names in explained:
        return None
    explained.append(names)
    return {"orient": "bottom", "columns": _columns(CurveStyles.of(curves), _COLUMNS, width)}


def _chart(chart: Chart, theme: Theme, styles: CurveStyles | None, legend: Spec | None) -> Spec:
    """Returns the Vega-Lite description of a chart with its title and note."""
    title = {**_title(chart.title, chart.note, SIZE[0]), "fontSize": 13}
    if chart.note and not chart.title:
        # Vega draws no subtitle below an empty title, so the note is drawn as the title.
        title["text"] = title.pop("subtitle")
        title |= {"color": ink("soft", theme), "fontSize": 11, "fontWeight": "normal"}
    if chart.drawn:
        return {"title": title, **vega.chart_spec(chart, theme, styles=styles, legend=legend)}
    text = {"type": "text", "text": MISSING, "color": ink("soft", theme)}
    return {"title": title, "data": {"values": [{}]}, "mark": text}


def save(spec: Spec, path: Path) -> None:
    """Draws a Vega-Lite description into a .png, .svg or .pdf file.

    Equal descriptions give files with equal bytes.
    """
    # Imported here because only figures need it.
    import vl_convert

    text = json.dumps(spec)
    if path.suffix == ".pdf":
        # The library lists the fonts of a PDF file in random order. Titles are not bold, so that
        # the file has only one font, and equal pictures have equal bytes.
        pdf = vl_convert.vegalite_to_pdf(json.dumps(_in_one_font(spec)))
        write_atomically(path, _sorted_resources(pdf))
    elif path.suffix == ".svg":
        write_atomically(path, _renumbered(vl_convert.vegalite_to_svg(text)))
    else:
        write_atomically(path, vl_convert.vegalite_to_png(text, scale=_SCALE))


def _renumbered(svg: str) -> str:
    """Renumbers the clip paths of an SVG from 0, because Vega continues to count in later calls."""
    names = dict.fromkeys(_CLIP_NAME.findall(svg))
    numbers = {name: f"clip{number}" for number, name in enumerate(names)}
    return _CLIP_NAME.sub(lambda match: numbers[match[0]], svg)


def _in_one_font(spec: Spec) -> Spec:
    """Returns a description without bold titles, so that a PDF file contains only one font."""
    config = spec["config"]
    title = {**config["title"], "fontWeight": "normal"}
    return {**spec, "config": {**config, "title": title}}


def _sorted_resources(pdf: bytes) -> bytes:
    """Sorts the resource lists in a PDF file, because their order is random.

    All offsets in the file stay valid, because the lists keep their lengths.
    """

    def in_order(match: re.Match[bytes]) -> bytes:
        return b"".join(sorted(match[0].splitlines(keepends=True)))

    return _RESOURCES.sub(in_order, pdf)


def dark_path(path: Path) -> Path:
    """Returns the path of a picture's variant for dark pages, such as `accuracy-dark.png`."""
    return path.with_stem(f"{path.stem}-dark")


def save_both(path: Path, title: str, rows: Sequence[Sequence[Chart]]) -> None:
    """Draws a picture for light pages, and its variant for dark pages."""
    save(picture(title, rows), path)
    save(picture(title, rows, "dark"), dark_path(path))


def attempt(
    path: Path, title: str, rows: Callable[..., Sequence[Sequence[Chart]]], *args: object
) -> bool:
    """Draws the charts that `rows(*args)` returns. Returns True on success.

    The charts are drawn into `path` and its variant for dark pages. If drawing fails, a warning is
    printed, because a run must not fail because of its figures.
    """

    def draw() -> None:
        save_both(path, title, rows(*args))

    return errors.attempt(f"{path}: can't be drawn", draw)
