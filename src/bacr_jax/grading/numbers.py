"""Numbers in answers: parsed exactly, compared by one rule, without a computer algebra system."""

import re
from dataclasses import dataclass
from fractions import Fraction

from bacr_jax.grading import units

# A longer run of digits is no answer; Python also refuses to parse beyond 4,300 digits.
MAX_DIGITS = 400
MAX_EXPONENT = 400
# Decimals that agree when rounded to six places are equal (math-verify's rule), unless that would
# forgive more than a thousandth of the reference, which happens for small numbers only.
PLACES = 6
SMALL_NUMBER_TOLERANCE = Fraction(1, 1000)


@dataclass(frozen=True, slots=True)
class Number:
    """A number as an answer writes it.

    Attributes:
        value: exact value, without the percent sign's factor.
        places: digits after the decimal point, or None when it is not written as a decimal.
        percent: whether a percent sign follows.
        unit: (name, power) of a known unit, else None.
    """

    value: int | Fraction
    places: int | None = None
    percent: bool = False
    unit: tuple[str, int] | None = None


_INT = r"(?:[1-9]\d{0,2}(?:,\d{3})+|\d+)"
_DEC = rf"(?:{_INT}(?:\.\d*)?|\.\d+)"
_SIGNED = rf"-?{_DEC}"
_NUMBER = re.compile(
    rf"""
    (?P<sign>[-+]?)(?P<currency>[$€£]?)(?P<sign2>-?)
    (?:
      (?P<whole>\d+)?\\frac\{{(?P<top>{_SIGNED})\}}\{{(?P<bottom>{_SIGNED})\}}
      | (?P<left>{_DEC})/(?P<right>{_DEC})
      | (?P<head>\d*)\.(?P<fixed>\d*)\\overline(?:\{{(?P<cycle>\d+)\}}|(?P<digit>\d))
      | 10\^(?:\{{(?P<power_braced>[-+]?\d+)\}}|(?P<power_bare>[-+]?\d+))
      | (?P<number>{_DEC})
        (?: \*10\^(?:\{{(?P<exp_braced>[-+]?\d+)\}}|(?P<exp_bare>[-+]?\d+))
          | [eE](?P<exp_e>[-+]?\d+) )?
    )
    (?P<rest>.*)\Z""",
    re.VERBOSE | re.DOTALL,
)
_CLOCK = ("am", "pm")
_SIMPLE = re.compile(r"-?\d{1,18}\Z")
_SIMPLE_DECIMAL = re.compile(r"(-?\d{1,18})\.(\d{1,18})\Z")
_SIMPLE_FRACTION = re.compile(r"(-?)\\frac\{(\d{1,18})\}\{(\d{1,18})\}\Z")
_UNIT_TAIL = re.compile(
    r"(?:\\text\{(?P<name>[^{}]*)\}(?:\^(?P<power>\d)|\^\{(?P<braced>-?\d+)\})?)"
    r"(?P<more>(?:[*/]?\\text\{[^{}]*\}(?:\^\d|\^\{-?\d+\})?)*)\Z"
)
_ENCLOSED = re.compile(r"\(([^()\[\],;]*)\)\Z")


def parse_number(text: str) -> Number | None:
    r"""Parses a canonical answer that is one number.

    Reads integers, thousands separators, decimals, fractions, mixed fractions, repeating decimals
    (0.1\overline{6}), powers of ten, a currency sign, a percent sign, degrees and a unit.

    Args:
        text: the output of `canonical`.

    Returns:
        The number, or None when the answer is something else.
    """
    if _SIMPLE.match(text):
        return Number(int(text))
    decimal = _SIMPLE_DECIMAL.match(text)
    if decimal:
        digits = decimal[2]
        return Number(Fraction(int(decimal[1] + digits), 10 ** len(digits)), len(digits))
    fraction = _SIMPLE_FRACTION.match(text)
    if fraction and int(fraction[3]):
        quotient = Fraction(int(fraction[2]), int(fraction[3]))
        return Number(-quotient if fraction[1] else quotient)
    if not any(char.isdigit() for char in text[:60]):
        return None
    enclosed = _ENCLOSED.match(text)
    if enclosed:
        text = enclosed.group(1)
    match = _NUMBER.match(text)
    if match is None or len(match.group()) - len(match["rest"]) > MAX_DIGITS:
        return None
    tail = _tail(match["rest"])
    if tail is None:
        return None
    percent, unit, factor = tail
    if match["currency"]:
        unit = units.unit(match["currency"])
    parsed = _value(match)
    if parsed is None or (match["sign"] and match["sign2"]):
        return None
    value, places = parsed
    if match["sign"] == "-" or match["sign2"]:
        value = -value
    return Number(value * factor, places, percent, unit)


def _exact(digits: str) -> Fraction:
    return Fraction(digits.replace(",", "").rstrip(".") or "0")


