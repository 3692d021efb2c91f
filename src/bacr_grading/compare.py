"""Compares two answers without a computer algebra system, and says when it can't."""

import re
from collections.abc import Callable
from functools import cached_property, partial
from typing import NamedTuple

from bacr_grading.normalize import (
    LIST_COMMA,
    ROW_END,
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
_DECIMAL_COMMA, _TIGHT_COMMA = re.compile(r"-?\d+,\d+\Z"), re.compile(r"\d(?:,|\{,\})\d")
_MATRIX = re.compile(rf"\\begin\{{([pb]?matrix)\}}(.*?){ROW_END}?\\end\{{\1\}}\Z", re.DOTALL)
_WRAPPED_LIST = re.compile(r"\\text\{([^{}]*,[^{}]*)\}\Z")
_MARKED = re.compile(r"\\text\{([A-Za-z/]+)\}")
_CAPITALS = re.compile(r"\(?[A-Z]{3,}\)?\Z")
_OPEN, _CLOSE = "([{", ")]}"
_COLON = re.compile(":")
_CLOCK_PART = re.compile(r"0\d")
ELISION = re.compile(r"\\(?:[lcdv]?dots[a-z]?|ddots)(?![A-Za-z])|[…⋯]|\.\s*\.|\betc\b")
# Words and signs between relations: both have to hold, or one of them.
_BOTH = re.compile(r"(?<![A-Za-z\\])and(?![A-Za-z])|\\wedge(?![A-Za-z])")
_EITHER = re.compile(r"(?<![A-Za-z\\])or(?![A-Za-z])|\\vee(?![A-Za-z])")
_VOWEL = re.compile(r"[aeiouy]", re.IGNORECASE)
# Words of less than five letters that answers spell in capitals.
_SHORT_WORDS = frozenset("yes no true odd even none dne all both am pm red blue up down".split())  # noqa: SIM905
_ANSWERS = frozenset("answer ans choice option letter".split())  # noqa: SIM905
_SEPARATORS = ",;" + LIST_COMMA
_COMMA, _SEMICOLON = re.compile(f"[,{LIST_COMMA}]"), re.compile(";")

# Members of lists are compared each with each; beyond this many pairs by their spelling. The
# longest list in MATH has some twenty members.
MOST_PAIRS = 10_000

# The verdict, or None when only a computer algebra system can tell; and what decided it.
Decision = tuple[bool | None, str]


class Items(NamedTuple):
    """A list, tuple, interval, set or matrix: its brackets and its parts."""

    kind: str
    parts: tuple["Answer", ...]


class Answer:
    """One answer, read in every way the comparison needs, each computed once and on demand.

    Attributes:
      source: the running text that it stands for, which only math-verify can search; else "".
    """

    def __init__(self, text: str, source: str = ""):
        self.text = text
        self.source = source
        self.key = canonical(text)

    @cached_property
    def number(self) -> Number | None:
        """The number that this answer is, if it is one."""
        number = parse_number(self.key)
        if number is None and self.text[-1:].isalpha():
            split = split_unit(self.text)
            head = parse_number(canonical(split[0])) if split else None
            if split and head and head.unit is None:
                return with_bare_unit(head, split[1])
        return number

    @cached_property
    def unit(self) -> tuple[str, int] | None:
        """The known unit that this answer ends with, a number or not."""
        return self.number.unit if self.number else trailing_unit(self.text, self.key)

    @cached_property
    def words(self) -> tuple[str, bool] | None:
        """The prose that this answer is, if it is prose."""
        return words(self.key)

    @cached_property
    def based(self) -> tuple[str, str] | None:
        """Digits and base of a number with a base subscript."""
        match = _BASED.match(self.key)
        return (match[1].casefold(), match[2] or match[3]) if match else None

    @cached_property
    def items(self) -> Items | None:
        """The parts of a list, tuple, interval, set or matrix."""
        return _items(self.key)

    @cached_property
    def ratio(self) -> tuple["Answer", ...] | None:
        """The members of a ratio of three or more; a time of day is none."""
        if self.key.count(":") < 2:
            return None
        parts = split(self.key, _COLON)
        if len(parts) < 3 or not all(parts) or any(map(_CLOCK_PART.match, parts)):
            return None
        return tuple(map(Answer, parts))

    @cached_property
    def joined(self) -> str | None:
        """The word that joins the relations of this answer, "and" or "or"; None for both."""
        if not _RELATION.search(self.key):
            return None
        both = bool(_BOTH.search(self.text))
        either = bool(_EITHER.search(self.text))
        return None if both == either else "and" if both else "or"

    @cached_property
    def assignment(self) -> tuple[str, "Answer"] | None:
        """Variable and value of "x = 5"."""
        match = _ASSIGNMENT.match(self.key)
        if match is None or _RELATION.search(self.key, match.end()):
            return None
        return match[1], Answer(self.text.split("=", 1)[1].strip())


def read(answer: str) -> Answer:
    """Reads what a box or tag holds."""
    return Answer(clean(answer))


def _items(key: str) -> Items | None:
    matrix = _MATRIX.match(key.removeprefix("(").removesuffix(")"))
    if matrix:
        rows = [row.split("&") for row in matrix[2].split(ROW_END)]
        kind, parts = f"matrix {[len(row) for row in rows]}", [cell for row in rows for cell in row]
        return Items(kind, tuple(map(Answer, parts)))
    wrapped = _WRAPPED_LIST.match(key)
    if wrapped:
        key = wrapped[1]
    kind, inner = "list", key
    if len(key) > 2 and _encloses(key):
        is_set = key.startswith("\\{")
        kind, inner = ("set", key[2:-2]) if is_set else (key[0] + key[-1], key[1:-1])
    elif _GROUPED.search(key):
        return None  # "1,000,7": two lists fit
    parts = _split_list(inner)
    return Items(kind, tuple(map(Answer, parts))) if len(parts) > 1 else None


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


def split(text: str, separator: re.Pattern[str]) -> list[str]:
    """Splits at a separator outside all brackets."""
    parts: list[str] = []
    depth = place = start = 0
    for match in separator.finditer(text):
        between = text[place : match.start()]
        depth += sum(map(between.count, _OPEN)) - sum(map(between.count, _CLOSE))
        place = match.start()
        if not depth:
            parts.append(text[start : match.start()])
            start = match.end()
    return [*parts, text[start:]]


def _split_list(text: str) -> list[str]:
    """Splits at commas or semicolons; where both separate, nothing says which of them do."""
    by_comma, by_semicolon = split(text, _COMMA), split(text, _SEMICOLON)
    if len(by_comma) > 1 and len(by_semicolon) > 1:
        return [text]
    return max(by_comma, by_semicolon, key=len)


def decide(
    pred: Answer, reference: Answer, *, lenient: bool, relative_tolerance: float = 0.0
) -> Decision:
    """Compares an answer with its reference as far as that is certain.

    "number", "string" or "list" decided it; else only a computer algebra system can tell, and the
    verdict is None. `lenient` applies the lenient rules of docs/grading.md.
    """
    # The words that join relations are commas in the keys.
    if "," in pred.key and _joined_otherwise(pred, reference):
        return False, "string"
    if pred.key == reference.key and pred.key:
        return True, "number" if reference.number else "string"

    same = partial(equal, lenient=lenient, relative_tolerance=relative_tolerance)
    if pred.number and reference.number:
        return same(pred.number, reference.number), "number"
    if ELISION.search(pred.key) or ELISION.search(reference.key):
        return _same_sequence(pred, reference, lenient), "list"
    again = partial(decide, lenient=lenient, relative_tolerance=relative_tolerance)
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
    assigned = _unwrap(pred, reference)
    if assigned is not None:
        return again(*assigned)
    if pred.items and reference.items:
        if _separators(pred.key) * _separators(reference.key) > MOST_PAIRS:
            return _same_spelling(pred.items, reference.items), "list"
        return _decide_items(pred.items, reference.items, again), "list"
    if pred.number and reference.items:
        return _decide_mixed(pred.number, reference, same, comma=lenient), "list"
    if pred.items and reference.number:
        return _decide_mixed(reference.number, pred, lambda n, m: same(m, n), comma=True), "list"
    if clash(pred.unit, reference.unit, lenient=lenient):
        return False, "number"
    if _MARKED.sub(r"\1", pred.key) == _MARKED.sub(r"\1", reference.key):
        return True, "string"
    return None, "symbolic"


def _decide_based(pred: Answer, reference: Answer, lenient: bool) -> bool | None:
    """Base subscripts: 204_5 is not 204_7; the base may be left out where the reference has it."""
    if reference.based:
        if pred.based:
            return pred.based == reference.based
        return pred.key.casefold() == reference.based[0] if pred.number else None
    if pred.based and reference.number:
        return lenient and pred.based[0] == reference.key.casefold()
    return None


def _decide_words(pred: Answer, reference: Answer) -> bool | None:
    if pred.words and reference.words:
        if pred.words[0] == reference.words[0]:
            return _same_case(pred, reference)
        # Unmarked letters may be a product of variables; three capitals are points or a word.
        marked = pred.words[1] or reference.words[1]
        return False if marked or all(_CAPITALS.match(a.key) for a in (pred, reference)) else None
    for prose, other in ((pred.words, reference), (reference.words, pred)):
        if prose and prose[1] and prose[0] == unmarked(other.key):
            return True
    if (pred.number and reference.words) or (pred.words and reference.number):
        return False
    return None


def _joined_otherwise(pred: Answer, reference: Answer) -> bool:
    """True if all relations have to hold on one side, and any of them on the other."""
    if pred.joined is None:
        return False
    if pred.joined == "and" and "\\cup" in reference.key:
        return True
    return reference.joined not in (None, pred.joined)


def _same_case(pred: Answer, reference: Answer) -> bool:
    """True if equal letters are a word or a choice, or have the same case: m is not M."""
    texts = [answer.key for answer in (pred, reference)]
    if any(answer.words and answer.words[1] or "(" in answer.key for answer in (pred, reference)):
        return True
    one, other = (text.rstrip(".") for text in texts)
    if one == other or one.casefold() in _SHORT_WORDS:
        return True
    capitals = one.isupper() or other.isupper()
    return len(one) >= (5 if capitals else 4) and _VOWEL.search(one) is not None


def _chooses(equation: Answer, choice: Answer) -> bool:
    """True if one answer is an equation with a letter on its right, and the other is a choice."""
    if not equation.assignment or not choice.words or len(choice.words[0]) != 1:
        return False
    name, value = equation.assignment
    is_choice = choice.words[1] or "(" in choice.key
    lone = len(value.key) == 1 and value.key.isalpha()
    return is_choice and lone and name.casefold() not in _ANSWERS


def _decide_ratio(pred: Answer, reference: Answer) -> Decision:
    """Compares ratios of three or more, which are equal when they are proportional."""
    if pred.ratio is None or reference.ratio is None:
        return (False, "list") if pred.number or reference.number else (None, "symbolic")
    if len(pred.ratio) != len(reference.ratio):
        return False, "list"
    numbers = [(p.number, r.number) for p, r in zip(pred.ratio, reference.ratio, strict=True)]
    if not all(p and r for p, r in numbers):
        return None, "symbolic"
    values = [(p.value, r.value) for p, r in numbers if p and r]
    first, target = next((pair for pair in values if all(pair)), (0, 0))
    if not first:
        return False, "list"
    return all(p * target == r * first for p, r in values), "list"


def _same_sequence(pred: Answer, reference: Answer, lenient: bool) -> bool:
    """True if lists with an elision agree member by member."""
    if not (pred.items and reference.items) or pred.items.kind != reference.items.kind:
        return False
    pairs = list(zip(pred.items.parts, reference.items.parts, strict=False))
    if len(pred.items.parts) != len(reference.items.parts):
        return False
    return all(p.key == r.key or _same_number(p, r, lenient) for p, r in pairs)


def _same_number(pred: Answer, reference: Answer, lenient: bool) -> bool:
    one = pred.number
    other = reference.number
    return one is not None and other is not None and equal(one, other, lenient=lenient)


def _unwrap(pred: Answer, reference: Answer) -> tuple[Answer, Answer] | None:
    """Drops "x =" where only one side has it, or both have the same variable."""
    left, right = pred.assignment, reference.assignment
    if left and right:
        return (left[1], right[1]) if left[0] == right[0] else None
    if left and not _RELATION.search(reference.key):
        return left[1], reference
    if right and not _RELATION.search(pred.key):
        return pred, right[1]
    return None


def _separators(key: str) -> int:
    """Members that a list can have, those of the lists inside it included."""
    return 1 + sum(map(key.count, _SEPARATORS))


def _same_spelling(pred: Items, reference: Items) -> bool:
    mine, theirs = [part.key for part in pred.parts], [part.key for part in reference.parts]
    ordered = reference.kind not in ("list", "set")
    return mine == theirs if ordered else set(mine) == set(theirs)


def _decide_items(
    pred: Items, reference: Items, compare: Callable[[Answer, Answer], Decision]
) -> bool | None:
    if pred.kind != reference.kind:
        return None
    if reference.kind in ("list", "set"):
        # Order and repetition don't matter, each side must cover the other.
        table = [[compare(p, r)[0] for r in reference.parts] for p in pred.parts]
        lines = table + [list(column) for column in zip(*table, strict=True)]
        if all(True in line for line in lines):
            return True
        return False if any(set(line) == {False} for line in lines) else None
    if len(pred.parts) != len(reference.parts):
        return False
    verdicts = [compare(p, r)[0] for p, r in zip(pred.parts, reference.parts, strict=True)]
    if False in verdicts:
        return False
    return None if None in verdicts else True


def _decide_mixed(
    number: Number, other: Answer, same: Callable[[Number, Number], bool], *, comma: bool
) -> bool | None:
    """One number against a list: a decimal comma ("1,5") if `comma`, or one that repeats it."""
    if other.items is None:
        return None
    # The key of "1, 5" and of "1 and 5" is "1,5" too.
    comma = comma and bool(_DECIMAL_COMMA.match(other.key) and _TIGHT_COMMA.search(other.text))
    if comma and number.places is not None:
        decimal = parse_number(other.key.replace(",", "."))
        return decimal is not None and same(number, decimal)
    members = [part.number for part in other.items.parts]
    if None in members:
        return None
    repeats = all(member and same(number, member) for member in members)
    return other.items.kind in ("list", "set") and repeats


def bases_clash(pred: str, reference: str) -> bool:
    """Whether two expressions carry different base subscripts, which math-verify would not see."""
    mine = {a or b for a, b in _SUBSCRIPT.findall(pred)}
    theirs = {a or b for a, b in _SUBSCRIPT.findall(reference)}
    return bool(mine and theirs and mine != theirs)
