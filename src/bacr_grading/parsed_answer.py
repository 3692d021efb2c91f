"""Parses an answer as a number, words, a list, a ratio or an assignment.

Called by `judge` and by the modules that compare answers. Nothing is evaluated. The interpretations
are documented in docs/grading.md ("Comparing").
"""

import re
from functools import cached_property
from typing import NamedTuple

from bacr_grading.normalize import (
    LIST_COMMA,
    ROW_END,
    Words,
    canonical,
    clean,
    split_unit,
    words,
)
from bacr_grading.notation import are_digits
from bacr_grading.numbers import Number, parse_number, trailing_unit, with_bare_unit

RELATION = re.compile(r"[=<>]|\\(?:leq?|geq?|neq?|lt|gt|in|approx|equiv)(?![A-Za-z])")
# Words and signs between alternatives.
EITHER = re.compile(r"(?<![A-Za-z\\])or(?![A-Za-z])|\\vee(?![A-Za-z])")
# A variable such as "x", "\theta" or "x_{12}".
NAME = r"\\?[A-Za-z]+(?:_(?:\w|\{\w+\}))?"
_NAME = re.compile(NAME)
_NAMES = re.compile(r"\(([^()=]*)\)=")
_ASSIGNMENT = re.compile(rf"(?P<name>{NAME})(?P<sign>=(?!=)|\\in(?=\\\{{))")
_BASED = re.compile(r"(-?[0-9A-Za-z]+(?:\.[0-9A-Za-z]+)?)_(?:(\d)|\{(\d+)\})\Z")
_GROUPED = re.compile(r"(?<!\d)\d{1,3},\d{3}(?!\d)")
_MATRIX = re.compile(rf"\\begin\{{([pb]?matrix)\}}(.*?){ROW_END}?\\end\{{\1\}}\Z", re.DOTALL)
_WRAPPED_LIST = re.compile(r"\\text\{([^{}]*,[^{}]*)\}\Z")
_OPEN = "([{"
_CLOSE = ")]}"
_COLON = re.compile(":")
_CLOCK_PART = re.compile(r"0\d")
# A time of day such as "10:30", "4:51:06\text{p.m.}" or "5pm".
_CLOCK = re.compile(
    r"(?P<hour>[01]?\d|2[0-4])(?::(?P<minute>[0-5]\d)(?::(?P<second>[0-5]\d))?)?"
    r"(?:\\text\{)?(?:(?P<half>[ap])\.?m\.?)?\}?",
    re.IGNORECASE,
)
_PLUS_MINUS = re.compile(r"\s*\\pm(?![A-Za-z])\s*")
_MINUS_PLUS = re.compile(r"\\mp(?![A-Za-z])")
_SET = re.compile(r"([^{}]*\\\{)((?:[^\\]|\\[^{}])*)(\\\}[^{}]*)")
_SIZES = re.compile(r"\\(?:left|right)(?![A-Za-z])\s*\.?")
# The end of a text after which a sign is not an operation.
_UNARY = re.compile(r"(?:\A|[=<>(\[{,;|]|\\(?:ne|le|ge|in|to|approx|cdot|times))\s*\Z")
# A comma or semicolon that is not a thousands separator.
_MEMBER_END = re.compile(r"(?<!\d),|,(?!\d{3}(?!\d))|;")
_COMMA = re.compile(f"[,{LIST_COMMA}]")
_SEMICOLON = re.compile(";")


class Items(NamedTuple):
    """The members of a list, tuple, interval, set or matrix.

    Attributes:
      kind: "list", "set", "matrix [2, 2]" (with the length of each row), or the opening and closing
        bracket of a tuple or interval, such as "(]".
      parts: the members. The entries of a matrix are in row-major order.
    """

    kind: str
    parts: tuple["ParsedAnswer", ...]


class Assignment(NamedTuple):
    """An answer such as "x = 5"."""

    name: str
    value: "ParsedAnswer"


class Clock(NamedTuple):
    """A time of day.

    Attributes:
      time: hour, minute and second, as written.
      half: "a" for a.m., "p" for p.m., or None if missing.
    """

    time: tuple[int, int, int]
    half: str | None


