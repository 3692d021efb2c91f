"""Renders charts for pages: the description of a chart, its title, its legend and its note.

page.js draws the descriptions with Vega-Lite, which the page contains. The template escapes every
text. The JSON of a description can't contain the end tag of its HTML element.
"""

import functools
import json
from collections.abc import Sequence

from markupsafe import Markup

from bacr_jax.report import vega
from bacr_jax.report.charts import MISSING, TICK_HEIGHT, Bars, Chart, grouped_by_colour
from bacr_jax.report.html_page import render

# Heights in pixels of a chart, of a wide chart, and of a row and the axis of a bar chart. The width
# follows the page.
_HEIGHT = 220
_WIDE_HEIGHT = 320
_BAR_HEIGHT = 34
# CSS classes by marker. The prefix `marker-` distinguishes them from other classes, such as
# `right`.
_MARKER_CLASSES = {
    "s": "marker-square",
    "o": "marker-circle",
    "^": "marker-up",
    "D": "marker-diamond",
    "v": "marker-down",
    "P": "marker-plus",
    "X": "marker-cross",
    "<": "marker-left",
    ">": "marker-right",
    "*": "marker-star",
}


@functools.cache
def library() -> str:
    """Returns the JavaScript source of Vega-Lite, which is embedded in pages."""
    # Imported here because only pages with charts need it.
    import vl_convert

    # The library contains the string `</script`, which would end the script element of the page.
    bundle = str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))
    return bundle.replace("</script", r"<\/script")


def figure(chart: Chart | Bars, *, wide: bool = False, has_legend: bool = True) -> Markup:
    """Renders a chart with its title and its legend.

    Args:
      wide: True if the chart has the full width of the page.
      has_legend: False to omit the legend, for example because several charts share one.
    """
    if isinstance(chart, Bars):
        return _bars(chart)
    if not chart.drawn:
        return render("chart.html", title=chart.title, note=MISSING)
    height = max(_WIDE_HEIGHT if wide else _HEIGHT, TICK_HEIGHT * len(chart.y.ticks or ()))
    spec = vega.with_shared_data(vega.chart_spec(chart, "page", interactive=True))
    spec = vega.with_packed_data(spec)
    return render(
        "chart.html",
        title=chart.title,
        note=chart.note,
        wide=wide,
        legend=legend([chart]) if has_legend else [],
        height=height,
        spec=embedded({"width": "container", "height": height, **spec}),
    )


def legend(charts: Sequence[Chart]) -> list[tuple[str, str]]:
    """Returns the (style, name) pairs of a legend that several charts share, sorted by colour.

    A style consists of the CSS classes of the curve's colour and of its marker, if any.
    """
    entries = list[tuple[str, str]]()
    for curve in grouped_by_colour([curve for chart in charts for curve in chart.drawn]):
        style = vega.colour_name(curve)
        if curve.marker:
            style += f" marked {_MARKER_CLASSES[curve.marker]}"
        if curve.label:
            entries.append((style, curve.label))
    return list(dict.fromkeys(entries))


def _bars(bars: Bars) -> Markup:
    sums = [sum(value for _, value in parts) for _, parts in bars.rows]
    if not max(sums, default=0.0) > 0:
        return render("chart.html", title=bars.title, note=MISSING)
    height = _BAR_HEIGHT * len(bars.rows)
    spec = vega.bars_spec(bars, "page")
    return render(
        "chart.html",
        title=bars.title,
        note=bars.note,
        wide=False,
        legend=[(style, name) for name, style in vega.bar_colours(bars)],
        height=height,
        spec=embedded({"width": "container", "height": height, **spec}),
    )


def embedded(spec: vega.Spec) -> Markup:
    """Returns a description as JSON that can be embedded in a script element."""
    sizing = {"type": "fit-x", "contains": "padding"}
    content = {"config": {**vega.config("page"), "autosize": sizing}, **spec}
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c"))
