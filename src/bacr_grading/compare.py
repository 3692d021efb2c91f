"""Rule-based comparison of two answers, without a computer algebra system.

`judge` calls this module first and sends the pairs that the rules cannot decide to math-verify. The
rules are documented in docs/grading.md ("Comparing").
"""

import re
from collections.abc import Callable
from functools import cached_property, partial
from typing import NamedTuple

from bacr_grading.normalize import (
    LIST_COMMA,
    ROW_END,
    Words,
    canonical,
    clean,
    split_unit,
    unmarked,
    words,
)
from bacr_grading.numbers import Number, clash, equal, parse_number, trailing_unit, with_bare_unit

_ASSIGNMENT = re.compile(r"(\\?[A-Za-z]+(?:_(?:\w|\{\w+\}))?)=(?!=)")
_RELATION = re.compile(r"[=<>]|\\(?:leq?|geq?|neq?|lt|gt|in|approx|equiv)(?![A-Za-z])")
_BASED = re.compile(r"(-?[0-9A-Za-z]+(?:\.[0-9A-Za-z]+)?)_(?:(\d)|\{(\d+)\})\Z")
_SUBSCRIPT = re.compile(r"\d_(?:(\d)|\{(\d+)\})")
_GROUPED = re.compile(r"(?<!\d)\d{1,3},\d{3}(?!\d)")
_DECIMAL_COMMA = re.compile(r"-?\d+,\d+\Z")
_TIGHT_COMMA = re.compile(r"\d(?:,|\{,\})\d")
_MATRIX = re.compile(rf"\\begin\{{([pb]?matrix)\}}(.*?){ROW_END}?\\end\{{\1\}}\Z", re.DOTALL)
_WRAPPED_LIST = re.compile(r"\\text\{([^{}]*,[^{}]*)\}\Z")
_MARKED = re.compile(r"\\text\{([A-Za-z/]+)\}")
_CAPITALS = re.compile(r"\(?[A-Z]{3,}\)?\Z")
_OPEN = "([{"
_CLOSE = ")]}"
_COLON = re.compile(":")
_CLOCK_PART = re.compile(r"0\d")
ELISION = re.compile(r"\\(?:[lcdv]?dots[a-z]?|ddots)(?![A-Za-z])|[…⋯]|\.\s*\.|\betc\b")
# Words and signs that join two equations or inequalities. With `_BOTH`, both must be true. With
# `_EITHER`, at least one must be true.
_BOTH = re.compile(r"(?<![A-Za-z\\])and(?![A-Za-z])|\\wedge(?![A-Za-z])")
_EITHER = re.compile(r"(?<![A-Za-z\\])or(?![A-Za-z])|\\vee(?![A-Za-z])")
_VOWEL = re.compile(r"[aeiouy]", re.IGNORECASE)
# Words with fewer than five letters that models also write in upper case, as in "YES".
_SHORT_WORDS = frozenset("yes no true odd even none dne all both am pm red blue up down".split())  # noqa: SIM905
_ANSWERS = frozenset("answer ans choice option letter".split())  # noqa: SIM905
_SEPARATORS = ",;" + LIST_COMMA
_COMMA = re.compile(f"[,{LIST_COMMA}]")
_SEMICOLON = re.compile(";")

# Maximum number of pairs when comparing two lists. Every member of one list is compared with every
# member of the other list, so the cost is quadratic. Lists with more pairs are compared as strings.
# The longest list in MATH has about twenty members.
MOST_PAIRS = 10_000

# A pair of the verdict and the name of the rule that decided: "number", "string", "list" or
# "symbolic". The verdict is None if only a computer algebra system can decide.
Decision = tuple[bool | None, str]


