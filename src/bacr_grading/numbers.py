"""Numbers in answers: parsed exactly, compared by one rule, without a computer algebra system."""

if __name__ == "numbers":
    # A file of this folder was run as a script. Python then looks here first for its own `numbers`.
    import sys

    _found = f"{sys.argv[0]}: is a part of the package bacr_grading"
    print(f"error: {_found}; write python -m bacr_grading", file=sys.stderr)
    raise SystemExit(2)

import re
from dataclasses import dataclass
from fractions import Fraction

from bacr_grading.normalize import split_multiplier, split_unit, unit

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
_ENCLOSED = re.compile(r"\(([^()\[\],;]*)\)\Z")


def parse_number(text: str) -> Number | None:
    r"""Parses a canonical answer that is one number; None: it is something else.

    Reads integers, thousands separators, decimals, fractions, mixed fractions, repeating decimals
    (0.1\overline{6}), powers of ten, a currency sign, a percent sign, degrees and a unit.
    """
    # Most answers are one, and a Fraction takes its time.
    if _SIMPLE.match(text):
        return Number(int(text))
    enclosed = _ENCLOSED.match(text) if text[:1] == "(" else None
    match = _NUMBER.match(enclosed[1] if enclosed else text)
    if match is None or len(match.group()) - len(match["rest"]) > MAX_DIGITS:
        return None
    tail, parsed = _tail(match["rest"]), _value(match)
    if tail is None or parsed is None:
        return None
    percent, known, factor = tail
    value, places = parsed
    if match["currency"]:
        known = unit(match["currency"])
    return Number(
        -value * factor if match["sign"] == "-" else value * factor, places, percent, known
    )


def _exact(digits: str) -> Fraction:
    return Fraction(digits.replace(",", "").rstrip(".") or "0")


def _value(match: re.Match[str]) -> tuple[int | Fraction, int | None] | None:
    """The unsigned value and its decimal places."""
    top, bottom = match["top"] or match["left"], match["bottom"] or match["right"]
    if top is not None:
        divisor = _exact(bottom)
        if not divisor:
            return None
        fraction = _exact(top) / divisor
        if match["whole"] and fraction < 0:
            return None
        return fraction + int(match["whole"] or 0), None
    cycle = match["cycle"] or match["digit"]
    if cycle:
        fixed = match["fixed"]
        start = _exact(f"{match['head'] or 0}.{fixed or 0}")
        return start + Fraction(int(cycle), (10 ** len(cycle) - 1) * 10 ** len(fixed)), None
    digits = match["number"] or match["factor"] or "1"
    value = _exact(digits)
    exponent = int(match["braced"] or match["bare"] or match["after_e"] or 0)
    if abs(exponent) > MAX_EXPONENT:
        return None
    places = len(digits) - digits.index(".") - 1 if "." in digits else None
    if exponent:
        value *= Fraction(10) ** exponent
        places = max((places or 0) - exponent, 0) or None
    return value, places


def _tail(rest: str) -> tuple[bool, tuple[str, int] | None, int] | None:
    """Percent, unit and multiplier of what follows the digits; None when it is none of these."""
    if not rest:
        return False, None, 1
    if rest in ("%", "%%"):
        return True, None, 1
    if rest in _SIGNS:
        return False, unit(rest), 1
    match = _UNIT.match(rest)
    if match is None:
        return None
    if match[4]:  # m/s: not in the table
        return False, None, 1
    factor, name = split_multiplier(match[1])
    return False, unit(name, int(match[2] or match[3] or 1)), factor


def trailing_unit(text: str, key: str) -> tuple[str, int] | None:
    """The known unit that an answer, with its canonical form, ends with."""
    if split := split_unit(text) if text[-1:].isalpha() else None:
        # The last letter of "2 g + 3 h" is no unit.
        return None if re.search(r"(?<![\\A-Za-z])[A-Za-z]", split[0]) else unit(split[1])
    match = _UNIT.search(key)
    if match is None and re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", key):
        return None  # Degrees at the end are those of its angle.
    tail = _tail(match.group() if match else key[-1:])
    return tail[1] if tail else None


def clash(one: tuple[str, int] | None, other: tuple[str, int] | None, *, lenient: bool) -> bool:
    """Whether two known units make two answers different; lenient: a.m. and p.m. alone do."""
    if not (one and other) or one == other:
        return False
    return not lenient or {one[0], other[0]} == _CLOCK


def with_bare_unit(number: Number, name: str) -> Number:
    """Gives a number the plain words that followed it ("5 million dollars", "18 eggs")."""
    factor, name = split_multiplier(name)
    return Number(number.value * factor, number.places, number.percent, unit(name))


def equal(
    pred: Number, reference: Number, *, lenient: bool, relative_tolerance: float = 0.0
) -> bool:
    """Whether two numbers are the same answer, by rules 2 to 4 of docs/grading.md ("Comparing").

    A tolerance is relative to the reference. The lenient mode ignores units, and accepts a decimal
    of two significant digits or more, rounded correctly, for a fraction without a finite one.
    """
    if clash(pred.unit, reference.unit, lenient=lenient):
        return False
    if _close(pred, reference, lenient, relative_tolerance):
        return True
    if pred.percent == reference.percent:
        return False
    return _close(_as_fraction(pred), _as_fraction(reference), lenient, relative_tolerance)


def _as_fraction(number: Number) -> Number:
    value = Fraction(number.value, 100) if number.percent else number.value
    return Number(value, number.places)


def _close(pred: Number, reference: Number, lenient: bool, relative_tolerance: float) -> bool:
    if pred.value == reference.value:
        return True
    exact = pred.places is None and reference.places is None
    if exact and not relative_tolerance:
        return False
    ours, theirs = Fraction(pred.value), Fraction(reference.value)
    error = abs(ours - theirs)
    if relative_tolerance and error <= Fraction(relative_tolerance) * abs(theirs):
        return True
    if exact:
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


def rounds_to(exact: Number, stated: Number, places: int) -> bool:
    """Whether a number, rounded to some decimal places, is the one that is stated."""
    error = abs(Fraction(exact.value) - Fraction(stated.value))
    return exact.percent == stated.percent and 2 * error * 10**places <= 1


def _terminates(value: Fraction) -> bool:
    """Whether a fraction has a finite decimal expansion: 2 and 5 alone divide its denominator."""
    return pow(10, value.denominator.bit_length(), value.denominator) == 0
