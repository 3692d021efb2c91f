r"""Finds arithmetic operations that an answer leaves unevaluated.

Used by the strict mode, which does not accept a restatement of the question. If the reference is
56, the answer `7\cdot 8` is not accepted (docs/grading.md, "Evaluated answers"). The answer is only
parsed and never evaluated, so the run time is linear in its length.
"""

import math
import re
from dataclasses import dataclass
from fractions import Fraction

from bacr_grading.normalize import canonical, split_unit
from bacr_grading.parsed_answer import ParsedAnswer

# Maximum length of an answer in characters, and maximum nesting depth of sums. Answers beyond these
# limits are not examined.
MOST_CHARS = 1000
MOST_DEPTH = 24
# Roots of larger numbers are not checked for factors that could be taken out.
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
_SUM_SIGNS = frozenset(["+", "-", "\\pm", "\\mp"])
_ROUNDED = {"\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
RATIONAL = ""


class _NotConstant(Exception):
    """Raised if the text is not a constant, because it contains a variable or an unknown sign."""


@dataclass(frozen=True, slots=True)
class _Operand:
    r"""An operand of an expression.

    Attributes:
      kind: a text that identifies the irrational factor of the operand, such as the root in
        `2\sqrt{3}`, or "" for a rational number. Two operands of the same kind can be added, such
        as 3 and 4, or `2\sqrt{3}` and `\sqrt{3}`.
      value: the value if the operand is a single number, otherwise None.
      power_of_ten: True if the operand is a power of ten, as in scientific notation.
      fraction: True if the operand is a fraction of two integers.
      negative: True if the operand begins with a minus sign, or is a fraction with a minus sign in
        the numerator or in the denominator.
    """

    kind: str
    value: Fraction | None = None
    power_of_ten: bool = False
    fraction: bool = False
    negative: bool = False


def operations(answer: ParsedAnswer) -> frozenset[str] | None:
    r"""Returns the names of the arithmetic operations that an answer leaves unevaluated.

    For example, the result for `2\cdot 3+\sqrt{4}` is {"product", "root", "sum"}. The set is empty
    if the answer is a number in a common exact form, or a list, tuple, interval or matrix of such
    numbers. The result is None if the answer is not a constant.
    """
    if _PLAIN.fullmatch(answer.key) or answer.based:
        return frozenset()
    if answer.words and answer.words.is_text:
        return frozenset()
    if answer.clock and answer.clock.half:
        return frozenset()
    if len(answer.key) > MOST_CHARS:
        return None
    if answer.assignment:
        return operations(answer.assignment.value)
    if "\\cup" in answer.key:
        parts = tuple(map(ParsedAnswer, answer.key.split("\\cup")))
    elif answer.named:
        parts = tuple(answer.named.values())
    else:
        parts = answer.items.parts if answer.items else ()
    if parts:
        undone: frozenset[str] = frozenset()
        for part in parts:
            undone_in_part = operations(part)
            if undone_in_part is None:
                return None
            undone |= undone_in_part
        return undone
    split = split_unit(answer.text) if answer.text[-1:].isalpha() else None
    key = _UNITS.sub("", canonical(split[0]) if split else answer.key)
    try:
        return _Scanner(key).scan()
    except _NotConstant:
        return frozenset() if answer.number else None


class _Scanner:
    """Recursive descent parser that collects the operations an expression leaves unevaluated.

    Every method raises `_NotConstant` if the expression is not a constant.

    Attributes:
      tokens: the tokens of the expression: signs, numbers, letters and LaTeX commands.
      undone: names of the unevaluated operations found so far.
      position: index of the next token.
      depth: nesting depth of sums at the next token.
    """

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
        """Parses the whole expression and returns the names of its unevaluated operations.

        Raises:
          _NotConstant: if the expression is not a constant, or contains text after its end.
        """
        self.sum()
        if self.position < len(self.tokens):
            raise _NotConstant
        return frozenset(self.undone)

    def peek(self) -> str:
        """Returns the next token without consuming it, or "" at the end."""
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def take(self, token: str = "") -> str:
        """Consumes and returns the next token.

        Args:
          token: the token that must be next, or "" to accept any token.
        """
        following = self.peek()
        if not following or (token and following != token):
            raise _NotConstant
        self.position += 1
        return following

    def sum(self) -> _Operand:
        """Parses a sum.

        Records "sum" as unevaluated if two of the terms can be added, and "sign" if two signs
        follow each other, as in "--56" and "-(-56)".
        """
        self.depth += 1
        if self.depth > MOST_DEPTH:
            raise _NotConstant
        first_sign = self.sign()
        first = self.product()
        if first_sign and first.negative:
            self.undone.add("sign")
        terms = [first]
        while self.peek() in _SUM_SIGNS:
            self.sign()
            term = self.product()
            if term.negative:
                self.undone.add("sign")
            terms.append(term)
        self.depth -= 1
        if len(terms) == 1:
            negative = first_sign == "-"
            value = -first.value if negative and first.value is not None else first.value
            return _Operand(
                first.kind, value, first.power_of_ten, first.fraction, negative or first.negative
            )
        kinds = [term.kind for term in terms]
        if len(set(kinds)) < len(kinds):
            self.undone.add("sum")
        if not any(kinds):
            return _Operand(RATIONAL)
        terms_kind = "+".join(sorted(kinds))
        return _Operand(f"({terms_kind})")

    def sign(self) -> str:
        """Parses the signs before a term. Returns the first one, or "" if there are none."""
        signs = []
        while self.peek() in _SUM_SIGNS:
            signs.append(self.take())
        if len(signs) > 1:
            self.undone.add("sign")
        return signs[0] if signs else ""

    def product(self) -> _Operand:
        """Parses a product, with or without multiplication signs, and quotients."""
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
                is_integer = _is_integer(factors[-1].value)
                if is_integer and following.fraction and len(factors) == 1 and not divided:
                    # A mixed fraction, such as 2\frac{1}{2}.
                    factors[-1] = _Operand(RATIONAL)
                else:
                    factors.append(following)
            else:
                break
        return self.multiplied(factors) if len(factors) > 1 else factors[0]

    def starts_factor(self, token: str) -> bool:
        r"""True if a token starts a factor without a multiplication sign, as in `2\pi`."""
        if token in ("(", "{", "[", "\\frac", "\\sqrt", "\\binom") or token in _CONSTANTS:
            return True
        return token[:1].isalnum() or token[1:] in _FAMILIES or token in _ROUNDED

    def multiplied(self, factors: list[_Operand]) -> _Operand:
        """Multiplies two or more factors and records "product" if it is left unevaluated."""
        rational = [factor for factor in factors if factor.kind == RATIONAL]
        irrational = [factor.kind for factor in factors if factor.kind != RATIONAL]
        scientific = len(rational) == 2 and rational[1].power_of_ten
        has_zero = any(factor.value == 0 for factor in rational)
        if has_zero or (len(rational) > 1 and not scientific):
            self.undone.add("product")
        roots = [kind for kind in irrational if kind.startswith("root")]
        sums = [kind for kind in irrational if kind.startswith("(")]
        has_repeated_kind = len(set(irrational)) < len(irrational)
        if has_repeated_kind or len(roots) > 1 or len(sums) > 1:
            self.undone.add("product")
        return _Operand("*".join(sorted(irrational)))

    def quotient(self, top: _Operand, bottom: _Operand) -> _Operand:
        """Divides two operands and records "quotient" if it is not a fraction in lowest terms."""
        values = (top.value, bottom.value)
        numbers = [value for value in values if value is not None and value.denominator == 1]
        fraction = len(numbers) == 2
        if fraction:
            numerator, denominator = map(int, numbers)
            is_in_lowest_terms = math.gcd(numerator, denominator) == 1
            if abs(denominator) <= 1 or not is_in_lowest_terms:
                self.undone.add("quotient")
        elif top.kind == bottom.kind and not self.undone:
            self.undone.add("quotient")
        if top.negative and bottom.negative:
            self.undone.add("sign")
        kinds = [part.kind for part in (top, bottom) if part.kind]
        negative = top.negative or bottom.negative
        return _Operand("*".join(sorted(kinds)), fraction=fraction, negative=negative)

    def factor(self) -> _Operand:
        """Parses an atom and the exponents, factorials, percent and degree signs that follow."""
        part = self.atom()
        while True:
            token = self.peek()
            if token == "^":
                self.take()
                part = self.power(part, self.exponent())
            elif token == "!":
                self.take()
                self.undone.add("factorial")
                part = _Operand(RATIONAL)
            elif token in ("%", "°") and token:
                self.take()
            else:
                return part

    def exponent(self) -> _Operand:
        """Parses an exponent: a group in braces or parentheses, or an atom."""
        if self.peek() in ("{", "("):
            return self.group()
        return self.atom()

    def power(self, base: _Operand, exponent: _Operand) -> _Operand:
        """Returns a power, and records "power" if it should have been evaluated.

        For example, 2^3 should be 8. Powers of 10, e, pi and phi and irrational roots are accepted,
        because they are usual exact forms of a number.
        """
        is_integer = _is_integer(exponent.value)
        if exponent.value in (0, 1):
            self.undone.add("power")
        if base.value == 10 and is_integer:
            return _Operand(RATIONAL, power_of_ten=True)
        if base.kind in ("e", "pi", "phi", "infinity"):
            return _Operand(f"{base.kind}^{self.position}")
        if base.kind == RATIONAL and not is_integer and not _is_power(base.value):
            return _Operand(f"power{self.position}")
        self.undone.add("power")
        return _Operand(base.kind)

    def group(self) -> _Operand:
        """Parses a sum in brackets."""
        closing = _OPENED[self.take()]
        part = self.sum()
        self.take(closing)
        return part

    def atom(self) -> _Operand:
        """Parses a number, constant, bracketed group, fraction, root or function."""
        token = self.peek()
        if token in _OPENED:
            return self.group()
        self.take()
        if token[:1].isdigit() or token[:1] == ".":
            return _literal(token)
        if token in ("$", "€", "£"):
            return self.atom()
        if token in _CONSTANTS:
            return _Operand(_CONSTANTS[token])
        if token in _LETTERS:
            return _Operand(_LETTERS[token])
        if token == "\\frac":
            return self.quotient(self.argument(), self.argument())
        if token == "\\sqrt":
            return self.root()
        if token[1:] in _FAMILIES:
            return self.function(token[1:])
        return self.bracketed(token)

    def bracketed(self, token: str) -> _Operand:
        """Parses the rest of a binomial, absolute value, floor or ceiling after its first token."""
        if token == "\\binom":
            self.undone.add("binomial")
            self.argument()
            self.argument()
            return _Operand(RATIONAL)
        if token == "|":
            self.undone.add("absolute value")
            part = self.sum()
            self.take("|")
            return part
        if token in _ROUNDED:
            self.undone.add("rounding")
            self.sum()
            self.take(_ROUNDED[token])
            return _Operand(RATIONAL)
        raise _NotConstant

    def argument(self) -> _Operand:
        """Parses the argument of a command: a group in braces or a single atom."""
        return self.group() if self.peek() == "{" else self.atom()

    def function(self, name: str) -> _Operand:
        """Parses a function's exponent, base and arguments, and records it as unevaluated."""
        self.undone.add(_FAMILIES[name])
        start = self.position
        while self.peek() in ("^", "_"):
            self.take()
            self.exponent()
        if _FAMILIES[name] in ("divisor", "extremum"):
            self.take("(")
            self.sum()
            while self.peek() == ",":
                self.take()
                self.sum()
            self.take(")")
            return _Operand(RATIONAL)
        self.factor()
        return _Operand(f"{name}{start}")

    def root(self) -> _Operand:
        """Parses the index and radicand of a root and records "root" if it can be simplified."""
        index = 2
        if self.peek() == "[":
            degree = self.group().value
            # An index of 0 marks a root whose degree is not an integer from 2 to 64.
            index = 0
            if degree is not None and 2 <= degree <= 64:
                index = int(degree)
        start = self.position
        radicand = self.argument()
        value = radicand.value
        text = "".join(self.tokens[start : self.position])
        if value is None:
            return _Operand(f"root{index}({text})")
        if index == 0 or value <= 0 or not _is_simplest(value, index):
            self.undone.add("root")
        return _Operand(RATIONAL if value == 1 else f"root{index}({text})")


def _literal(token: str) -> _Operand:
    """Converts a number token into an operand.

    The value is None for repeating decimals, scientific notation and numbers with a base subscript.
    """
    digits = token.replace(",", "")
    is_decimal = re.fullmatch(r"\d+\.?\d*|\.\d+", digits)
    return _Operand(RATIONAL, Fraction(digits.rstrip(".")) if is_decimal else None)


def _is_integer(value: Fraction | None) -> bool:
    return value is not None and value.denominator == 1


def _is_power(value: Fraction | None) -> bool:
    """False if a base is an integer above 1 that is neither a square nor a cube, otherwise True.

    Square and cube roots of such an integer are irrational.
    """
    if value is None or value.denominator != 1 or value <= 1:
        return True
    if value >= 1e15:
        # The root is computed in floating point, which is not exact for larger numbers.
        return False
    for exponent in (2, 3):
        root = round(int(value) ** (1 / exponent))
        if root**exponent == value:
            return True
    return False


def _is_simplest(value: Fraction, index: int) -> bool:
    """True if the root of a number cannot be simplified by taking a factor out of the root.

    Args:
      value: the number below the root sign.
      index: the degree of the root, such as 2 for a square root.
    """
    number = abs(value.numerator * value.denominator)
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
