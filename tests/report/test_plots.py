"""Pages contain descriptions of charts that no text of a model can leave."""

import json
import math
import re

from bacr_jax.report.charts import MARKERS, Axis, Bars, Chart, Series
from bacr_jax.report.curve_styles import STAR
from bacr_jax.report.html_page import STYLE
from bacr_jax.report.plots import figure, legend
from report_world import HOSTILE


def spec_of(html):
    (text,) = re.findall(r'<script type="application/json">(.*?)</script>', html)
    return json.loads(text)


def test_no_text_is_markup():
    series = [Series(HOSTILE, [1, 2], [1.0, 2.0], "s1", marker="o"), Series("b", [1], [1], "s2")]
    axis = Axis(HOSTILE, ticks=[(1, HOSTILE)])
    html = figure(Chart(HOSTILE, series, axis, axis, note=HOSTILE))
    html += figure(Bars(HOSTILE, [(HOSTILE, [(HOSTILE, 1.0)])], HOSTILE, note=HOSTILE))
    assert html.count("<script") == html.count('<script type="application/json">') == 2
    assert html.count("</script>") == 2 and html.count("&lt;script&gt;") >= 6


def test_a_description_contains_hostile_text_as_it_is():
    html = figure(Chart("t", [Series(HOSTILE, [1, 2], [1.0, 2.0], "s1")], Axis("x"), Axis("y")))
    (table,) = spec_of(html)["datasets"]["points_0"]
    assert table["curve"] == HOSTILE


def test_a_chart_without_values_names_the_reason():
    empty = Series("a", [1.0], [math.nan], "s1")
    for series in ([], [empty]):
        assert "not recorded" in figure(Chart("t", series, Axis("x"), Axis("y")))
    assert "not recorded" in figure(Bars("t", [], "s"))


def test_a_wide_chart_spans_the_page_and_is_higher():
    chart = Chart("t", [Series("a", [1, 2], [1.0, 2.0], "s1")], Axis("x"), Axis("y"))
    narrow, wide = figure(chart), figure(chart, wide=True)
    assert 'class="chart across"' in wide and "across" not in narrow
    assert spec_of(wide)["height"] > spec_of(narrow)["height"]


def test_a_legend_names_each_curve_once_and_marks_the_recommended_method():
    star = Series("best", [1, 2], [1.0, 2.0], "s1", marker="*")
    other = Series("b", [1, 2], [1.0, 2.0], "s2", marker="o")
    charts = [Chart("t", [star, other], Axis("x"), Axis("y"))] * 2
    assert legend(charts) == [("s1 marked marker-star", "best"), ("s2 marked marker-circle", "b")]
    assert "<ul" not in figure(charts[0], has_legend=False)


def test_a_legend_has_curves_of_one_colour_in_sequence():
    colours = {"a": "s1", "b": "s2", "c": "s1"}
    curves = [Series(name, [1, 2], [1.0, 2.0], colour) for name, colour in colours.items()]
    assert [name for _, name in legend([Chart("t", curves, Axis("x"), Axis("y"))])] == [
        "a",
        "c",
        "b",
    ]


def test_each_marker_has_a_class_of_the_style_sheet():
    for shape in (*MARKERS, STAR):
        curve = Series("a", [1, 2], [1.0, 2.0], "s1", marker=shape)
        ((style, _),) = legend([Chart("t", [curve], Axis("x"), Axis("y"))])
        colour, marked, name = style.split()
        assert (colour, marked) == ("s1", "marked")
        rules = re.findall(rf"\.{name}\b[^,{{]*", STYLE)
        assert [rule.strip() for rule in rules] == [f".{name} .key::before"]
