"""Pages draw numbers where they belong, and texts are only texts."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bacr_jax.report.charts import Axis, Bars, Chart, Series
from bacr_jax.report.svg import figure
from report_world import HOSTILE


def chart(*args, **kwargs):
    return figure(Chart(*args, **kwargs))


def points(svg):
    return [(float(x), float(y)) for x, y in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', svg)]


def test_doublings_are_equally_far_apart():
    series = Series("a", [64, 128, 256], [0.0, 50.0, 100.0], "s1", marker="o")
    (x1, y1), (x2, y2), (x3, y3) = points(chart("t", [series], Axis("x", log2=True), Axis("y")))
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2) and x2 - x1 > 100
    assert y1 - y2 == pytest.approx(y2 - y3, abs=0.2) and y1 > y2


def test_what_is_no_number_is_a_gap():
    series = Series("a", [1, 2, 3, 4, 5], [1.0, 2.0, math.nan, math.inf, 3.0], "s1")
    found = chart("t", [series], Axis("x"), Axis("y"))
    # One stretch of two points, and a point that stands alone.
    assert found.count('class="curve"') == 1 and "nan" not in found and "inf" not in found
    assert len(points(found)) == 3


def test_bars_reach_from_end_to_end():
    series = Series("a", [1, 2], [1.0, 2.0], "s1", [(0.0, 2.0), (1.0, 4.0)])
    found = chart("t", [series], Axis("x"), Axis("y", low=0.0, high=4.0))
    bars = re.findall(r'class="bar" d="M[\d.]+ ([\d.]+)L[\d.]+ ([\d.]+)"', found)
    (low, high), (_, top) = [tuple(map(float, bar)) for bar in bars]
    assert low - high == pytest.approx((low - top) / 2)


def test_no_text_is_markup():
    series = [Series(HOSTILE, [1, 2], [1.0, 2.0], "s1", marker="o"), Series("b", [1], [1], "s2")]
    axis = Axis(HOSTILE, ticks=[(1, HOSTILE)])
    found = chart(HOSTILE, series, axis, axis, note=HOSTILE)
    found += figure(Bars(HOSTILE, [(HOSTILE, [(HOSTILE, 1.0)])], HOSTILE, note=HOSTILE))
    assert "<script" not in found and found.count("&lt;script&gt;") > 8


def test_nothing_to_draw_is_said():
    empty = Series("a", [1.0], [math.nan], "s1")
    for series in ([], [empty]):
        assert "not recorded" in chart("t", series, Axis("x"), Axis("y"))
    assert "not recorded" in figure(Bars("t", [], "s"))


def test_parts_of_a_bar_are_as_wide_as_their_share():
    found = figure(Bars("t", [("run", [("plan", 1.0), ("learn", 3.0)])], "s"))
    narrow, wide = [float(w) for w in re.findall(r'width="([\d.]+)"', found)]
    assert wide == pytest.approx(3 * narrow, abs=0.1) and "learn: 3 s (75%)" in found


@given(st.lists(st.floats(-1e12, 1e12), min_size=1, max_size=900), st.booleans())
def test_any_numbers_make_a_chart_inside_its_frame(values, log2):
    places = list(range(1, len(values) + 1))
    series = Series("a", places, values, "s1", marker="o")
    found = points(chart("t", [series], Axis("x", log2=log2), Axis("y")))
    assert found and all(60 <= x <= 420 and 0 <= y <= 250 for x, y in found)
    # No more points than a screen shows.
    assert len(found) <= 402
