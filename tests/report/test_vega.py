"""Descriptions of charts contain the numbers of the curves, and texts are only texts."""

import json
import math

import pytest
import vl_convert
from hypothesis import given
from hypothesis import strategies as st

from bacr_jax.report import vega
from bacr_jax.report.charts import COLOURS, Axis, Bars, Chart, Mark, Series
from bacr_jax.report.vega import bars_spec, chart_spec, with_packed_data, with_shared_data

X, Y = Axis("x"), Axis("y")


def layers(spec, kind):
    """Layers with a mark, such as `line`."""
    return [layer for layer in spec["layer"] if layer["mark"]["type"] == kind]


def values(layer):
    return [(row["x"], row["y"]) for row in layer["data"]["values"]]


def scene(spec, kind):
    """Marks of a kind with their positions in pixels, as Vega draws them."""
    sized = {"width": 400, "height": 200, **spec}
    drawn = json.loads(json.dumps(vl_convert.vegalite_to_scenegraph(json.dumps(sized))))
    marks = []

    def visit(node):
        if node.get("marktype") == kind and node.get("name", "").startswith("layer"):
            marks.append(node["items"])
        for child in node.get("items", ()):
            if isinstance(child, dict):
                visit(child)

    visit(drawn["scenegraph"])
    return marks


def test_doublings_are_equally_far_apart():
    series = Series("a", [64, 128, 256], [0.0, 50.0, 100.0], "s1", marker="o")
    ((one, two, three),) = scene(
        chart_spec(Chart("t", [series], Axis("x", log2=True), Y), "light"), "symbol"
    )
    assert two["x"] - one["x"] == pytest.approx(three["x"] - two["x"]) and two["x"] - one["x"] > 100
    assert one["y"] - two["y"] == pytest.approx(two["y"] - three["y"]) and one["y"] > two["y"]


def test_a_value_that_is_not_finite_is_a_gap():
    series = Series("a", [1, 2, 3, 4, 5], [1.0, 2.0, math.nan, math.inf, 3.0], "s1")
    spec = chart_spec(Chart("t", [series], X, Y), "light")
    (line,), (points,) = layers(spec, "line"), layers(spec, "point")
    assert values(line) == [(1, 1), (2, 2), (3, None), (4, None), (5, 3)]
    # A point between two gaps is not visible as a line.
    assert values(points) == [(5, 3)]
    json.dumps(spec, allow_nan=False)


def test_intervals_reach_from_end_to_end_along_their_axis():
    ends = [(0.0, 2.0), (1.0, 4.0)]
    for across, channel in ((False, "y"), (True, "x")):
        series = Series("a", [1, 2], [1.0, 2.0], "s1", ends, across=across)
        (rule,) = layers(chart_spec(Chart("t", [series], X, Y), "light"), "rule")
        assert [(row["low"], row["high"]) for row in rule["data"]["values"]] == ends
        assert rule["encoding"][channel]["field"] == "low"
        assert rule["encoding"][f"{channel}2"]["field"] == "high"
    band = Series("a", [1, 2], [1.0, 2.0], "s1", ends, kind="band")
    spec = chart_spec(Chart("t", [band], X, Y), "light")
    assert len(layers(spec, "area")) == 1 and not layers(spec, "rule")


def test_a_line_joins_its_points_in_their_order():
    series = Series("a", [2, 1, 3], [1.0, 2.0, 3.0], "s1")
    spec = chart_spec(Chart("t", [series], X, Y), "light")
    (line,) = scene(spec, "line")
    assert [point["y"] for point in line] == sorted((p["y"] for p in line), reverse=True)


def test_ticks_have_the_names_of_their_values():
    axis = Axis("x", log2=True, ticks=[(4.0, "0"), (8.0, "8"), (16.0, "no limit")])
    series = Series("a", [4, 8, 16], [1.0, 2.0, 3.0], "s1")
    spec = chart_spec(Chart("t", [series], axis, Y), "light")
    svg = vl_convert.vegalite_to_svg(json.dumps({"width": 400, **spec}))
    assert all(f">{name}</text>" in svg for name in ("0", "8", "no limit"))


def test_what_lies_beyond_an_axis_has_an_open_arrow_and_a_word_about_it():
    ends = [(-3.0, 2.0), (0.5, 1.5), (0.0, 9.0)]
    series = Series("a", [1.0, 2.0, 3.0], [1.0, 1.0, 1.0], "s1", ends)
    bounded = chart_spec(Chart("c", [series], X, Axis("y", low=0.0, high=5.0)), "light")
    arrows = bounded["layer"][-1]["data"]["values"]
    assert [(row["x"], row["y"], row["angle"]) for row in arrows] == [(1, 0, 180), (3, 5, 0)]
    assert bounded["layer"][0]["encoding"]["x"]["title"] == ["x", vega.ARROWS]
    whole = chart_spec(Chart("c", [series], X, Y), "light")
    assert whole["layer"][0]["encoding"]["x"]["title"] == "x"


def test_marks_and_the_diagonal_are_behind_the_curves():
    series = Series("a", [1, 2], [1.0, 2.0], "s1")
    marks = [Mark("y", 1.5), Mark("x", 1.0, "broad")]
    spec = chart_spec(Chart("t", [series], X, Y, diagonal=True, marks=marks), "light")
    first, second, diagonal, curve = spec["layer"]
    assert first["data"]["values"] == [{"y": 1.5}] and second["data"]["values"] == [{"x": 1.0}]
    assert values(diagonal) == [(1, 1), (2, 2)] and values(curve) == [(1, 1), (2, 2)]


