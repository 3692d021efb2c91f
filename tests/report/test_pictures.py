"""Pictures are files of the same charts, for light and for dark pages."""

import dataclasses
import io
import itertools
import json

import pytest
import vl_convert
from PIL import Image

from bacr_jax.errors import UserError
from bacr_jax.report import pictures
from bacr_jax.report.charts import INK, Axis, Chart, Series
from files_world import full_disk


def chart(title="c", *series):
    series = series or (Series("a", [1, 2], [1.0, 2.0], "s1"), Series("b", [1, 2], [2, 1], "s2"))
    return Chart(title, series, Axis("x"), Axis("y"))


def test_each_kind_of_file_is_the_same_each_time(tmp_path):
    spec = pictures.picture("t", [[chart()]])
    for suffix, head in ((".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<svg")):
        contents = []
        for name in ("one", "two"):
            pictures.save(spec, tmp_path / f"{name}{suffix}")
            contents.append((tmp_path / f"{name}{suffix}").read_bytes())
        assert contents[0].startswith(head) and contents[0] == contents[1]


@pytest.mark.parametrize("name", ["a.png", "a.pdf"])
def test_a_picture_that_can_not_be_written_leaves_the_old_one(tmp_path, monkeypatch, name):
    path = tmp_path / name
    pictures.save(pictures.picture("t", [[chart()]]), path)
    before = path.read_bytes()
    full_disk(monkeypatch)
    with pytest.raises(
        UserError, match=f"{name}: the file can't be written .No space left on device"
    ):
        pictures.save(pictures.picture("u", [[chart()]]), path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_dark_variant_has_the_colour_of_dark_pages(tmp_path):
    assert pictures.attempt(tmp_path / "a.png", "t", lambda: [[chart()]])
    for name, index in (("a.png", 0), ("a-dark.png", 1)):
        image = Image.open(io.BytesIO((tmp_path / name).read_bytes())).convert("RGB")
        assert "#{:02x}{:02x}{:02x}".format(*image.getpixel((2, 2))) == INK["paper"][index]
        # Twice as many pixels as the size in the description.
        assert image.width > 2 * pictures.SIZE[0]


@pytest.mark.parametrize("title", ["", "Accuracy"])
def test_a_note_is_drawn_with_and_without_a_title(title):
    noted = dataclasses.replace(chart(title), note="mean over 5 seeds")
    svg = vl_convert.vegalite_to_svg(json.dumps(pictures.picture("t", [[noted]])))
    assert "mean over 5 seeds</text>" in svg and (f"{title}</text>" in svg)


def test_a_failure_is_a_warning(tmp_path, capsys):
    def fail():
        raise RuntimeError("no font")

    assert not pictures.attempt(tmp_path / "a.png", "t", fail)
    assert "a.png: can't be drawn (no font)" in capsys.readouterr().err


def test_a_row_has_equal_names_at_the_y_axis_once():
    names = [(1.0, "first"), (2.0, "second")]
    named = dataclasses.replace(chart(), y=Axis("y", ticks=names))
    other = dataclasses.replace(chart(), y=Axis("y", ticks=[(1.0, "third")]))
    (row,) = pictures.picture("t", [[named, named, other]])["vconcat"]
    texts = [json.dumps(part) for part in row["hconcat"]]
    assert ["first" in text for text in texts] == [True, False, False]
    assert "third" in texts[2]


def test_a_dashed_curve_has_a_whole_marker_in_the_legend():
    dashed = Series("before", [1, 2], [1.0, 2.0], "s0", line="--", marker="s")
    solid = Series("after", [1, 2], [2.0, 1.0], "s1", marker="o")
    spec = pictures.picture("t", [[chart("c", dashed, solid)]])
    drawn = json.dumps(vl_convert.vegalite_to_vega(json.dumps(spec)))
    _, text = drawn.split('"legends": ')
    ((legend,), _) = json.JSONDecoder().raw_decode(text)
    assert "shape" in legend and "strokeDash" not in legend
    assert '"strokeDash": {"value": [5, 3]}' in drawn


def label_positions(spec):
    """Vertical position of each label of the legends, as Vega draws them."""
    drawn = json.loads(json.dumps(vl_convert.vegalite_to_scenegraph(json.dumps(spec))))
    positions = []

    def visit(node, top):
        top += node.get("y", 0)
        if node.get("role") == "legend-label":
            positions.append(top + node["items"][0]["y"])
        for child in node.get("items", ()):
            visit(child, top)

    visit(drawn["scenegraph"], 0)
    return positions


def test_the_star_fits_into_its_row_of_a_legend():
    series = [
        Series(name, [1.0, 2.0], [0.0, 1.0], "s1", marker=marker, hollow=marker == "^")
        for name, marker in {"a" * 50: "o", "b": "^", "c": "*", "d": "s", "e": "D"}.items()
    ]
    positions = label_positions(pictures.picture("t", [[chart("c", *series)]], legend=1))
    distances = [below - above for above, below in itertools.pairwise(positions)]
    assert len(distances) == 4 and distances == pytest.approx([distances[0]] * 4)


def legends(spec):
    """The legend of each chart, or None."""
    found = []
    for row in spec["vconcat"]:
        for one in row["hconcat"]:
            found.append(one["layer"][0]["encoding"]["color"]["legend"])
    return found


def test_curves_are_named_once():
    one, two = chart("one"), chart("two")
    other = chart("other", Series("c", [1, 2], [1.0, 2.0], "s1"), Series("d", [1], [1.0], "s2"))
    spec = pictures.picture("t", [[one, two, other]])
    assert [legend and legend["values"] for legend in legends(spec)] == [
        ["a", "b"],
        None,
        ["c", "d"],
    ]
    shared = pictures.picture("t", [[one, other]], legend=3)
    assert [legend["values"] for legend in legends(shared)] == [["a", "c", "b", "d"]] * 2


def test_a_legend_stays_within_a_picture_of_one_panel():
    names = [f"a name of thirty letters or so, {i}" for i in range(4)]
    series = [Series(name, [1.0, 2.0], [0.0, 1.0], "s1") for name in names]
    (legend,) = legends(pictures.picture("t", [[chart("c", *series)]], legend=3))
    assert legend["columns"] == 1


def test_a_chart_with_many_named_ticks_is_higher():
    ticks = [(float(i), f"pair {i}") for i in range(30)]
    tall = Chart("c", [Series("", [1, 2], [1.0, 2.0], "s1")], Axis("x"), Axis("y", ticks=ticks))
    assert pictures.picture("t", [[tall]])["vconcat"][0]["hconcat"][0]["height"] == 600
