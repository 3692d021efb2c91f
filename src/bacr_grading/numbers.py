"""Parses numbers in answers with exact arithmetic and compares them.

Called by `compare`. Does not use a computer algebra system. The comparison rules are documented in
docs/grading.md ("Comparing").
"""

if __name__ == "numbers":
    # A file in this folder was run as a script. The folder is then first on sys.path, so the
    # standard library's `import numbers` imports this file.
    import sys

    _message = f"{sys.argv[0]} is a module of the package bacr_grading and can't be run as a script"
    print(f"error: {_message}; run python -m bacr_grading", file=sys.stderr)
    raise SystemExit(2)

import re
from fractions import Fraction
from typing import NamedTuple

from bacr_grading.normalize import VARIABLE, split_multiplier, split_unit
from bacr_grading.units import contradict, unit

# Maximum number of digits of a number, and maximum absolute value of an exponent of ten. Python
# does not parse integers with more than 4,300 digits.
MAX_DIGITS = 400
MAX_EXPONENT = 400
# Two decimals are equal if they agree after rounding to six decimal places (math-verify's rule) and
# the relative error is at most 0.001, which only matters for small numbers. If an answer has more
# than six places, all of them must be correct.
PLACES = 6
SMALL_NUMBER_TOLERANCE = Fraction(1, 1000)


class Number(NamedTuple):
    """A number parsed from an answer.

    Attributes:
      value: exact value. The value of "50%" is 50.
      places: number of digits after the decimal point, or None if the number is not a decimal.
      percent: True if the number is followed by a percent sign.
      unit: name and power of a known unit, such as ("ft", 2), or None if missing.
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
    (?P<sign>[-+]?)(?P<currency>[$€£]?)
    (?:
      (?P<whole>\d+)?\\frac\{{(?P<top>{_SIGNED})\}}\{{(?P<bottom>{_SIGNED})\}}
      | (?P<left>{_DEC})/(?P<right>{_DEC})
      | (?P<head>\d*)\.(?P<fixed>\d*)\\overline(?:\{{(?P<cycle>\d+)\}}|(?P<digit>\d))
      | (?:(?P<factor>{_DEC})\*)?10\^(?:\{{(?P<braced>[-+]?\d+)\}}|(?P<bare>[-+]?\d+))
      | (?P<number>{_DEC})(?:[eE](?P<after_e>[-+]?\d+))?
    )
    (?P<rest>.*)\Z""",
    re.VERBOSE | re.DOTALL,
)
_CLOCK = {"am", "pm"}
_SIGNS = frozenset("°€£$¢")
_SIMPLE = re.compile(r"-?\d{1,18}\Z")
_POWER = r"(?:\^(\d)|\^\{(-?\d+)\})?"
_UNIT = re.compile(rf"\\text\{{([^{{}}]*)\}}{_POWER}((?:[*/]?\\text\{{[^{{}}]*\}}{_POWER})*)\Z")
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_ENCLOSED = re.compile(r"\(([^()\[\],;]*)\)\Z")


def parse_number(text: str) -> Number | None:
    r"""Parses a canonical answer that is a single number, or returns None for any other answer.

    Supports integers, thousands separators, decimals, fractions, mixed fractions, repeating
    decimals (0.1\overline{6}), powers of ten, currency symbols, percent signs, degrees and units.
    """
    # Fast path: most answers are short integers, and creating an int is faster than a Fraction.
    if _SIMPLE.match(text):
        return Number(int(text))
    enclosed = _ENCLOSED.match(text) if text[:1] == "(" else None
    match = _NUMBER.match(enclosed[1] if enclosed else text)
    if match is None:
        return None
    digit_count = len(match.group()) - len(match["rest"])
    if digit_count > MAX_DIGITS:
        return None
    tail = _tail(match["rest"])
    if tail is None:
        return None
    unsigned = _value(match)
    if unsigned is None:
        return None
    percent, unit_and_power, factor = tail
    value, places = unsigned
    if factor != 1:
        # A factor of 1 is skipped, because multiplying a Fraction is slow.
        value *= factor
    if match["sign"] == "-":
        value = -value
    if match["currency"]:
        unit_and_power = unit(match["currency"])
    return Number(value, places, percent, unit_and_power)


def _exact(digits: str) -> Fraction:
    """Parses a decimal number with thousands separators and returns its exact value."""
    # Fraction can parse strings, but it is several times slower.
    whole, _, decimals = digits.replace(",", "").partition(".")
    if not decimals:
        return Fraction(int(whole or 0))
    return Fraction(int(whole + decimals), 10 ** len(decimals))


def _value(match: re.Match[str]) -> tuple[int | Fraction, int | None] | None:
    """Returns the unsigned value of a match of `_NUMBER` and its number of decimal places.

    The number of decimal places is None if the number is not a decimal. Returns None if the divisor
    is 0, the fractional part of a mixed fraction is negative, or an exponent is too large.
    """
    top = match["top"] or match["left"]
    if top is not None:
        divisor = _exact(match["bottom"] or match["right"])
        if not divisor:
            return None
        fraction = _exact(top) / divisor
        if match["whole"] and fraction < 0:
            return None
        return fraction + int(match["whole"] or 0), None
    cycle = match["cycle"] or match["digit"]
    if cycle:
        return _repeating_decimal(match["head"], match["fixed"], cycle), None
    digits = match["number"] or match["factor"] or "1"
    value = _exact(digits)
    exponent = int(match["braced"] or match["bare"] or match["after_e"] or 0)
    if abs(exponent) > MAX_EXPONENT:
        return None
    places = None
    if "." in digits:
        places = len(digits) - digits.index(".") - 1
    if exponent:
        value *= Fraction(10) ** exponent
        places = max((places or 0) - exponent, 0) or None
    return value, places


