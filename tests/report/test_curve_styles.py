"""A method has the same colour in every picture, and the recommended one has a star."""

from bacr_jax.config.shipped import OVERLAYS, names
from bacr_jax.report.curve_styles import GREY, STAR, styles_of


def style(series):
    return series.colour, series.marker, series.line


def test_a_method_has_its_colour_whatever_is_next_to_it():
    (alone,) = styles_of(["grpo"])
    assert styles_of(["anytime", "bacr-robust", "grpo"])[2].colour == alone.colour
    # Study arms and presets write the same method with either character.
    assert styles_of(["l1_exact"])[0].colour == styles_of(["l1-exact"])[0].colour


def test_forms_of_one_method_share_its_colour_and_differ_in_their_marker():
    published, one_answer = styles_of(["anytime", "anytime-one"])
    assert published.colour == one_answer.colour == styles_of(["anytime-one"])[0].colour
    assert published.marker != one_answer.marker


def test_only_the_recommended_method_has_a_star():
    methods = [name.rsplit("/", 1)[-1] for name in names((OVERLAYS,))]
    assert with_star(methods) == ["bacr-bounded"]
    # The committed studies have its predecessor.
    methods.remove("bacr-bounded")
    assert with_star(methods) == ["bacr-robust"]
    assert with_star(["grpo", "anytime"]) == []


def with_star(methods):
    return [name for name, one in zip(methods, styles_of(methods)) if one.marker == STAR]


def test_all_shipped_methods_and_twenty_others_can_be_told_apart():
    methods = [name.rsplit("/", 1)[-1] for name in names((OVERLAYS,))]
    styles = styles_of([*methods, *(f"arm {i}" for i in range(20))])
    assert len({style(one) for one in styles}) == len(styles)


def test_runs_of_one_method_have_different_colours():
    styles = styles_of(["grpo"] * 5)
    assert len({one.colour for one in styles}) == 5 and GREY not in {one.colour for one in styles}
