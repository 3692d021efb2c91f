r"""Finds arithmetic that an answer leaves undone.

The strict mode pays for a number and not for a copy of the question: where the reference is a
number, `7\cdot 8` is no answer for 56 (docs/grading.md, "Evaluated answers"). Reads canonical
answers; evaluates nothing, so that its time is linear in the length of an answer.
"""

import math
import re
from dataclasses import dataclass
from fractions import Fraction

from bacr_grading.compare import Answer
from bacr_grading.normalize import canonical, split_unit

MOST_CHARS = 1000
MOST_DEPTH = 24
# Beyond this a root is not examined for factors.
LARGEST_RADICAND = 10**9

_TOKEN = re.compile(
    r"""
    (?P<number>(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)
      (?:\\overline\{\d+\}|\\overline\d)?(?:[eE][-+]?\d+)?(?:_(?:\d|\{\d+\}))?)
    | (?P<command>\\[A-Za-z]+)
    | (?P<letter>[A-Za-z])
    | (?P<sign>[-+*/^_(){}\[\]|!%°$€£,:]) | (?P<blank>\ )
    """,
    re.VERBOSE,
)
_UNITS = re.compile(r"(?:[*/]?\\text\{[^{}]*\}(?:\^(?:\d|\{-?\d+\}))?)+\Z")
_PLAIN = re.compile(r"-?[\d,.]+%?")
_LITERAL = re.compile(r"-?\d+")
_FAMILIES = {
    name: family
    for family, names in {
        "logarithm": "log ln lg",
        "trigonometry": "sin cos tan cot sec csc sinh cosh tanh",
        "angle": "arcsin arccos arctan arccot arcsec arccsc",
        "exponential": "exp",
        "divisor": "gcd lcm",
        "extremum": "max min",
    }.items()
    for name in names.split()
}
_CONSTANTS = {"\\pi": "pi", "\\infty": "infinity", "\\phi": "phi", "\\varphi": "phi"}
_LETTERS = {"e": "e", "i": "i"}
_OPENED = {"(": ")", "[": "]", "{": "}"}
_ROUNDED = {"\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
RATIONAL = ""


class _NotConstant(Exception):
    """The text holds a variable, or a sign that is not arithmetic."""


@dataclass(frozen=True, slots=True)
class _Part:
    r"""A part of an expression.

    Attributes:
      kind: "" for a rational number, else the irrational factor: two parts of one kind can be
        added (3 and 4; `2\sqrt{3}` and `\sqrt{3}`).
      value: the number, if the part is one number as written.
      power_of_ten: it is a power of ten, as in scientific notation.
      fraction: it is a fraction of two integers.
    """

    kind: str
    value: Fraction | None = None
    power_of_ten: bool = False
    fraction: bool = False


def operations(answer: Answer) -> frozenset[str] | None:
    r"""Returns the operations with numbers that an answer leaves undone.

    An empty set: the answer is a number, or a list, tuple, interval or matrix of numbers, in a
    usual exact form. `2\cdot 3+\sqrt{4}` gives product, root and sum. None: the answer is no
    constant.
    """
    if _PLAIN.fullmatch(answer.key) or answer.based or (answer.words and answer.words[1]):
        return frozenset()
    if len(answer.key) > MOST_CHARS:
        return None
    if answer.assignment:
        return operations(answer.assignment[1])
    if "\\cup" in answer.key:
        parts = tuple(map(Answer, answer.key.split("\\cup")))
    else:
        parts = answer.items.parts if answer.items else ()
    if parts:
        members = [operations(part) for part in parts]
        known = [member for member in members if member is not None]
        return frozenset().union(*known) if len(known) == len(members) else None
    split = split_unit(answer.text) if answer.text[-1:].isalpha() else None
    key = _UNITS.sub("", canonical(split[0]) if split else answer.key)
    try:
        return _Scanner(key).scan()
    except _NotConstant:
        return frozenset() if answer.number else None


class _Scanner:
    """Reads one expression from left to right and notes what could still be computed."""

    def __init__(self, key: str):
        self.tokens: list[str] = []
        self.undone: set[str] = set()
        self.position = 0
        self.depth = 0
        position = 0
        while position < len(key):
            match = _TOKEN.match(key, position)
            if match is None:
                raise _NotConstant
            if match.lastgroup != "blank":
                self.tokens.append(match.group())
            position = match.end()

    def scan(self) -> frozenset[str]:
        self.sum()
        if self.position < len(self.tokens):
            raise _NotConstant
        return frozenset(self.undone)

    def peek(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def take(self, token: str = "") -> str:
        found = self.peek()
        if not found or (token and found != token):
            raise _NotConstant
        self.position += 1
        return found

    def sum(self) -> _Part:
        self.depth += 1
        if self.depth > MOST_DEPTH:
            raise _NotConstant
        negative = False
        while self.peek() in ("+", "-", "\\pm", "\\mp"):
            negative = self.take() == "-"
        first = self.product()
        terms = [first]
        while self.peek() in ("+", "-", "\\pm", "\\mp"):
            self.take()
            if self.peek() == "-":
                self.take()
            terms.append(self.product())
        self.depth -= 1
        if len(terms) == 1:
            value = -first.value if negative and first.value is not None else first.value
            return _Part(first.kind, value, first.power_of_ten, first.fraction)
        kinds = [term.kind for term in terms]
        if len(set(kinds)) < len(kinds):
            self.undone.add("sum")
        return _Part("(" + "+".join(sorted(kinds)) + ")" if any(kinds) else RATIONAL)

    def product(self) -> _Part:
        factors = [self.factor()]
        divided = False
        while True:
            token = self.peek()
            if token in ("*", "\\div", "/", ":"):
                self.take()
                if token == "*":
                    factors.append(self.factor())
                else:
                    divided = True
                    factors[-1] = self.quotient(factors[-1], self.factor())
            elif self.starts_factor(token):
                following = self.factor()
                whole = factors[-1].value
                mixed = whole is not None and whole.denominator == 1 and following.fraction
                if mixed and len(factors) == 1 and not divided:
                    factors[-1] = _Part(RATIONAL)
                else:
                    factors.append(following)
            else:
                break
        return self.multiplied(factors) if len(factors) > 1 else factors[0]

    def starts_factor(self, token: str) -> bool:
        if token in ("(", "{", "[", "\\frac", "\\sqrt", "\\binom") or token in _CONSTANTS:
            return True
        return token[:1].isalnum() or token[1:] in _FAMILIES or token in _ROUNDED

    def multiplied(self, factors: list[_Part]) -> _Part:
        rational = [factor for factor in factors if factor.kind == RATIONAL]
        irrational = [factor.kind for factor in factors if factor.kind != RATIONAL]
        scientific = len(rational) == 2 and rational[1].power_of_ten
        if len(rational) > 1 and not scientific:
            self.undone.add("product")
        roots = sum(kind.startswith("root") for kind in irrational)
        sums = sum(kind.startswith("(") for kind in irrational)
        if roots > 1 or sums > 1 or len(set(irrational)) < len(irrational):
            self.undone.add("product")
        return _Part("*".join(sorted(irrational)))

    def quotient(self, top: _Part, bottom: _Part) -> _Part:
        both = (top.value, bottom.value)
        integers = [value for value in both if value is not None and value.denominator == 1]
        fraction = len(integers) == 2
        if fraction:
            if abs(integers[1]) <= 1 or math.gcd(int(integers[0]), int(integers[1])) > 1:
                self.undone.add("quotient")
        elif top.kind == bottom.kind and not self.undone:
            self.undone.add("quotient")
        kinds = [part.kind for part in (top, bottom) if part.kind]
        return _Part("*".join(sorted(kinds)), fraction=fraction)

    def factor(self) -> _Part:
        part = self.atom()
        while True:
            token = self.peek()
            if token == "^":
                self.take()
                part = self.power(part, self.exponent())
            elif token == "!":
                self.take()
                self.undone.add("factorial")
                part = _Part(RATIONAL)
            elif token in ("%", "°") and token:
                self.take()
            else:
                return part

    def exponent(self) -> _Part:
        if self.peek() in ("{", "("):
            return self.group()
        return self.atom()

    def power(self, base: _Part, exponent: _Part) -> _Part:
        whole = exponent.value is not None and exponent.value.denominator == 1
        if exponent.value in (0, 1):
            self.undone.add("power")
        if base.value == 10 and whole:
            return _Part(RATIONAL, power_of_ten=True)
        if base.kind in ("e", "pi", "phi") or base.kind == "infinity":
            return _Part(f"{base.kind}^{self.position}")
        if base.kind == RATIONAL and not whole and not _is_power(base.value):
            return _Part(f"power{self.position}")
        self.undone.add("power")
        return _Part(base.kind)

    def group(self) -> _Part:
        closing = _OPENED[self.take()]
        part = self.sum()
        self.take(closing)
        return part

    def atom(self) -> _Part:
        token = self.peek()
        if token in _OPENED:
            return self.group()
        self.take()
        if token[:1].isdigit() or token[:1] == ".":
            return _literal(token)
        if token in ("$", "€", "£"):
            return self.atom()
        if token in _CONSTANTS:
            return _Part(_CONSTANTS[token])
        if token in _LETTERS:
            return _Part(_LETTERS[token])
        if token == "\\frac":
            return self.quotient(self.argument(), self.argument())
        if token == "\\sqrt":
            return self.root()
        if token == "\\binom":
            self.undone.add("binomial")
            self.argument()
            self.argument()
            return _Part(RATIONAL)
        if token == "|":
            self.undone.add("absolute value")
            part = self.sum()
            self.take("|")
            return part
        if token in _ROUNDED:
            self.undone.add("rounding")
            self.sum()
            self.take(_ROUNDED[token])
            return _Part(RATIONAL)
        if token[1:] in _FAMILIES:
            return self.function(token[1:])
        raise _NotConstant

    def argument(self) -> _Part:
        return self.group() if self.peek() == "{" else self.atom()

    def function(self, name: str) -> _Part:
        self.undone.add(_FAMILIES[name])
        start = self.position
        while self.peek() in ("^", "_") and self.peek():
            self.take()
            self.exponent()
        if _FAMILIES[name] in ("divisor", "extremum"):
            self.take("(")
            self.sum()
            while self.peek() == ",":
                self.take()
                self.sum()
            self.take(")")
            return _Part(RATIONAL)
        self.factor()
        return _Part(f"{name}{start}")

    def root(self) -> _Part:
        index = 2
        if self.peek() == "[":
            degree = self.group().value
            index = int(degree) if degree is not None and 2 <= degree <= 64 else 0
        start = self.position
        radicand = self.argument()
        value = radicand.value
        text = "".join(self.tokens[start : self.position])
        if value is None:
            return _Part(f"root{index}({text})")
        if index == 0 or value <= 0 or not _is_simplest(value, index):
            self.undone.add("root")
        return _Part(RATIONAL if value == 1 else f"root{index}({text})")


def _literal(token: str) -> _Part:
    digits = token.replace(",", "")
    plain = re.fullmatch(r"\d+\.?\d*|\.\d+", digits)
    return _Part(RATIONAL, Fraction(digits.rstrip(".")) if plain else None)


def _is_power(value: Fraction | None) -> bool:
    """True if a base is not a positive integer, or is a square or a cube."""
    if value is None or value.denominator != 1 or value <= 1:
        return True
    roots = [round(int(value) ** (1 / n)) for n in (2, 3)] if value < 1e15 else []
    return any(root**n == value for n, root in zip((2, 3), roots, strict=False))


def _is_simplest(value: Fraction, index: int) -> bool:
    """True if no factor can be taken out of the root of a number."""
    number = (
        abs(value.numerator) if value.denominator == 1 else abs(value.numerator * value.denominator)
    )
    if number > LARGEST_RADICAND:
        return True
    if value.denominator != 1:
        return round(number ** (1 / index)) ** index != number
    factor = 2
    while factor**index <= number:
        if number % factor**index == 0:
            return False
        factor += 1
    return True
