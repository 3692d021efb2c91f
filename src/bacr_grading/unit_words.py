"""Which words after a number only name what it counts, and so may be left out of an answer."""

import re

from bacr_grading.normalize import split_multiplier, unit

# Words may follow each other ("square feet"), and "miles per hour" or "km/h" has two parts.
_PART = re.compile(r"\s*(?:/|\bper\b)\s*")
# Powers and brackets of a product of units: "kg m/s^2", "J/(kg K)".
_AROUND = re.compile(r"\^\s*\{?-?\d+\}?|[()*~{}]|\\cdot")
_WORDS = re.compile(r"[A-Za-z]+\.?(?:\s+[A-Za-z]+\.?){0,3}")
MOST_UNKNOWN = 2

# What may follow the thing that is counted, or stand alone: "18 years old", "18 left".
_TRAILING = frozenset("old left total each long tall wide deep high remaining altogether".split())  # noqa: SIM905
# Things that are counted without a plural s.
_COUNTED = frozenset(
    """
    baht children data deer dice feet fish franc geese grandchildren men mice people percent peso
    ruble rupee sheep teeth women won yen yuan
    """.split()  # noqa: SIM905
)
# Units of the sciences, which no school problem's table has; compared without case.
_SCIENTIFIC = frozenset(
    """
    a ampere amp angstrom atm au bar c cal coulomb dyne erg ev f farad g gauss gev gy h henry hz j
    joule k kcal kelvin kev khz kj kn kpa kpc kv kw kwh lm lux lx ly m mev mhz mol mole mpc ms mw n
    newton nm ns ohm pa pascal pc ph s sr t tesla torr v volt w watt wb weber
    """.split()  # noqa: SIM905
)
# Words that could say more than what is counted: numbers and shares, how sure one is, whether,
# comparisons, and all that joins two answers. The plurals and the adverbs that would otherwise
# pass for a thing that is counted are the ones that matter.
_NEVER = frozenset(
    """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
    sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety
    once twice thrice double doubled triple tripled half halves third thirds quarter quarters
    fourth fourths fifth fifths sixth sixths seventh sevenths eighth eighths ninth ninths tenth
    tenths hundredth hundredths thousandth thousandths millionth millionths billionth billionths
    first hundred squared cubed squares cubes eins sechs trois dos tres seis dois zes
    plus minus least most under over below above within between beyond minimum maximum
    about around roughly approx like versus unless perhaps maybe guess guesses possibly
    other others else otherwise either neither nor not never none yes nope false true
    unknown unsure sometimes always besides instead thus hence also and but then than except
    is was has does this his its us as alias alternatives options choices guesswork doubts
    oder ou vel aut und sowie ossia sive
    """.split()  # noqa: SIM905
)


def names_what_is_counted(words: str, reference: str = "") -> bool:
    """Whether words after a number are a unit, or the things counted, and say nothing else.

    True for units of the table, multipliers, plurals and a few nouns without one, with up to two
    words in front or "old", "left" and the like behind, and always for the words of the reference;
    False where a word could be another answer, a doubt or a negation.
    """
    text = " ".join(_AROUND.sub(" ", words).split()).strip(".").strip()
    if not text or text.casefold() == reference.strip().strip(".").casefold():
        return True
    parts = _PART.split(text)
    if len(parts) > 2:
        return False
    return _counted(parts[0], plural=True) and all(_counted(p, plural=False) for p in parts[1:])


def _counted(text: str, *, plural: bool) -> bool:
    if _is_unit(text) or not text:
        return True
    if not _WORDS.fullmatch(text):
        return False
    names = [name.rstrip(".").casefold() for name in split_multiplier(text)[1].split()]
    if any(_denied(name) for name in names):
        return False
    while names and names[-1] in _TRAILING:
        names.pop()
    unknown = [name for name in names if not _is_unit(name)]
    # A letter by itself is a variable or one of several choices.
    if len(unknown) > MOST_UNKNOWN or any(len(name) == 1 for name in unknown):
        return False
    return not names or not plural or _is_unit(names[-1]) or _plural(names[-1])


def _is_unit(name: str) -> bool:
    return unit(name) is not None or name.casefold() in _SCIENTIFIC


def _denied(name: str) -> bool:
    if _is_unit(name):
        return False
    singular = {name, name[:-1], name[:-2], f"{name[:-3]}y"}
    return bool(_NEVER & singular) or name.endswith("ly")


def _plural(name: str) -> bool:
    ending = name.endswith("s") and not name.endswith(("ss", "us", "is")) and len(name) > 3
    return ending or name in _COUNTED
