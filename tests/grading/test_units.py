"""Units, their products, quotients and powers."""

import pytest

from bacr_grading.units import contradict, is_unambiguous, unit


def test_one_unit_has_many_spellings():
    assert unit("square feet") == unit("sq. ft.") == unit("foot", 2) == ("ft", 2)
    assert unit("miles per hour") == unit("mph") == unit("mi/h")
    assert unit("meters per second squared") == unit("m s^{-2}") == unit("m/s", 2)
    assert unit("J/kg K") == unit("J/(kg K)") == unit("J/kg/K") == unit("J kg^-1 K^-1")
    assert unit("joules") == unit("N m") == unit("Nm") == unit("kg m^2/s^2")
    assert unit("fl. oz.") == unit("fluid ounces")


@pytest.mark.parametrize(
    "text",
    ["eggs", "", "per hour", "km per", "cubic", "red km", "degrees C", "m m am", "M", "H", "km+s"],
)
def test_other_words_are_no_unit(text):
    assert unit(text) is None


@pytest.mark.parametrize(
    ("one", "other"), [("mW", "MW"), ("m", "m^2"), ("Hz", "rad/s"), ("$/h", "$/day"), ("g", "kg")]
)
def test_different_units_contradict_each_other(one, other):
    assert contradict(unit(one), unit(other))
    assert contradict(unit(other), unit(one))


@pytest.mark.parametrize(
    ("one", "other"), [("V/m", "N/C"), ("s^-1", "Hz"), ("rad/s", "s^-1"), ("$", "$/h"), ("°", "C")]
)
def test_equal_or_incomplete_units_do_not(one, other):
    assert not contradict(unit(one), unit(other))
    assert not contradict(unit(other), unit(one))
    assert not contradict(unit(one), None)


def test_single_letters_may_be_variables():
    for text in ("km/s", "eV", "m/s^2", "kg m", "mol/L", "W/cm^2"):
        assert is_unambiguous(text)
    for text in ("J", "N/m", "m^2", "m s", "MN", "a/b", "MW", "kW/x"):
        assert not is_unambiguous(text)
