"""Compares two answers without a computer algebra system, and says when it can't."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar, cast

from bacr_jax.grading import numbers, units
from bacr_jax.grading.normalize import LIST_COMMA, ROW_END, canonical, clean, unmarked, words

_MAX_ITEMS = 64
_MAX_DEPTH = 4
_ASSIGNMENT = re.compile(r"(\\?[A-Za-z]+(?:_(?:\w|\{\w+\}))?)=(?!=)")
_RELATION = re.compile(r"[=<>]|\\(?:le|ge|ne|in|approx|equiv)(?![A-Za-z])")
_BASED = re.compile(r"(-?[0-9A-Za-z]+(?:\.[0-9A-Za-z]+)?)_(?:(\d)|\{(\d+)\})\Z")
_SUBSCRIPT = re.compile(r"\d_(?:(\d)|\{(\d+)\})")
_GROUPED = re.compile(r"(?<!\d)\d{1,3},\d{3}(?!\d)")
_DECIMAL_COMMA = re.compile(r"-?\d+,\d+\Z")
_MATRIX = re.compile(rf"\\begin\{{([pb]?matrix)\}}(.*?){ROW_END}?\\end\{{\1\}}\Z", re.DOTALL)
_WRAPPED_LIST = re.compile(r"\\text\{([^{}]*,[^{}]*)\}\Z")
_OPEN, _CLOSE = "([{", ")]}"
_SEPARATORS = ",;" + LIST_COMMA


_T = TypeVar("_T")


class _Lazy(Generic[_T]):
    """A property computed once. functools.cached_property takes a lock before Python 3.12."""

    def __init__(self, compute: Callable[[Any], _T]):
        self._compute = compute
        self._name = compute.__name__
        self.__doc__ = compute.__doc__

    def __get__(self, owner: Any, kind: type) -> _T:
        if owner is None:
            return cast(_T, self)
        value = owner.__dict__[self._name] = self._compute(owner)
        return value


class Items(NamedTuple):
    """A list, tuple, interval, set or matrix: its brackets and its parts."""

    kind: str
    parts: tuple["Answer", ...]


@dataclass(frozen=True)
class Answer:
    """One answer, read in every way the comparison needs, each computed once and on demand.

    Attributes:
        text: the cleaned answer, LaTeX for a parser.
        depth: how deep inside a list this is.
        source: the running text that it stands for, which only math-verify can search; else "".
    """

    text: str
    depth: int = 0
    source: str = ""

    @_Lazy
    def key(self) -> str:
        """The canonical spelling."""
        return canonical(self.text)

    @_Lazy
    def number(self) -> numbers.Number | None:
        """The number that this answer is, if it is one."""
        number = numbers.parse_number(self.key)
        if number is None and self.text[-1:].isalpha():
            split = units.split_bare(self.text)
            head = numbers.parse_number(canonical(split[0])) if split else None
            if split and head and head.unit is None:
                return numbers.with_bare_unit(head, split[1])
        return number

    @_Lazy
    def integer(self) -> int | None:
        """The value of a bare integer."""
        number = self.number
        if number is None or number != numbers.Number(number.value):
            return None
        return int(number.value) if number.value == int(number.value) else None

    @_Lazy
    def words(self) -> tuple[str, bool] | None:
        """The prose that this answer is, if it is prose."""
        return words(self.key)

    @_Lazy
    def based(self) -> tuple[str, str] | None:
        """Digits and base of a number with a base subscript."""
        match = _BASED.match(self.key)
        return (match[1].casefold(), match[2] or match[3]) if match else None

    @_Lazy
    def items(self) -> Items | None:
        """The parts of a list, tuple, interval, set or matrix."""
        return _items(self.key, self.depth) if self.depth < _MAX_DEPTH else None

    @_Lazy
    def assignment(self) -> tuple[str, "Answer"] | None:
        """Variable and value of "x = 5"."""
        match = _ASSIGNMENT.match(self.key)
        if match is None or _RELATION.search(self.key, match.end()):
            return None
        return match[1], Answer(self.text.split("=", 1)[1].strip(), self.depth)


def read(answer: str) -> Answer:
    """Reads what a box or tag holds."""
    return Answer(clean(answer))


def _items(key: str, depth: int) -> Items | None:
    matrix = _MATRIX.match(key.removeprefix("(").removesuffix(")"))
    if matrix:
        rows = [row.split("&") for row in matrix[2].split(ROW_END)]
        cells = [cell for row in rows for cell in row]
        if "\\begin" in matrix[2] or len(cells) > _MAX_ITEMS:
            return None
        return _make(f"matrix {[len(row) for row in rows]}", cells, depth)
    wrapped = _WRAPPED_LIST.match(key)
    if wrapped:
        key = wrapped[1]
    bracketed = len(key) > 2 and _encloses(key)
    kind = "list"
    inner = key
    if bracketed and key.startswith("\\{"):
        kind, inner = "set", key[2:-2]
    elif bracketed:
        kind, inner = key[0] + key[-1], key[1:-1]
    elif _GROUPED.search(key):
        return None  # "1,000,7": two lists fit
    parts = _split(inner)
    if parts is None or len(parts) < 2 or len(parts) > _MAX_ITEMS or not all(parts):
        return None
    return _make(kind, parts, depth)


def _make(kind: str, parts: list[str], depth: int) -> Items:
    return Items(kind, tuple(Answer(part, depth + 1) for part in parts))


def _encloses(key: str) -> bool:
    """Whether one pair of brackets holds the whole answer."""
    if key.startswith("\\{"):
        return key.endswith("\\}") and "\\}" not in key[2:-2]
    if key[0] not in "([" or key[-1] not in ")]":
        return False
    depth = 0
    for place, char in enumerate(key):
        depth += (char in _OPEN) - (char in _CLOSE)
        if not depth:
            return place == len(key) - 1
    return False


def _split(text: str) -> list[str] | None:
    """Splits at the separators outside all brackets; None when commas and semicolons mix."""
    parts: list[str] = []
    separators = set()
    depth = start = 0
    for place, char in enumerate(text):
        if char in _OPEN:
            depth += 1
        elif char in _CLOSE:
            depth -= 1
        elif char in _SEPARATORS and not depth:
            separators.add("," if char == LIST_COMMA else char)
            parts.append(text[start:place])
            start = place + 1
    parts.append(text[start:])
    return parts if len(separators) < 2 else None


def decide(
    pred: Answer, gold: Answer, *, lenient: bool, relative_tolerance: float = 0.0
) -> tuple[bool | None, str]:
    """Compares an answer with its reference as far as that is certain.

    Args:
        pred: the answer to grade.
        gold: the reference.
        lenient: apply the lenient rules of docs/grading.md.
        relative_tolerance: largest accepted relative error between numbers.

    Returns:
        The verdict, or None when only a computer algebra system can tell; and what decided it:
        "number", "string" or "list".
    """
    if pred.key == gold.key and pred.key:
        return True, "number" if gold.number else "string"
    if pred.number and gold.number:
        same = numbers.equal(
            pred.number, gold.number, lenient=lenient, relative_tolerance=relative_tolerance
        )
        return same, "number"
    again: Callable[[Answer, Answer], tuple[bool | None, str]] = lambda p, g: decide(  # noqa: E731
        p, g, lenient=lenient, relative_tolerance=relative_tolerance
    )
    based = _decide_based(pred, gold, lenient)
    if based is not None:
        return based, "number"
    prose = _decide_words(pred, gold)
    if prose is not None:
        return prose, "string"
    assigned = _unwrap(pred, gold)
    if assigned is not None:
        return again(*assigned)
    if pred.items and gold.items:
        return _decide_items(pred.items, gold.items, again), "list"
    if (pred.number and gold.items) or (pred.items and gold.number):
        return _decide_number_and_items(pred, gold, lenient, relative_tolerance), "list"
    return None, "symbolic"


def _decide_based(pred: Answer, gold: Answer, lenient: bool) -> bool | None:
    """Base subscripts: 204_5 is not 204_7; the base may be left out where the reference has it."""
    if gold.based:
        if pred.based:
            return pred.based == gold.based
        return pred.key.casefold() == gold.based[0] if pred.number else None
    if pred.based and gold.number:
        return lenient and pred.based[0] == gold.key.casefold()
    return None


def _decide_words(pred: Answer, gold: Answer) -> bool | None:
    if pred.words and gold.words:
        if pred.words[0] == gold.words[0]:
            return True
        marked = pred.words[1] or gold.words[1]
        single = len(pred.words[0]) == 1 and len(gold.words[0]) == 1
        return False if marked or single else None
    for prose, other in ((pred.words, gold), (gold.words, pred)):
        if prose and prose[1] and prose[0] == unmarked(other.key):
            return True
    if (pred.number and gold.words) or (pred.words and gold.number):
        return False
    return None


def _unwrap(pred: Answer, gold: Answer) -> tuple[Answer, Answer] | None:
    """Drops "x =" where only one side has it, or both have the same variable."""
    left, right = pred.assignment, gold.assignment
    if left and right:
        return (left[1], right[1]) if left[0] == right[0] else None
    if left and not _RELATION.search(gold.key):
        return left[1], gold
    if right and not _RELATION.search(pred.key):
        return pred, right[1]
    return None


def _decide_items(
    pred: Items, gold: Items, compare: Callable[[Answer, Answer], tuple[bool | None, str]]
) -> bool | None:
    if pred.kind != gold.kind:
        return None
    if gold.kind in ("list", "set"):
        return _decide_unordered(pred.parts, gold.parts, compare)
    if len(pred.parts) != len(gold.parts):
        return False
    verdicts = [compare(p, g)[0] for p, g in zip(pred.parts, gold.parts, strict=True)]
    if False in verdicts:
        return False
    return None if None in verdicts else True


def _decide_unordered(
    pred: tuple[Answer, ...],
    gold: tuple[Answer, ...],
    compare: Callable[[Answer, Answer], tuple[bool | None, str]],
) -> bool | None:
    """Lists are sets: order and repetition don't matter, each side must cover the other."""
    table = [[compare(p, g)[0] for g in gold] for p in pred]
    lines = table + [list(column) for column in zip(*table, strict=True)]
    if all(True in line for line in lines):
        return True
    return False if any(set(line) == {False} for line in lines) else None


def _decide_number_and_items(
    pred: Answer, gold: Answer, lenient: bool, relative_tolerance: float
) -> bool | None:
    """One number against a list: a decimal comma ("1,5"), or a list that repeats the number."""
    number, items = (pred.number, gold) if pred.number else (gold.number, pred)
    if number is None or items.items is None:
        return None
    if _DECIMAL_COMMA.match(items.key) and number.places is not None:
        decimal = numbers.parse_number(items.key.replace(",", "."))
        return decimal is not None and numbers.equal(
            *((number, decimal) if pred.number else (decimal, number)),
            lenient=lenient,
            relative_tolerance=relative_tolerance,
        )
    if any(part.number is None for part in items.items.parts):
        return None
    if items.items.kind not in ("list", "set"):
        return False
    return all(
        part.number and numbers.equal(part.number, number, lenient=lenient)
        for part in items.items.parts
    )


def bases_clash(pred: str, gold: str) -> bool:
    """Whether two expressions carry different base subscripts, which math-verify would not see."""
    mine = {a or b for a, b in _SUBSCRIPT.findall(pred)}
    theirs = {a or b for a, b in _SUBSCRIPT.findall(gold)}
    return bool(mine and theirs and mine != theirs)
