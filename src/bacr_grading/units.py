r"""Parses units, including products, quotients and powers such as kg m/s^2.

Called by `normalize` and `numbers` for the words after a number, and by `plain_units`, which looks
for units without `\text`. Values are not converted: km and m are different units.
"""

import re
from collections import Counter
from functools import lru_cache
from typing import NamedTuple

# Units that occur in reference answers. Each entry contains the name of a unit and its synonyms,
# without a plural s. Units that are in no table are ignored.
_UNITS = """
mm millimeter millimetre | cm centimeter centimetre | m meter metre | km kilometer kilometre |
in inch inche | ft foot feet | yd yard | mi mile | mg milligram | g gm gram gramme |
kg kilogram kilo | oz ounce | lb pound | ml mL milliliter millilitre | l liter litre | gal gallon |
s sec second | min minute | h hr hour | day | week wk | month | year yr | decade |
ton | tonne | acre | hectare | dm decimeter decimetre | cl cL centiliter centilitre |
dl dL deciliter | cup | tbsp tablespoon tablespoonful | tsp teaspoon teaspoonful |
pint pt | quart qt | floz fluidounce | bushel | nm nanometer | furlong | league | fathom | knot |
mph mileperhour milesperhour | kph kmh kilometerperhour kilometersperhour |
$ dollar usd buck | cent ¢ penny pennie | € euro eur | £ gbp | ° degree deg | rad radian | am | pm
"""
# Scientific units. Their symbols are case-sensitive if another symbol has the same letters.
_SCIENTIFIC = """
N newton | kN kilonewton | J joule | mJ millijoule | kJ kilojoule | MJ megajoule | W watt |
mW milliwatt | kW kilowatt | MW megawatt | kWh kilowatthour | Pa pascal | kPa kilopascal | MPa |
V volt | mV millivolt | kV kilovolt | A amp ampere | mA milliamp milliampere | C coulomb |
F farad | T tesla | henry | gauss | Wb weber | ohm | K kelvin | Hz hertz | kHz kilohertz |
MHz megahertz | GHz gigahertz | eV electronvolt | keV | MeV | GeV | mol mole | mmol | cal | kcal |
erg | dyn dyne | atm atmosphere | ms millisecond | ns nanosecond | pc parsec | kpc | Mpc |
ly lightyear | au | mpg | Nm
"""
# Units that are equal to a product of others without a factor.
_DERIVED = {
    "mph": "mi/h",
    "kph": "km/h",
    "mpg": "mi/gal",
    "Nm": "N m",
    "N": "kg m/s^2",
    "J": "N m",
    "W": "J/s",
    "Pa": "N/m^2",
    "A": "C/s",
    "V": "J/C",
    "ohm": "V/A",
    "Wb": "V s",
    "T": "Wb/m^2",
    "henry": "Wb/A",
}


def _by_name(table: str) -> dict[str, str]:
    """Maps each name in a table to its canonical name, the first of its entry.

    Args:
      table: entries separated by `|`. The names of an entry are separated by spaces.
    """
    canonical_names = {}
    for entry in table.split("|"):
        names = entry.split()
        canonical_names.update(dict.fromkeys(names, names[0]))
    return canonical_names


_COMMON_UNITS = _by_name(_UNITS)
_SYMBOLS = _by_name(_SCIENTIFIC)
_CASE_COUNTS = Counter(name.casefold() for name in _SYMBOLS)
# Scientific units by their names in lower case, without single letters and without mW and MW.
_LOWER_CASE = {
    name.casefold(): symbol
    for name, symbol in _SYMBOLS.items()
    if len(name) > 1 and _CASE_COUNTS[name.casefold()] == 1
}
# G can be grams or gauss, H hours or henries, and M meters or moles per liter.
_AMBIGUOUS = frozenset("GHM")
_MONEY = frozenset(["$", "cent", "€", "£"])
_CLOCK = frozenset(["am", "pm"])
# Units that do not contradict each other: other names of 1/s, and the scales of temperatures, which
# may be missing after a degree sign.
_OTHER_NAMES = {
    ("s", -1): ("Hz", "rad/s"),
    ("°", 1): ("C", "F", "K"),
}
# A sign between two names, with spaces around it.
SPACED_SIGN = re.compile(r"\s?([/*])\s?")
POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_POWERS_AFTER = {"squared": 2, "cubed": 3}
_NAME = r"(?P<name>[A-Za-z]+|[$€£¢°])(?:\s?\^\s?\{?(?P<power>-?\d)\}?)?"
_TOKEN = re.compile(rf"{_NAME}|(?P<sign>/)")
_PLAIN_NAME = re.sub(r"\?P<\w+>", "?:", _NAME)
_PER = re.compile(r"[\s*]?(?<![A-Za-z])per(?![A-Za-z])[\s*]?", re.IGNORECASE)
# Names with spaces or signs between them, and brackets around a name or a product.
_UNIT = re.compile(rf"{_PLAIN_NAME}(?:(?:\s?[/*]\s?\(?|\s){_PLAIN_NAME}\)?)*")


class _Factor(NamedTuple):
    """A factor of a unit.

    Attributes:
      symbol: the canonical name.
      exponent: the exponent, negative in a denominator.
      has_word: True if the exponent is a word, such as "square".
    """

    symbol: str
    exponent: int
    has_word: bool = False


