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
from bacr_grading.numbers import Number, parse_number, trailing_unit, with_bare_unit

RELATION = re.compile(r"[=<>]|\\(?:leq?|geq?|neq?|lt|gt|in|approx|equiv)(?![A-Za-z])")
_ASSIGNMENT = re.compile(
    r"(?P<name>\\?[A-Za-z]+?(?:_(?:\w|\{\w+\}))?)(?P<sign>=(?!=)|\\in(?=\\\{))"
)
_BASED = re.compile(r"(-?[0-9A-Za-z]+(?:\.[0-9A-Za-z]+)?)_(?:(\d)|\{(\d+)\})\Z")
_GROUPED = re.compile(r"(?<!\d)\d{1,3},\d{3}(?!\d)")
_MATRIX = re.compile(rf"\\begin\{{([pb]?matrix)\}}(.*?){ROW_END}?\\end\{{\1\}}\Z", re.DOTALL)
_WRAPPED_LIST = re.compile(r"\\text\{([^{}]*,[^{}]*)\}\Z")
_OPEN = "([{"
_CLOSE = ")]}"
_COLON = re.compile(":")
_CLOCK_PART = re.compile(r"0\d")
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
        self.key = canonical(text)

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
        if digits.isalpha() and (len(digits) == 1 or not _are_digits(digits, int(base))):
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
        if self.key.count(":") < 2:
            return None
        parts = split(self.key, _COLON)
        if len(parts) < 3 or not all(parts):
            return None
        if any(map(_CLOCK_PART.match, parts)):
            return None
        return tuple(map(ParsedAnswer, parts))

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


def _are_digits(text: str, base: int) -> bool:
    """True if letters such as "ff" are digits of a base such as 16."""
    return 2 <= base <= 36 and all(int(letter, 36) < base for letter in text)


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
    return Items(kind, tuple(map(ParsedAnswer, parts))) if len(parts) > 1 else None


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