class ParsedAnswer:
    """An answer and its interpretations as a number, words, a list and so on.

    Each interpretation is a property that is parsed on first access and then cached.

    Attributes:
      text: the answer after `normalize.clean`.
      source: prose that contains the answer. Only math-verify can extract the answer from it. The
        empty string if `text` is the answer itself.
      key: the canonical form of `text`. Equivalent spellings have the same key.
    """

    def __init__(self, text: str, source: str = ""):
        self.text = text
        self.source = source
        self.key = canonical(both_signs(text))

    @cached_property
    def number(self) -> Number | None:
        """The answer parsed as a number, or None if the answer is not a number."""
        number = parse_number(self.key)
        if number is not None or not self.text[-1:].isalpha():
            return number
        number_and_words = split_unit(self.text)
        if number_and_words is None:
            return None
        digits, unit_words = number_and_words
        number = parse_number(canonical(digits))
        if number is None or number.unit is not None:
            return None
        return with_bare_unit(number, unit_words)

    @cached_property
    def unit(self) -> tuple[str, int] | None:
        """The name and power of the unit at the end of the answer, or None without a known unit."""
        if self.number is not None:
            return self.number.unit
        return trailing_unit(self.text, self.key)

    @cached_property
    def words(self) -> Words | None:
        """The answer parsed as words, or None if the answer does not consist of words."""
        return words(self.key)

    @cached_property
    def based(self) -> tuple[str, str] | None:
        """The digits and the base of a number such as 204_5, or None if the answer is not one."""
        match = _BASED.match(self.key)
        if match is None:
            return None
        base = match[2] or match[3]
        digits = match[1].casefold()
        # "V_1" and "x_{12}" are variables, but "FF_{16}" is a number.
        if digits.isalpha() and not are_digits(digits, base):
            return None
        return digits, base

    @cached_property
    def items(self) -> Items | None:
        """The members of a list, tuple, interval, set or matrix, or None for any other answer."""
        return _items(self.key)

    @cached_property
    def ratio(self) -> tuple["ParsedAnswer", ...] | None:
        """The members of a ratio with at least three members, such as 2:3:5, or None otherwise.

        A time of day such as 10:05:00 is not a ratio.
        """
        if self.key.count(":") < 2 or self.clock or self.items:
            return None
        parts = split(self.key, _COLON)
        if len(parts) < 3 or not all(parts):
            return None
        if any(map(_CLOCK_PART.match, parts)):
            return None
        return tuple(map(ParsedAnswer, parts))

    @cached_property
    def clock(self) -> Clock | None:
        """The time of day such as 10:30 or 5 p.m., or None for any other answer.

        Numbers such as 1:15:30 are a ratio, unless one has a leading zero or a.m. or p.m. follows.
        """
        match = _CLOCK.fullmatch(self.key)
        if match is None:
            return None
        hour, minute, second, half = match.group("hour", "minute", "second", "half")
        has_leading_zero = any(map(_CLOCK_PART.match, self.key.split(":")))
        if half is None and (minute is None or (second and not has_leading_zero)):
            return None
        time = (int(hour), int(minute or 0), int(second or 0))
        return Clock(time, half.casefold() if half else None)

    @cached_property
    def named(self) -> dict[str, "ParsedAnswer"] | None:
        r"""The values of several variables, such as "x = 1, y = 2" or "(x,y) = (1,2)", or None.

        "x = 1, x = 2" and "x = 1 \text{ or } y = 2" do not have one value for each variable.
        """
        tuple_names = _NAMES.match(self.key)
        if tuple_names:
            names = tuple_names[1].split(",")
            items = ParsedAnswer(self.key[tuple_names.end() :]).items
            if items is None or items.kind != "()" or not all(map(_NAME.fullmatch, names)):
                return None
            values = list(items.parts)
        else:
            items = self.items
            if items is None or items.kind not in ("list", "set", "()") or EITHER.search(self.text):
                return None
            assignments = [part.assignment for part in items.parts if part.assignment]
            if len(assignments) < len(items.parts):
                return None
            names = [assignment.name for assignment in assignments]
            values = [assignment.value for assignment in assignments]
        # x_{1} is another spelling of x_1.
        names = [re.sub(r"[{}]", "", name) for name in names]
        if len(set(names)) < len(names) or len(names) != len(values):
            return None
        return dict(zip(names, values, strict=True))

    @cached_property
    def assignment(self) -> Assignment | None:
        r"""The variable and the value of an answer such as "x = 5" or "x \in \{3, 5\}", or None."""
        match = _ASSIGNMENT.match(self.key)
        if match is None or RELATION.search(self.key, match.end()):
            return None
        _, _, value = self.text.partition(match["sign"])
        return Assignment(match["name"], ParsedAnswer(value.strip()))


