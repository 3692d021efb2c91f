"""Compares how two answers join several equations or inequalities: by "and" or by "or".

The canonical form of an answer replaces both words by commas, so `compare` calls this module before
it compares two lists. The rule is documented in docs/grading.md ("One statement").
"""

import re

from bacr_grading.numbers import parse_number
from bacr_grading.parsed_answer import RELATION, ParsedAnswer

# Words and signs that join two equations or inequalities. With `_BOTH`, both must be true. With
# `_EITHER`, at least one must be true.
_BOTH = re.compile(r"(?<![A-Za-z\\])and(?![A-Za-z])|\\wedge(?![A-Za-z])")
_EITHER = re.compile(r"(?<![A-Za-z\\])or(?![A-Za-z])|\\vee(?![A-Za-z])")
# An upper or lower bound of a variable, such as "x<5" and "x>=\\frac{1}{2}".
_BOUND = re.compile(
    r"(?P<name>\\?[A-Za-z]+(?:_(?:\w|\{\w+\}))?)"
    r"(?P<relation>[<>]=?|\\[lg][et](?![A-Za-z]))(?P<limit>.+)"
)
_EXCLUSIVE = frozenset(["<", ">", "\\lt", "\\gt"])


def joined_otherwise(pred: ParsedAnswer, reference: ParsedAnswer) -> bool:
    """True if one answer requires all of its relations and the other only one of them.

    A comma means "or" between values of one variable, as in "x = 3, x = 5". Between inequalities or
    equations of different variables it means "and".
    """
    conjunction = _conjunction(pred)
    if conjunction is None:
        return False
    required = {conjunction, _conjunction(reference)}
    if required == {"comma", "or"}:
        return not (_lists_alternatives(pred) and _lists_alternatives(reference))
    if conjunction != "or" and "\\cup" in reference.key:
        return not _lists_alternatives(pred)
    return required == {"and", "or"}


def _conjunction(answer: ParsedAnswer) -> str | None:
    """Returns how an answer joins its equations or inequalities.

    The result is "and" or "or" if the answer contains only this word. It is "comma" if the answer
    contains neither word, but commas separate at least two equations or inequalities. None for any
    other answer.
    """
    if not RELATION.search(answer.key):
        return None
    both = bool(_BOTH.search(answer.text))
    either = bool(_EITHER.search(answer.text))
    if both != either:
        return "and" if both else "or"
    if both or answer.items is None or answer.items.kind != "list":
        return None
    relations = [part for part in answer.items.parts if RELATION.search(part.key)]
    return "comma" if len(relations) > 1 else None


def _lists_alternatives(answer: ParsedAnswer) -> bool:
    """True if a comma in an answer can only mean "or".

    This is the case for several values of one variable, such as "x = 3, x = 5", and for two
    inequalities of one variable that contradict each other, such as "x < 1, x > 3".
    """
    if answer.items is None:
        return False
    parts = answer.items.parts
    names = {part.assignment.name for part in parts if part.assignment}
    others = [part for part in parts if not part.assignment]
    if len(names) == 1 and not any(RELATION.search(part.key) for part in others):
        return True
    return len(parts) == 2 and _contradict(parts[0].key, parts[1].key)


def _contradict(one: str, other: str) -> bool:
    """True if no number satisfies both of two inequalities such as "x < 1" and "x > 3"."""
    first = _BOUND.fullmatch(one)
    second = _BOUND.fullmatch(other)
    if first is None or second is None or first["name"] != second["name"]:
        return False
    if _is_upper_bound(first) == _is_upper_bound(second):
        return False
    ordered = (first, second) if _is_upper_bound(first) else (second, first)
    highest = parse_number(ordered[0]["limit"])
    lowest = parse_number(ordered[1]["limit"])
    if highest is None or lowest is None:
        return False
    both_inclusive = all(match["relation"] not in _EXCLUSIVE for match in (first, second))
    if highest.value == lowest.value:
        return not both_inclusive
    return highest.value < lowest.value


def _is_upper_bound(inequality: re.Match[str]) -> bool:
    """True if a match of `_BOUND` has the sign < or <=."""
    return inequality["relation"].startswith(("<", "\\l"))