def unit(name: str, power: int = 1) -> tuple[str, int] | None:
    """Returns the canonical name and the power of a unit, or None if the unit is unknown.

    For example, "square feet", and "ft" with `power=2`, both return ("ft", 2). The power of a
    product or quotient is 1: "miles per hour" and "mph" return ("mi/h", 1).

    Args:
      name: the words or symbols.
      power: the exponent after the name, which applies to the last unit of the name.
    """
    exponents = _exponents(name, power)
    if not exponents:
        return None
    if len(exponents) == 1:
        return exponents[0]
    numerator = []
    denominator = ""
    for symbol, exponent in exponents:
        size = abs(exponent)
        spelling = symbol if size == 1 else f"{symbol}^{size}"
        if exponent > 0:
            numerator.append(spelling)
        else:
            denominator += f"/{spelling}"
    return "*".join(numerator) + denominator, 1


def contradict(one: tuple[str, int] | None, other: tuple[str, int] | None) -> bool:
    """True if two units are known and different.

    An amount of money does not contradict an amount per hour, because "per hour" may be missing.
    """
    if one is None or other is None or one == other:
        return False
    for unit_1, unit_2 in ((one, other), (other, one)):
        if unit_2[0] in _OTHER_NAMES.get(unit_1, ()):
            return False
        if unit_1[0] in _MONEY and unit_2[0].startswith(f"{unit_1[0]}/"):
            return False
    return True


@lru_cache(maxsize=4096)
def _exponents(name: str, power: int = 1) -> tuple[tuple[str, int], ...] | None:
    """Returns the symbols of a unit and their exponents in a fixed order, or None if unknown."""
    factors = _factors(name)
    if not factors:
        return None
    last = factors[-1]
    if not last.has_word:
        factors[-1] = _Factor(last.symbol, last.exponent * power)
    totals: Counter[str] = Counter()
    for factor in factors:
        derived = None
        if factor.symbol in _DERIVED:
            derived = _exponents(_DERIVED[factor.symbol])
        for symbol, exponent in derived or ((factor.symbol, 1),):
            totals[symbol] += factor.exponent * exponent
    exponents = [(symbol, total) for symbol, total in totals.items() if total]
    if len(exponents) > 1 and not _can_be_factors(exponents):
        return None
    return tuple(sorted(exponents))


def _can_be_factors(exponents: list[tuple[str, int]]) -> bool:
    """False for times of day, and for a degree sign with a scale, such as degrees Celsius."""
    symbols = {symbol for symbol, _ in exponents}
    if symbols & _CLOCK:
        return False
    if "°" not in symbols:
        return True
    return all(exponent < 0 for symbol, exponent in exponents if symbol != "°")


def _factors(text: str) -> list[_Factor] | None:
    """Splits a unit into its factors, or returns None if the text is not a unit.

    All units after the first slash are in the denominator, as in "J/kg K".
    """
    text = text.replace("\\cdot", "*")
    text = re.sub(r"[\\.]", "", text)
    text = _PER.sub("/", text).strip()
    joined = re.sub(r"[\s*]", "", text)
    if len(joined) > 3:
        # Names of two words, such as "light years".
        symbol = _symbol(joined)
        if symbol is not None:
            return [_Factor(symbol, 1)]
    if not _UNIT.fullmatch(text):
        return None
    factors: list[_Factor] = []
    direction = 1
    word_power = 0
    for match in _TOKEN.finditer(text):
        name = match.group("name")
        if name is None:
            direction = -1
            continue
        lower = name.casefold()
        if lower in POWERS:
            word_power = POWERS[lower]
            continue
        if lower in _POWERS_AFTER and factors:
            last = factors.pop()
            exponent = last.exponent * _POWERS_AFTER[lower]
            factors.append(_Factor(last.symbol, exponent, has_word=True))
            continue
        symbol, prefix_power = _with_prefix(name)
        if symbol is None:
            return None
        word_power = word_power or prefix_power
        exponent = word_power or int(match["power"] or 1)
        factors.append(_Factor(symbol, direction * exponent, has_word=word_power > 0))
        word_power = 0
    return factors


def _with_prefix(name: str) -> tuple[str | None, int]:
    """Returns the symbol of a name such as "squarefeet", and the power of its prefix or 0."""
    symbol = _symbol(name)
    if symbol is not None:
        return symbol, 0
    lower = name.casefold()
    for prefix, power in POWERS.items():
        rest = lower.removeprefix(prefix)
        if rest == lower:
            continue
        symbol = common_unit(rest)
        if symbol is not None:
            return symbol, power
    return None, 0


def _symbol(name: str) -> str | None:
    """Returns the symbol of a unit in the singular or plural, or None if the unit is unknown."""
    if name in _SYMBOLS:
        return _SYMBOLS[name]
    if name in _AMBIGUOUS:
        return None
    lower = name.casefold()
    symbol = common_unit(lower)
    if symbol is None:
        symbol = _LOWER_CASE.get(lower)
    if symbol is None:
        symbol = _LOWER_CASE.get(lower.removesuffix("s"))
    return symbol


def common_unit(name: str) -> str | None:
    """Returns the symbol of a unit of the first table, in lower case, or None."""
    symbol = _COMMON_UNITS.get(name)
    if symbol is None and name.endswith("s"):
        symbol = _COMMON_UNITS.get(name[:-1])
    return symbol


def is_unambiguous(text: str) -> bool:
    r"""True if a unit that follows a number without `\text` can't be a product of variables.

    At least one of its names must have three letters, or be a common unit with two letters, or a
    symbol such as eV. A unit of the letters m and s is also accepted if it is a quotient.
    """
    if unit(text) is None:
        return False
    names = re.findall("[A-Za-z]+", text)
    if names == ["m", "s"] and "/" in text:
        return True
    return any(map(_is_unambiguous_name, names))


def _is_unambiguous_name(name: str) -> bool:
    if len(name) > 2:
        return _symbol(name) is not None
    if len(name) < 2:
        return False
    if common_unit(name):
        return True
    has_mixed_case = not name.islower() and not name.isupper()
    return has_mixed_case and name in _SYMBOLS