def _repeating_decimal(head: str, fixed: str, cycle: str) -> Fraction:
    """Returns the value of a repeating decimal.

    Args:
      head: digits before the decimal point.
      fixed: digits between the decimal point and the repeating digits.
      cycle: the repeating digits.
    """
    start = _exact(f"{head or 0}.{fixed or 0}")
    nines = 10 ** len(cycle) - 1
    return start + Fraction(int(cycle), nines * 10 ** len(fixed))


def _tail(rest: str) -> tuple[bool, tuple[str, int] | None, int] | None:
    """Parses the text after the digits of a number.

    Returns:
      A tuple of three items: True if the text is a percent sign, the name and power of the unit (or
      None), and the factor of a word such as "million" (or 1). None if the text cannot be parsed.
    """
    if not rest:
        return False, None, 1
    if rest in ("%", "%%"):
        return True, None, 1
    if rest in _SIGNS:
        return False, unit(rest), 1
    match = _UNIT.match(rest)
    if match is None:
        return None
    if match[4]:
        names = _TEXT.sub(r" \1 ", rest)
        return False, unit(" ".join(names.split())), 1
    factor, name = split_multiplier(match[1])
    power = int(match[2] or match[3] or 1)
    return False, unit(name, power), factor


def trailing_unit(text: str, key: str) -> tuple[str, int] | None:
    """Returns the name and power of the unit at the end of an answer that is not a number.

    Args:
      text: the answer after `normalize.clean`.
      key: the answer after `normalize.canonical`.

    Returns:
      The name and power, or None if the answer does not end with a known unit.
    """
    split = split_unit(text) if text[-1:].isalpha() else None
    if split:
        # In "2 g + 3 h", the last letter is a variable and not a unit.
        return None if VARIABLE.search(split[0]) else unit(split[1])
    match = _UNIT.search(key)
    if match is None and re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", key):
        # A degree sign at the end belongs to the argument of the trigonometric function.
        return None
    tail = _tail(match.group() if match else key[-1:])
    if tail is None:
        return None
    _, unit_and_power, _ = tail
    return unit_and_power


def clash(one: tuple[str, int] | None, other: tuple[str, int] | None, *, lenient: bool) -> bool:
    """True if two answers differ because of their units.

    In the strict mode, units that contradict each other clash. In the lenient mode, only a.m. and
    p.m. do.
    """
    if not lenient:
        return contradict(one, other)
    return one is not None and other is not None and {one[0], other[0]} == _CLOCK


def with_bare_unit(number: Number, name: str) -> Number:
    """Applies the words after a number, which can be a multiplier and a unit.

    For example, `name` is "million dollars" for the answer "5 million dollars".
    """
    factor, name = split_multiplier(name)
    return Number(number.value * factor, number.places, number.percent, unit(name))


def equal(
    pred: Number, reference: Number, *, lenient: bool, relative_tolerance: float = 0.0
) -> bool:
    """True if two numbers are equal by rules 2 to 4 of docs/grading.md ("Comparing").

    The lenient mode ignores units, except for a.m. and p.m. If the reference has no finite decimal
    expansion, the lenient mode also accepts a correctly rounded decimal with at least two decimal
    places and at least two significant digits.

    Args:
      pred: the number in the answer.
      reference: the number in the reference.
      lenient: True for the lenient mode.
      relative_tolerance: maximum error, relative to the reference.
    """
    if clash(pred.unit, reference.unit, lenient=lenient):
        return False
    if not lenient and ((pred.percent and reference.unit) or (pred.unit and reference.percent)):
        return False
    if _close(pred, reference, lenient, relative_tolerance):
        return True
    if pred.percent == reference.percent:
        return False
    return _close(_as_fraction(pred), _as_fraction(reference), lenient, relative_tolerance)


def _as_fraction(number: Number) -> Number:
    value = number.value
    if number.percent:
        value = Fraction(value, 100)
    return Number(value, number.places)


def _close(pred: Number, reference: Number, lenient: bool, relative_tolerance: float) -> bool:
    """True if two values are equal by the rules of `equal`, ignoring units and percent signs."""
    if pred.value == reference.value:
        return True
    exact = pred.places is None and reference.places is None
    if exact and not relative_tolerance:
        return False
    value = Fraction(pred.value)
    target = Fraction(reference.value)
    error = abs(value - target)
    if relative_tolerance and error <= Fraction(relative_tolerance) * abs(target):
        return True
    if exact:
        return False
    largest_error = SMALL_NUMBER_TOLERANCE * abs(target)
    if error * 10**PLACES <= 1 and error <= largest_error:
        if pred.places is not None and pred.places > PLACES and error * 10**pred.places >= 1:
            return False
        return round(value, PLACES) == round(target, PLACES)
    places = pred.places
    if not lenient or places is None or places < 2 or _terminates(target):
        return False
    has_two_significant_digits = abs(value) * 10**places >= 10
    return has_two_significant_digits and round(target, places) == value


def rounds_to(exact: Number, stated: Number, places: int) -> bool:
    """True if `stated` is equal to `exact` rounded to `places` decimal places."""
    if exact.percent != stated.percent:
        return False
    error = abs(Fraction(exact.value) - Fraction(stated.value))
    return 2 * error * 10**places <= 1


def _terminates(value: Fraction) -> bool:
    """True if a fraction has a finite decimal expansion.

    This is the case if the denominator has no prime factors other than 2 and 5.
    """
    return pow(10, value.denominator.bit_length(), value.denominator) == 0