class Items(NamedTuple):
    """The members of a list, tuple, interval, set or matrix.

    Attributes:
      kind: "list", "set", "matrix [2, 2]" (with the row lengths), or the opening and closing
        bracket of a tuple or interval, such as "(]".
      parts: the members. The cells of a matrix are in row-major order.
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
        """The digits and the base of a number such as 204_5, or None without a base subscript."""
        match = _BASED.match(self.key)
        if match is None:
            return None
        base = match[2] or match[3]
        return match[1].casefold(), base

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
    def joined(self) -> str | None:
        """The word ("and" or "or") that joins the equations or inequalities in this answer.

        None if the answer has no equation or inequality, or contains neither word or both words.
        """
        if not _RELATION.search(self.key):
            return None
        both = bool(_BOTH.search(self.text))
        either = bool(_EITHER.search(self.text))
        if both == either:
            return None
        return "and" if both else "or"

    @cached_property
    def assignment(self) -> Assignment | None:
        """The variable and the value of an answer such as "x = 5", or None for any other answer."""
        match = _ASSIGNMENT.match(self.key)
        if match is None or _RELATION.search(self.key, match.end()):
            return None
        _, _, value = self.text.partition("=")
        return Assignment(match[1], ParsedAnswer(value.strip()))


def read(answer: str) -> ParsedAnswer:
    r"""Cleans and parses the content of `\boxed{...}` or of an `<answer>` tag."""
    return ParsedAnswer(clean(answer))


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


def decide(
    pred: ParsedAnswer, reference: ParsedAnswer, *, lenient: bool, relative_tolerance: float = 0.0
) -> Decision:
    """Compares an answer with its reference by rules.

    Args:
      pred: the model's answer.
      reference: the reference answer.
      lenient: if True, apply the lenient rules of docs/grading.md, otherwise the strict rules.
      relative_tolerance: maximum error of a number, relative to the reference.

    Returns:
      The verdict and the rule that decided: "number", "string" or "list". If no rule can decide,
      the result is (None, "symbolic").
    """
    # The canonical form replaces "and" and "or" by commas, so compare these words separately.
    if "," in pred.key and _joined_otherwise(pred, reference):
        return False, "string"
    if pred.key and pred.key == reference.key:
        return True, "number" if reference.number else "string"

    if pred.number and reference.number:
        is_equal = equal(
            pred.number, reference.number, lenient=lenient, relative_tolerance=relative_tolerance
        )
        return is_equal, "number"
    if ELISION.search(pred.key) or ELISION.search(reference.key):
        return _same_sequence(pred, reference, lenient), "list"
    based = _decide_based(pred, reference, lenient)
    if based is not None:
        return based, "number"
    if pred.ratio or reference.ratio:
        return _decide_ratio(pred, reference)
    prose = _decide_words(pred, reference)
    if prose is not None:
        return prose, "string"
    if _chooses(pred, reference) or _chooses(reference, pred):
        return False, "string"
    compare = partial(decide, lenient=lenient, relative_tolerance=relative_tolerance)
    values = _assigned_values(pred, reference)
    if values is not None:
        return compare(*values)
    if pred.items and reference.items:
        if _separators(pred.key) * _separators(reference.key) > MOST_PAIRS:
            return _same_spelling(pred.items, reference.items), "list"
        return _decide_items(pred.items, reference.items, compare), "list"
    same = partial(equal, lenient=lenient, relative_tolerance=relative_tolerance)
    if pred.number and reference.items:
        return _decide_mixed(pred.number, reference, same, comma=lenient), "list"
    if pred.items and reference.number:
        # `_decide_mixed` passes the number as the first argument, but `same` expects the answer
        # first, and here the number is the reference.
        return _decide_mixed(
            reference.number, pred, lambda number, member: same(member, number), comma=True
        ), "list"
    if clash(pred.unit, reference.unit, lenient=lenient):
        return False, "number"
    if _MARKED.sub(r"\1", pred.key) == _MARKED.sub(r"\1", reference.key):
        return True, "string"
    return None, "symbolic"


def _decide_based(pred: ParsedAnswer, reference: ParsedAnswer, lenient: bool) -> bool | None:
    """Compares numbers with base subscripts, so that 204_5 differs from 204_7.

    The answer may omit the base if the reference contains it. Returns None if the rule does not
    apply.
    """
    if reference.based:
        if pred.based:
            return pred.based == reference.based
        return pred.key.casefold() == reference.based[0] if pred.number else None
    if pred.based and reference.number:
        return lenient and pred.based[0] == reference.key.casefold()
    return None


def _decide_words(pred: ParsedAnswer, reference: ParsedAnswer) -> bool | None:
    """Compares two answers if at least one of them consists of words.

    Returns None if no rule decides.
    """
    if pred.words and reference.words:
        if pred.words.letters == reference.words.letters:
            return _same_case(pred, reference)
        # Letters outside of \text{...} may be a product of variables. Three or more upper-case
        # letters are a word or the names of points.
        if pred.words.is_text or reference.words.is_text:
            return False
        if _CAPITALS.match(pred.key) and _CAPITALS.match(reference.key):
            return False
        return None
    if _is_marked_spelling(pred, reference) or _is_marked_spelling(reference, pred):
        return True
    if (pred.number and reference.words) or (pred.words and reference.number):
        return False
    return None


def _is_marked_spelling(marked: ParsedAnswer, other: ParsedAnswer) -> bool:
    r"""True if `marked` is LaTeX text and `other` has the same letters, with or without `\text`."""
    if marked.words is None or not marked.words.is_text:
        return False
    return marked.words.letters == unmarked(other.key)


def _joined_otherwise(pred: ParsedAnswer, reference: ParsedAnswer) -> bool:
    """True if "and" joins the equations or inequalities of one answer, and "or" of the other."""
    if pred.joined is None:
        return False
    if pred.joined == "and" and "\\cup" in reference.key:
        return True
    return reference.joined not in (None, pred.joined)


def _same_case(pred: ParsedAnswer, reference: ParsedAnswer) -> bool:
    """True if two answers with the same letters are equal when case is taken into account.

    Case matters for variables (m and M are different), but not for words ("Monday" and "monday")
    and choices such as "(B)".
    """
    if _is_text_or_choice(pred) or _is_text_or_choice(reference):
        return True
    word = pred.key.rstrip(".")
    target = reference.key.rstrip(".")
    if word == target or word.casefold() in _SHORT_WORDS:
        return True
    # A short string, or a string without a vowel, may be a product of variables.
    shortest_word = 5 if word.isupper() or target.isupper() else 4
    return len(word) >= shortest_word and _VOWEL.search(word) is not None


def _is_text_or_choice(answer: ParsedAnswer) -> bool:
    r"""True for words inside `\text{...}` and for a choice in parentheses such as "(B)"."""
    if answer.words is not None and answer.words.is_text:
        return True
    return "(" in answer.key


def _chooses(equation: ParsedAnswer, choice: ParsedAnswer) -> bool:
    """True if `equation` is an equation such as "x = B" and `choice` is a choice such as "(B)"."""
    if equation.assignment is None or choice.words is None:
        return False
    if len(choice.words.letters) != 1 or not _is_text_or_choice(choice):
        return False
    value = equation.assignment.value.key
    if len(value) != 1 or not value.isalpha():
        return False
    return equation.assignment.name.casefold() not in _ANSWERS


def _decide_ratio(pred: ParsedAnswer, reference: ParsedAnswer) -> Decision:
    """Compares ratios with at least three members. They are equal if they are proportional."""
    if pred.ratio is None or reference.ratio is None:
        if pred.number or reference.number:
            return False, "list"
        return None, "symbolic"
    if len(pred.ratio) != len(reference.ratio):
        return False, "list"
    values = []
    for member, target in zip(pred.ratio, reference.ratio, strict=True):
        if member.number is None or target.number is None:
            return None, "symbolic"
        values.append((member.number.value, target.number.value))
    # The first pair without a zero determines the scale factor between the two ratios.
    pred_scale, reference_scale = next((pair for pair in values if all(pair)), (0, 0))
    if not pred_scale:
        return False, "list"
    return all(p * reference_scale == r * pred_scale for p, r in values), "list"


def _same_sequence(pred: ParsedAnswer, reference: ParsedAnswer, lenient: bool) -> bool:
    """True if two lists that contain an ellipsis, such as "1, 2, ...", agree member by member."""
    if pred.items is None or reference.items is None:
        return False
    if pred.items.kind != reference.items.kind:
        return False
    members = pred.items.parts
    targets = reference.items.parts
    if len(members) != len(targets):
        return False
    for member, target in zip(members, targets, strict=True):
        if member.key != target.key and not _same_number(member, target, lenient):
            return False
    return True


def _same_number(pred: ParsedAnswer, reference: ParsedAnswer, lenient: bool) -> bool:
    if pred.number is None or reference.number is None:
        return False
    return equal(pred.number, reference.number, lenient=lenient)


def _assigned_values(
    pred: ParsedAnswer, reference: ParsedAnswer
) -> tuple[ParsedAnswer, ParsedAnswer] | None:
    """Removes "x =" from one or both answers and returns the values to compare.

    Returns None if neither answer has the form "x = value", if the variables differ, or if one
    answer is an assignment and the other is a different kind of relation.
    """
    if pred.assignment and reference.assignment:
        if pred.assignment.name != reference.assignment.name:
            return None
        return pred.assignment.value, reference.assignment.value
    if pred.assignment and not _RELATION.search(reference.key):
        return pred.assignment.value, reference
    if reference.assignment and not _RELATION.search(pred.key):
        return pred, reference.assignment.value
    return None


def _separators(key: str) -> int:
    """Returns an upper bound on the number of members of a list, including nested lists."""
    return 1 + sum(map(key.count, _SEPARATORS))


def _same_spelling(pred: Items, reference: Items) -> bool:
    """True if the members of two lists are equal strings.

    Lists and sets are compared without regard to order, tuples and intervals in order.
    """
    keys = [part.key for part in pred.parts]
    target_keys = [part.key for part in reference.parts]
    if reference.kind in ("list", "set"):
        return set(keys) == set(target_keys)
    return keys == target_keys


def _decide_items(
    pred: Items, reference: Items, compare: Callable[[ParsedAnswer, ParsedAnswer], Decision]
) -> bool | None:
    """Compares two lists or tuples and returns None if no rule decides.

    Args:
      pred: the members of the answer.
      reference: the members of the reference.
      compare: compares a member of the answer with a member of the reference.
    """
    if pred.kind != reference.kind:
        return None
    if reference.kind in ("list", "set"):
        return _decide_set(pred, reference, compare)
    if len(pred.parts) != len(reference.parts):
        return False
    verdicts = [compare(p, r)[0] for p, r in zip(pred.parts, reference.parts, strict=True)]
    if False in verdicts:
        return False
    return None if None in verdicts else True


def _decide_set(
    pred: Items, reference: Items, compare: Callable[[ParsedAnswer, ParsedAnswer], Decision]
) -> bool | None:
    """Compares two lists without regard to order and repetition.

    The lists are equal if every member of each list equals some member of the other list. Returns
    None if no rule decides.
    """
    rows = [[compare(p, r)[0] for r in reference.parts] for p in pred.parts]
    columns = [list(column) for column in zip(*rows, strict=True)]
    verdicts_by_member = rows + columns
    if all(True in verdicts for verdicts in verdicts_by_member):
        return True
    if any(set(verdicts) == {False} for verdicts in verdicts_by_member):
        return False
    return None


def _decide_mixed(
    number: Number, other: ParsedAnswer, same: Callable[[Number, Number], bool], *, comma: bool
) -> bool | None:
    """Compares a number with a list. They are equal if every member of the list is the number.

    Returns None if no rule decides.

    Args:
      number: the number.
      other: the answer that may be a list.
      same: returns True if two numbers are equal; called with `number` as the first argument.
      comma: parse a list such as "1,5" as a number with a decimal comma if `number` is a decimal.
    """
    if other.items is None:
        return None
    if comma and number.places is not None and _has_decimal_comma(other):
        decimal = parse_number(other.key.replace(",", "."))
        return decimal is not None and same(number, decimal)
    members = [part.number for part in other.items.parts]
    if None in members:
        return None
    if other.items.kind not in ("list", "set"):
        return False
    return all(member and same(number, member) for member in members)


def _has_decimal_comma(answer: ParsedAnswer) -> bool:
    """True for "1,5", but not for "1, 5" and "1 and 5", which have the same canonical form."""
    if not _DECIMAL_COMMA.match(answer.key):
        return False
    return _TIGHT_COMMA.search(answer.text) is not None


def bases_clash(pred: str, reference: str) -> bool:
    """True if two expressions have different base subscripts.

    This check is needed because math-verify ignores base subscripts.
    """
    bases = {digit or digits for digit, digits in _SUBSCRIPT.findall(pred)}
    target_bases = {digit or digits for digit, digits in _SUBSCRIPT.findall(reference)}
    return bool(bases and target_bases and bases != target_bases)
