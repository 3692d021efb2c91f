"""Compares answers that consist of several equations or inequalities.

The canonical form of an answer replaces "and" and "or" by commas, so `compare` calls this module
before it compares two lists. The rules are documented in docs/grading.md ("One statement" and
"Comparing").
"""

import re
from collections.abc import Sequence

from bacr_grading.numbers import parse_number
from bacr_grading.parsed_answer import EITHER, NAME, RELATION, ParsedAnswer

# Words and signs between equations or inequalities that must all be true. With `EITHER`, at least
# one must be true.
_BOTH = re.compile(r"(?<![A-Za-z\\])and(?![A-Za-z])|\\wedge(?![A-Za-z])")
# An upper or lower bound of a variable, such as "x<5" and "x>=\\frac{1}{2}".
_BOUND = re.compile(
    rf"(?P<name>{NAME})"
    r"(?P<relation>[<>]=?|\\[lg][et](?![A-Za-z]))(?P<limit>.+)"
)
# A bound or a range of a variable in LaTeX, such as "x \\le 5", "5 > x", "1 < x < 5" and "x = 5".
_RELATION = r"(?:[<>]=?|\\[lg][et](?![A-Za-z]))"
_LIMIT = rf"(?:(?!{_RELATION})[^=])+?"
_RANGE = re.compile(
    rf"(?:(?P<low>{_LIMIT})\s*(?P<left>{_RELATION})\s*)??"
    rf"(?P<name>{NAME})\s*"
    rf"(?:(?P<right>{_RELATION}|=)\s*(?P<high>{_LIMIT}))?"
)
# "or", or a comma that is not a thousands separator.
_ALTERNATIVE_END = re.compile(
    rf",?\s*(?:\\(?:text|mbox|math)[a-z]*\s*\{{\s*,?\s*or\s*\}}|{EITHER.pattern})"
    r"|(?<!\d),|,(?!\d{3}(?!\d))|;"
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
        return conjunction == "and" or not _lists_alternatives(pred)
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
    either = bool(EITHER.search(answer.text))
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


def values_by_name(
    pred: ParsedAnswer, reference: ParsedAnswer
) -> tuple[Sequence[ParsedAnswer], Sequence[ParsedAnswer]] | None:
    """Returns the values of several variables, as in "x = 1, y = 2", in the same order.

    If only the reference has names, the order is as in the reference. If only the answer has names,
    its values are in the alphabetical order of the names.

    Returns:
      The values of `pred` and of `reference`. None if neither answer has names, if the names
      differ, or if the answer without names is an unordered list.
    """
    names = pred.named
    targets = reference.named
    if names and targets:
        if names.keys() != targets.keys():
            return None
        return [names[name] for name in targets], list(targets.values())
    if targets and pred.items and not any(part.assignment for part in pred.items.parts):
        # The names x_1 and x_2 can be two values of x, whose order does not matter in a list.
        is_ordered = len({name.partition("_")[0] for name in targets}) == len(targets)
        if pred.items.kind == "()" or (pred.items.kind == "list" and is_ordered):
            return pred.items.parts, list(targets.values())
    if names and pred.items and reference.items and reference.items.kind == "()":
        ordered = sorted(names, key=_alphabetical)
        return [names[name] for name in ordered], reference.items.parts
    return None


def _alphabetical(name: str) -> tuple[str, int, str]:
    r"""Returns a sort key, by which `x_2` precedes `x_{10}`, and `\theta` precedes `z`."""
    letters, _, subscript = name.lstrip("\\").partition("_")
    return letters, len(subscript), subscript


def as_union(text: str) -> str:
    r"""Rewrites inequalities that are joined by "or" as a union of intervals.

    For example, `x<1\text{ or }x\ge 3` becomes `x\in(-\infty,1)\cup[3,\infty)`. Any other text is
    returned unchanged.
    """
    answer = ParsedAnswer(text)
    conjunction = _conjunction(answer)
    if conjunction != "or" and not (conjunction == "comma" and _lists_alternatives(answer)):
        return text
    names = set()
    intervals = []
    for part in _ALTERNATIVE_END.split(text):
        match = _RANGE.fullmatch(part.strip())
        interval = _interval(match) if match else None
        if match is None or interval is None:
            return text
        names.add(match["name"])
        intervals.append(interval)
    if len(names) != 1:
        return text
    name = names.pop()
    union = "\\cup".join(intervals)
    return f"{name}\\in{union}"


def _interval(match: re.Match[str]) -> str | None:
    """Returns the interval of a match of `_RANGE`, or None if it has two upper or lower limits."""
    low, left, right, high = match.group("low", "left", "right", "high")
    if right == "=":
        return None if left else f"\\{{{high}\\}}"
    lower = []
    upper = []
    for relation, limit, is_before_name in ((left, low, True), (right, high, False)):
        if relation is None:
            continue
        is_open = relation in _EXCLUSIVE
        if relation.startswith((">", "\\g")) == is_before_name:
            upper.append(f"{limit}{')' if is_open else ']'}")
        else:
            lower.append(f"{'(' if is_open else '['}{limit}")
    if len(lower) > 1 or len(upper) > 1 or not lower + upper:
        return None
    return ",".join([*(lower or ["(-\\infty"]), *(upper or ["\\infty)"])])