def _places(digits: str) -> int | None:
    return len(digits) - digits.index(".") - 1 if "." in digits else None


def _value(match: re.Match[str]) -> tuple[int | Fraction, int | None] | None:
    """The unsigned value and its decimal places."""
    top, bottom = match["top"] or match["left"], match["bottom"] or match["right"]
    if top is not None:
        divisor = _exact(bottom)
        if not divisor:
            return None
        fraction = _exact(top) / divisor
        if match["whole"]:
            if fraction < 0:
                return None
            fraction += int(match["whole"])
        written = [p for p in (_places(top), _places(bottom)) if p is not None]
        return fraction, max(written) if written else None
    cycle = match["cycle"] or match["digit"]
    if cycle:
        fixed = match["fixed"]
        start = _exact(f"{match['head'] or 0}.{fixed or 0}")
        return start + Fraction(int(cycle), (10 ** len(cycle) - 1) * 10 ** len(fixed)), None
    digits = match["number"] or "1"
    value = _exact(digits)
    powers = ("power_braced", "power_bare", "exp_braced", "exp_bare", "exp_e")
    exponent = int(next((match[name] for name in powers if match[name]), 0))
    if abs(exponent) > MAX_EXPONENT:
        return None
    places = _places(digits)
    if exponent:
        value *= Fraction(10**exponent) if exponent > 0 else Fraction(1, 10**-exponent)
        places = max((places or 0) - exponent, 0) or None
    return value, places


def _tail(rest: str) -> tuple[bool, tuple[str, int] | None, int] | None:
    """Percent, unit and multiplier of what follows the digits; None when it is none of these."""
    if not rest:
        return False, None, 1
    if rest[0] == "%" and rest in ("%", "%%"):
        return True, None, 1
    if rest == "°":
        return False, ("°", 1), 1
    if rest[0] in "€£$¢" and len(rest) == 1:
        return False, units.unit(rest), 1
    match = _UNIT_TAIL.match(rest)
    if match is None:
        return None
    name = match["name"]
    if match["more"]:
        return False, None, 1
    factor, name = units.split_multiplier(name)
    power = int(match["power"] or match["braced"] or 1)
    return False, units.unit(name, power), factor


def with_bare_unit(number: Number, name: str) -> Number:
    """Gives a number the plain words that followed it ("5 million dollars", "18 eggs")."""
    factor, name = units.split_multiplier(name)
    unit = units.unit(name) or number.unit
    return Number(number.value * factor, number.places, number.percent, unit)


def equal(pred: Number, gold: Number, *, lenient: bool, relative_tolerance: float = 0.0) -> bool:
    """Whether two numbers are the same answer.

    A percent sign may be missing on one side, and then the bare number may be the percentage or
    the fraction. Numbers with different known units differ, except in the lenient mode.

    Args:
        pred: the answer to grade.
        gold: the reference.
        lenient: ignore units, and accept a correctly rounded decimal (two places or more, two
            significant digits or more) for a fraction that has no finite decimal.
        relative_tolerance: largest accepted error relative to the reference.

    Returns:
        True when they are equal.
    """
    if pred.unit and gold.unit and pred.unit != gold.unit:
        clock = pred.unit[0] in _CLOCK and gold.unit[0] in _CLOCK
        if clock or not lenient:
            return False
    if _close(pred, gold, pred.value, gold.value, lenient, relative_tolerance):
        return True
    if pred.percent == gold.percent:
        return False
    pred_value = Fraction(pred.value, 100) if pred.percent else pred.value
    gold_value = Fraction(gold.value, 100) if gold.percent else gold.value
    return _close(pred, gold, pred_value, gold_value, lenient, relative_tolerance)


def _close(
    pred: Number,
    gold: Number,
    pred_value: int | Fraction,
    gold_value: int | Fraction,
    lenient: bool,
    relative_tolerance: float,
) -> bool:
    if pred_value == gold_value:
        return True
    if pred.places is None and gold.places is None and not relative_tolerance:
        return False
    ours, theirs = Fraction(pred_value), Fraction(gold_value)
    error = abs(ours - theirs)
    if relative_tolerance and error <= Fraction(relative_tolerance) * abs(theirs):
        return True
    if error > 1 or (pred.places is None and gold.places is None):
        return False
    if error * 10**PLACES <= 1 and error <= SMALL_NUMBER_TOLERANCE * abs(theirs):
        return round(ours, PLACES) == round(theirs, PLACES)
    places = pred.places
    return (
        lenient
        and places is not None
        and places >= 2
        and not _terminates(theirs)
        and abs(ours) * 10**places >= 10
        and round(theirs, places) == ours
    )


def _terminates(value: Fraction) -> bool:
    """Whether a fraction has a finite decimal expansion."""
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1