def test_a_pale_curve_has_the_colour_of_the_curve_over_it_and_no_values():
    pale = Series("", [1, 2, 3], [1.0, 9.0, 1.0], "s1", kind="faint")
    smooth = Series("mean", [1, 2, 3], [2.0, 3.0, 2.0], "s1")
    spec = chart_spec(Chart("t", [pale, smooth], X, Y), "light", interactive=True)
    colour = layers(spec, "line")[0]["encoding"]["color"]["scale"]
    assert colour == {"domain": ["mean"], "range": [COLOURS["s1"][0]]}
    assert values(spec["layer"][-1]) == [(1, 2), (2, 3), (3, 2)]


def test_the_pointer_gets_the_values_and_a_chart_can_be_zoomed():
    series = Series("a", [1, 2], [1.0, 2.0], "s1", [(0.0, 2.0), (1.0, 4.0)])
    chart = Chart("t", [series], Axis("budget"), Axis("accuracy (%)"))
    pointer = chart_spec(chart, "page", interactive=True)["layer"][-1]
    titles = [entry["title"] for entry in pointer["encoding"]["tooltip"]]
    assert titles == ["curve", "budget", "accuracy (%)", "from", "to"]
    assert {param["name"] for param in pointer["params"]} == {"hover", "zoom"}
    assert all("params" not in layer for layer in chart_spec(chart, "light")["layer"])


def test_themes_differ_in_colours_only():
    series = Series("a", [1, 2], [1.0, 2.0], "s2", marker="o", hollow=True)
    chart = Chart("t", [series], X, Y, diagonal=True)
    page = light = dark = json.dumps(chart_spec(chart, "page"))
    for name, (light_colour, dark_colour) in {**COLOURS, **vega.INK}.items():
        light = light.replace(f"var(--{name})", light_colour)
        dark = dark.replace(f"var(--{name})", dark_colour)
    assert json.loads(light) == chart_spec(chart, "light") != json.loads(page)
    assert json.loads(dark) == chart_spec(chart, "dark")


def test_layers_with_the_same_points_share_their_data():
    series = Series("a", [1, 2], [1.0, 2.0], "s1", [(0.0, 2.0), (1.0, 4.0)], marker="o")
    spec = chart_spec(Chart("t", [series], X, Y), "light", interactive=True)
    shared = with_shared_data(spec)
    assert len(spec["layer"]) == 4 and len(shared["datasets"]) == 1
    assert [shared["datasets"][one["data"]["name"]] for one in shared["layer"]] == [
        layer["data"]["values"] for layer in spec["layer"]
    ]


def points_of(tables):
    """The points that page.js makes of tables."""
    for table in tables:
        shared = {key: value for key, value in table.items() if key not in ("fields", "rows")}
        for row in table["rows"]:
            yield shared | dict(zip(table["fields"], row, strict=True))


def test_packed_data_are_the_same_points_in_less_space():
    x = list(range(1, 21))
    y = [math.nan if value == 3 else value / 7 for value in x]
    ends = [(value, value + 1.0) for value in y]
    series = [
        Series("AnytimeReasoner with one answer", x, y, "s1", ends),
        Series("BACR", x, x, "s2", marker="o"),
    ]
    chart = Chart("t", series, X, Axis("y", high=3.0), marks=[Mark("y", 1.5)])
    shared = with_shared_data(chart_spec(chart, "page", interactive=True))
    packed = with_packed_data(shared)
    assert {**packed, "datasets": shared["datasets"]} == shared
    for name, points in shared["datasets"].items():
        assert list(points_of(packed["datasets"][name])) == points
    lengths = [len(json.dumps(spec["datasets"])) for spec in (packed, shared)]
    assert lengths[0] < 0.6 * lengths[1]


def test_parts_of_a_bar_have_their_share():
    spec = bars_spec(Bars("t", [("run", [("plan", 1.0), ("learn", 3.0)])], "s"), "light")
    rows = spec["data"]["values"]
    assert [(row["part"], row["value"], row["share"]) for row in rows] == [
        ("plan", 1.0, "25%"),
        ("learn", 3.0, "75%"),
    ]
    narrow, wide = [
        item["width"]
        for items in scene({**spec, "mark": {"type": "bar"}}, "rect")
        for item in items
    ] or (1, 3)
    assert wide == pytest.approx(3 * narrow)


@given(st.lists(st.floats(-1e12, 1e12), min_size=1, max_size=900), st.booleans())
def test_any_numbers_make_a_description(numbers, log2):
    positions = list(range(1, len(numbers) + 1))
    series = Series("a", positions, numbers, "s1", marker="o")
    spec = chart_spec(Chart("t", [series], X, Axis("y", log2=log2)), "light")
    json.dumps(spec, allow_nan=False)
    (points,) = layers(spec, "point")
    # No more points than a screen shows.
    assert 0 < len(values(points)) <= 202


def test_a_filled_point_is_drawn_over_the_hollow_curve_that_it_is_on():
    curve = Series("a", [1, 2], [1.0, 2.0], "s1", marker="o", hollow=True)
    point = Series("", [2], [2.0], "s1", line="", marker="o")
    spec = chart_spec(Chart("t", [curve, point], X, Y), "light")
    hollow, filled = layers(spec, "point")
    assert (hollow["mark"]["filled"], filled["mark"]["filled"]) == (False, True)
    assert values(filled) == [(2, 2)]