def read(answer: str) -> ParsedAnswer:
    r"""Cleans and parses the content of `\boxed{...}` or of an `<answer>` tag."""
    return ParsedAnswer(clean(answer))


def both_signs(text: str) -> str:
    r"""Replaces a `\pm` of an answer by both signs: `1\pm\sqrt2` becomes `1+\sqrt2,1-\sqrt2`.

    In a list or set, the members with a sign are repeated. Signs that can depend on each other are
    not replaced: two in the same member, `\pm` and `\mp`, or the signs of two equations.
    """
    count = len(_PLUS_MINUS.findall(text)) if "\\pm" in text else 0
    if not count or _MINUS_PLUS.search(text) or (count > 1 and "=" in text):
        return text
    text = _SIZES.sub("", text)
    enclosed = _SET.fullmatch(text)
    before, content, after = enclosed.groups() if enclosed else ("", text, "")
    members: list[str] = []
    for member in split(content, _MEMBER_END):
        sides = _PLUS_MINUS.split(member)
        if len(sides) == 2:
            plus = "" if _UNARY.search(sides[0]) else "+"
            members += [plus.join(sides), "-".join(sides)]
        else:
            members.append(member)
    return before + ",".join(members) + after


def _items(key: str) -> Items | None:
    """Splits a canonical answer into its members, or returns None if it has fewer than two."""
    matrix = _MATRIX.match(key.removeprefix("(").removesuffix(")"))
    if matrix:
        return _matrix_items(matrix[2])
    wrapped = _WRAPPED_LIST.match(key)
    if wrapped:
        key = wrapped[1]
    kind = "list"
    inner = key
    if len(key) > 2 and _encloses(key):
        if key.startswith("\\{"):
            kind = "set"
            inner = key[2:-2]
        else:
            kind = key[0] + key[-1]
            inner = key[1:-1]
    elif _GROUPED.search(key):
        # "1,000,7" is ambiguous: it can mean 1000 and 7, or 1, 000 and 7.
        return None
    parts = _split_list(inner)
    if len(parts) < 2:
        return None
    members = tuple(map(ParsedAnswer, parts))
    return Items(kind, members)


def _matrix_items(content: str) -> Items:
    rows = [row.split("&") for row in content.split(ROW_END)]
    row_lengths = [len(row) for row in rows]
    cells = [cell for row in rows for cell in row]
    return Items(f"matrix {row_lengths}", tuple(map(ParsedAnswer, cells)))


def _encloses(key: str) -> bool:
    """True if a single pair of brackets encloses the whole answer."""
    if key.startswith("\\{"):
        return key.endswith("\\}") and "\\}" not in key[2:-2]
    if key[0] not in "([" or key[-1] not in ")]":
        return False
    depth = 0
    for position, char in enumerate(key):
        depth += (char in _OPEN) - (char in _CLOSE)
        if not depth:
            return position == len(key) - 1
    return False


def split(text: str, separator: re.Pattern[str]) -> list[str]:
    """Splits a text at every match of the separator that is not inside brackets."""
    parts: list[str] = []
    depth = 0
    position = 0
    start = 0
    for match in separator.finditer(text):
        between = text[position : match.start()]
        depth += sum(map(between.count, _OPEN)) - sum(map(between.count, _CLOSE))
        position = match.start()
        if not depth:
            parts.append(text[start : match.start()])
            start = match.end()
    return [*parts, text[start:]]


def _split_list(text: str) -> list[str]:
    """Splits a text at commas or at semicolons.

    A text with both separators is ambiguous and is returned as a single part.
    """
    by_comma = split(text, _COMMA)
    by_semicolon = split(text, _SEMICOLON)
    if len(by_comma) > 1 and len(by_semicolon) > 1:
        return [text]
    return max(by_comma, by_semicolon, key=len)
