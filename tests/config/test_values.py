"""Values as YAML gives them, as the types that keys have, and in words."""

import math
from typing import Literal

import pytest

from bacr_jax.config.values import TypeMismatch, any_of, convert, describe, expected, shown, written

Kind = Literal["shared", "per_layer"]


@pytest.mark.parametrize(
    ("hint", "value", "converted"),
    [
        (int, 3, 3),
        (float, 2, 2.0),
        (float, "1e-6", 1e-6),
        (float, "-.5E3", -500.0),
        (float, math.inf, math.inf),
        (bool, False, False),
        (str, "a b", "a b"),
        (int | None, None, None),
        (Kind, "shared", "shared"),
        (tuple[int, ...], [1, 2], (1, 2)),
        (float | tuple[float, ...], [1, "2e3"], (1.0, 2000.0)),
        (tuple[str, ...], [], ()),
    ],
)
def test_a_value_that_fits_becomes_the_type_of_its_key(hint, value, converted):
    found = convert(hint, value)
    assert found == converted and type(found) is type(converted)


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (int, True),
        (int, 2.0),
        (int, "3"),
        (int, 2**63),
        (float, True),
        (float, "high"),
        (float, 10**400),
        (bool, 1),
        (bool, "no"),
        (str, 3),
        (str, "a\0b"),
        (str, "\ud800"),
        (str | None, "None"),
        (Kind, "Shared"),
        (Literal[1, 2], True),
        (tuple[int, ...], 8),
        (tuple[int, ...], [1, None]),
        (int, None),
    ],
)
def test_a_value_that_would_change_its_meaning_does_not_fit(hint, value):
    with pytest.raises(TypeMismatch):
        convert(hint, value)


def test_what_a_shell_took_the_quotes_from_can_be_text():
    assert convert(str, 2024, text="2024") == "2024"
    assert convert(int | str, 2024, text="2024") == 2024
    with pytest.raises(TypeMismatch):
        convert(str, None, text="")


@pytest.mark.parametrize(
    ("hint", "value", "advice"),
    [
        (int, 2.0, "2"),
        (int, "1e3", "1000"),
        (int, 2.5, "a whole number"),
        (int | None, "none", "null"),
        (Kind, "share", "shared (possible: shared or per_layer)"),
        (Kind, 7, "shared or per_layer"),
        (str, 7, "text, in quotes"),
        (str, "a\0b", "text without NUL and without halves of surrogate pairs"),
        (tuple[int, ...], "8, 16", "a list of whole numbers, here [8, 16]"),
        (tuple[int, ...], "x", "a list of whole numbers"),
        (tuple[str, ...], "ledger", "a list of texts, here [ledger]"),
    ],
)
def test_what_to_write_instead(hint, value, advice):
    assert expected(hint, value) == advice


def test_types_in_words():
    assert describe(float | tuple[float, ...] | None) == "a number, a list of numbers or null"
    assert describe(Literal["a", "b", "c"]) == "a, b or c"
    assert describe(bool) == "true or false"
    assert any_of(["a"]) == "a"


def test_values_in_yaml_words_short_and_printable():
    assert [shown(value) for value in (None, True, 3, "x")] == ["null", "true", "3", "'x'"]
    assert shown("x", quote=False) == "x"
    assert shown("a\nb", quote=False).isprintable()
    assert len(shown("x" * 1000)) <= 80
    assert shown(10**5000) == "a number of 16610 bits"


def test_values_as_one_writes_them_in_a_config():
    assert written((0.5, 1e-6, 3, None, False)) == "[0.5, 1e-06, 3, null, false]"
    assert written("last") == "last"
