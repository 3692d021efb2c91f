"""Units after a number: which words are one, which spellings mean the same."""

import re

# Spellings of the units that reference answers use. A unit that is not here is read and ignored.
_SPELLINGS: dict[str, tuple[str, ...]] = {
    "mm": ("mm", "millimeter", "millimetre"),
    "cm": ("cm", "centimeter", "centimetre"),
    "m": ("m", "meter", "metre"),
    "km": ("km", "kilometer", "kilometre"),
    "in": ("in", "inch", "inche"),
    "ft": ("ft", "foot", "feet"),
    "yd": ("yd", "yard"),
    "mi": ("mi", "mile"),
    "mg": ("mg", "milligram"),
    "g": ("g", "gram"),
    "kg": ("kg", "kilogram"),
    "oz": ("oz", "ounce"),
    "lb": ("lb", "lbs", "pound"),
    "ml": ("ml", "milliliter", "millilitre"),
    "l": ("l", "liter", "litre"),
    "gal": ("gal", "gallon"),
    "s": ("s", "sec", "second"),
    "min": ("min", "minute"),
    "h": ("h", "hr", "hour"),
    "day": ("day",),
    "week": ("week",),
    "month": ("month",),
    "year": ("yr", "year"),
    "mph": ("mph", "mile per hour", "miles per hour"),
    "km/h": ("km/h", "kmh", "kph", "kilometer per hour", "kilometers per hour"),
    "$": ("$", "dollar", "usd", "buck"),
    "cent": ("cent", "¢", "penny", "pennie"),
    "€": ("€", "euro", "eur"),
    "£": ("£", "gbp"),
    "°": ("°", "degree", "deg"),
    "rad": ("rad", "radian"),
    "am": ("am",),
    "pm": ("pm",),
}
KNOWN = {
    spelling.replace(" ", ""): unit
    for unit, spellings in _SPELLINGS.items()
    for spelling in spellings
}

MULTIPLIERS = {
    "dozen": 12,
    "hundred": 100,
    "thousand": 1000,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}

# Words that are mathematics and never a unit.
_MATHEMATICS = frozenset(
    """
    abs alpha and approximately arccos arcsin arctan beta by choose cos cosh cot csc cubed delta
    det div divided eighth eighths equals exp factorial fifth fifths fourth fourths from gamma
    gcd half halves hundredth hundredths if inf infinity is lambda lcm lim log max minus mod
    modulo mu nan negative not of omega or over phi pi plus power psi quarter quarters ratio
    root sec sin sinh sqrt squared tan tanh theta third thirds times to versus when where
    """.split()  # noqa: SIM905
)
_BARE = re.compile(r"(.*[\d}%.])\s+([A-Za-z][A-Za-z.]*(?:\s+[A-Za-z][A-Za-z.]*){0,3})\Z", re.DOTALL)
_ATTACHED = re.compile(r"(.*[\d}])\s*(mm|cm|km|kg|ft|lbs?|mph|hrs?|min|USD|kph)\Z", re.DOTALL)
_POWERS = (("square", 2), ("sq", 2), ("cubic", 3), ("cu", 3))


def split_bare(text: str) -> tuple[str, str] | None:
    """Splits "18 square feet" into the number and up to four plain words.

    A word counts when it is a known unit or has at least three letters (two letters may be two
    variables), and is no mathematical word such as "pi" or "over".

    Args:
        text: a cleaned answer.

    Returns:
        What stands before the words, and the words; None when the end is not a unit.
    """
    match = _BARE.match(text)
    if match is not None:
        names = match.group(2).casefold().split()
        if all(_is_unit_word(name.rstrip(".")) for name in names):
            return match.group(1), " ".join(names)
        return None
    match = _ATTACHED.match(text)
    return (match.group(1), match.group(2)) if match else None


def _is_unit_word(name: str) -> bool:
    if name in _MATHEMATICS:
        return False
    return len(name) >= 3 or _known(name) is not None or name in ("sq", "cu")


def split_multiplier(name: str) -> tuple[int, str]:
    """Splits the words after a number: "million dollars" is (10**6, "dollars").

    Works with and without the spaces, which a canonical answer no longer has.
    """
    for word, factor in MULTIPLIERS.items():
        rest = name.casefold().strip()
        if rest.startswith(word) and not rest.startswith(word + "th"):
            return factor, rest[len(word) :].strip()
    return 1, name


def unit(name: str, power: int = 1) -> tuple[str, int] | None:
    """Names a unit and its power: "square feet" and "ft" with power 2 are both ("ft", 2).

    Returns:
        The unit, or None when it is not in the table (so nothing is known about it).
    """
    name = re.sub(r"[\s.\\]", "", name.casefold())
    for prefix, implied in _POWERS:
        if name.startswith(prefix) and _known(name[len(prefix) :]):
            name, power = name[len(prefix) :], implied
            break
    known = _known(name)
    return (known, power) if known else None


def _known(name: str) -> str | None:
    return KNOWN.get(name) or (KNOWN.get(name[:-1]) if name.endswith("s") else None)
