"""Intervals, and a walk over keys."""

import math
from dataclasses import dataclass

import pytest

from bacr_jax.config.fields import Key, inside, key, range_text, section, walk


@pytest.mark.parametrize(
    ("bounds", "held", "not_held", "words"),
    [
        ("[1, inf)", [1, 1.5, 2**70], [0, 0.999, math.inf, math.nan], "1 or more"),
        ("(0, inf]", [5e-324, math.inf], [0, -1, math.nan], "more than 0 (.inf: no limit)"),
        ("[0, 1)", [0, 0.5], [1, -1e-9, math.nan], "in [0, 1)"),
        ("(-1, 0]", [-0.5, 0], [-1, 1e-9], "in (-1, 0]"),
        ("(-inf, 0]", [-1e300, 0], [-math.inf, 1e-9, math.nan], "in (-inf, 0]"),
        ("(-inf, inf)", [0, -1e300], [-math.inf, math.inf, math.nan], "any finite number"),
        ("[0, 4294967295]", [2**32 - 1], [2**32], "in [0, 4294967295]"),
    ],
)
def test_an_interval_holds_its_numbers_and_says_them_in_words(bounds, held, not_held, words):
    assert all(inside(number, bounds) for number in held)
    assert not any(inside(number, bounds) for number in not_held)
    assert range_text(bounds) == words


@dataclass(frozen=True)
class Inner:
    size: int | None = key(None, "how large", "[1, inf)")


@dataclass(frozen=True)
class Outer:
    name: str = key("x", "what it is called")
    inner: Inner = section(Inner, "the inside")


def test_a_walk_names_keys_and_sections_in_the_order_written():
    assert dict(walk(Outer(inner=Inner(3)))) == {
        "name": Key(str, "x", "what it is called", None, is_section=False),
        "inner": Key(Inner, Inner(3), "the inside", None, is_section=True),
        "inner.size": Key(int | None, 3, "how large", "[1, inf)", is_section=False),
    }
