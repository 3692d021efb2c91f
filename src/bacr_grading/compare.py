"""Rule-based comparison of two answers, without a computer algebra system.

`judge` calls this module first and sends the pairs that the rules cannot decide to math-verify. The
rules are documented in docs/grading.md ("Comparing").
"""

import re
from collections.abc import Callable, Sequence
from functools import partial

from bacr_grading.normalize import (
    LIST_COMMA,
    unmarked,
)
from bacr_grading.numbers import Number, clash, equal, parse_number
from bacr_grading.parsed_answer import RELATION, Clock, Items, ParsedAnswer
from bacr_grading.relations import joined_otherwise, values_by_name

_SUBSCRIPT = re.compile(r"\d_(?:(\d)|\{(\d+)\})")
_DECIMAL_COMMA = re.compile(r"-?\d+,\d+\Z")
_TIGHT_COMMA = re.compile(r"\d(?:,|\{,\})\d")
# Letters or a unit in \text. Names in a product of units have a star between them.
_MARKED = re.compile(r"\\text\{((?:[A-Za-z/*]|\^-?\d)+)\}")
_CAPITALS = re.compile(r"\(?[A-Z]{3,}\)?\Z")
ELISION = re.compile(r"\\(?:[lcdv]?dots[a-z]?|ddots)(?![A-Za-z])|[…⋯]|\.\s*\.|\betc\b")
_VOWEL = re.compile(r"[aeiouy]", re.IGNORECASE)
# Words with fewer than five letters that models also write in upper case, as in "YES".
_SHORT_WORDS = frozenset("yes no true odd even none dne all both am pm red blue up down".split())  # noqa: SIM905
_ANSWERS = frozenset("answer ans choice option letter".split())  # noqa: SIM905
_SEPARATORS = ",;" + LIST_COMMA
_SEPARATOR = re.compile(f"[{_SEPARATORS}]")

# Maximum number of pairs when comparing two lists. Every member of one list is compared with every
# member of the other list, so the cost is quadratic. Lists with more pairs are compared as strings.
# The longest list in MATH has about twenty members.
MOST_PAIRS = 10_000

# A pair of the verdict and the name of the rule that decided: "number", "string", "list" or
# "symbolic". The verdict is None if only a computer algebra system can decide.
Decision = tuple[bool | None, str]


def decide(
    pred: ParsedAnswer, reference: ParsedAnswer, *, lenient: bool, relative_tolerance: float = 0.0
) -> Decision:
    """Compares an answer with its reference by rules.

    Args:
      pred: the model's answer.
      reference: the reference answer.
      lenient: True to apply the lenient rules of docs/grading.md, False for the strict rules.
      relative_tolerance: maximum error of a number, relative to the reference.

    Returns:
      The verdict and the rule that decided: "number", "string" or "list". If no rule can decide,
      the result is (None, "symbolic").
    """
    # The canonical form replaces "and" and "or" by commas, so compare these words separately.
    if _SEPARATOR.search(pred.key) and joined_otherwise(pred, reference):
        return False, "string"
    if pred.key and pred.key == reference.key:
        return True, "number" if reference.number else "string"

    if pred.number and reference.number:
        is_equal = equal(
            pred.number, reference.number, lenient=lenient, relative_tolerance=relative_tolerance
        )
        return is_equal, "number"
    decision = _decide_notation(pred, reference, lenient)
    if decision is not None:
        return decision
    prose = _decide_words(pred, reference)
    if prose is not None:
        return prose, "string"
    if _chooses(pred, reference) or _chooses(reference, pred):
        return False, "string"
    compare = partial(decide, lenient=lenient, relative_tolerance=relative_tolerance)
    named_values = values_by_name(pred, reference)
    if named_values is not None:
        return _decide_in_order(*named_values, compare), "list"
    if pred.named and reference.named and not (pred.items and reference.items):
        # (a,b)=(1,2) and x=1, y=2 have different names.
        return False, "list"
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
        # Swap the arguments: `_decide_mixed` passes the number first, which is the reference here,
        # but `same` needs the answer first.
        return _decide_mixed(
            reference.number, pred, lambda number, member: same(member, number), comma=True
        ), "list"
    if clash(pred.unit, reference.unit, lenient=lenient):
        return False, "number"
    if is_same_without_text(pred, reference):
        return True, "string"
    return None, "symbolic"


def is_same_without_text(pred: ParsedAnswer, reference: ParsedAnswer) -> bool:
    r"""True if two answers differ only by `\text` around letters, as in "5\text{ km/s}"."""
    return _without_text(pred.key) == _without_text(reference.key)


def _without_text(key: str) -> str:
    return _MARKED.sub(lambda match: match[1].replace("*", ""), key)


def _decide_notation(pred: ParsedAnswer, reference: ParsedAnswer, lenient: bool) -> Decision | None:
    """Compares sequences with an ellipsis, numbers with a base, ratios and times of day.

    Returns None if the answers are none of these.
    """
    if ELISION.search(pred.key) or ELISION.search(reference.key):
        return _same_sequence(pred, reference, lenient), "list"
    based = _decide_based(pred, reference, lenient)
    if based is not None:
        return based, "number"
    if pred.ratio or reference.ratio:
        return _decide_ratio(pred, reference)
    if pred.clock and reference.clock:
        return _same_time(pred.clock, reference.clock), "number"
    for answer, other in ((pred, reference), (reference, pred)):
        if answer.clock and answer.clock.half and other.number:
            # Without a.m. or p.m., 10:30 could be the ratio 1/3.
            return False, "number"
    return None


def _decide_based(pred: ParsedAnswer, reference: ParsedAnswer, lenient: bool) -> bool | None:
    """Compares numbers with base subscripts, such as 204_5 (base 5) and 204_7, which differ.

    The answer may omit the base if the reference contains it. Returns None if no rule decides.
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
    r"""True if `marked` is `\text{...}` and `other` has the same letters, in `\text` or not."""
    if marked.words is None or not marked.words.is_text:
        return False
    return marked.words.letters == unmarked(other.key)


def _same_case(pred: ParsedAnswer, reference: ParsedAnswer) -> bool:
    """True if two answers with the same letters also agree in case, as far as case matters.

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
    """True for an equation such as "x = B" and a choice such as "(B)", which are not equal.

    An equation such as "answer = B" does not count, because it names the choice.
    """
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


def _same_time(pred: Clock, reference: Clock) -> bool:
    """True if two times of day are equal. A missing a.m. or p.m. is ignored."""
    if pred.half and reference.half and pred.half != reference.half:
        return False
    return bool(_readings(pred) & _readings(reference))


def _readings(clock: Clock) -> set[tuple[int, int, int]]:
    """Returns a time as written and, if it has a.m. or p.m., on the 24-hour clock."""
    hour, minute, second = clock.time
    if clock.half is None:
        return {clock.time}
    return {clock.time, (hour % 12 + 12 * (clock.half == "p"), minute, second)}


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
    if pred.assignment and not RELATION.search(reference.key):
        return pred.assignment.value, reference
    if reference.assignment and not RELATION.search(pred.key):
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
        # "x = 1 or y = 2" is not (1, 2). `values_by_name` handles one value for each variable.
        has_names = any(part.assignment for part in pred.parts)
        return False if has_names and reference.kind == "()" else None
    if reference.kind in ("list", "set"):
        return _decide_set(pred, reference, compare)
    return _decide_in_order(pred.parts, reference.parts, compare)


def _decide_in_order(
    pred: Sequence[ParsedAnswer],
    reference: Sequence[ParsedAnswer],
    compare: Callable[[ParsedAnswer, ParsedAnswer], Decision],
) -> bool | None:
    """Compares two sequences member by member, and returns None if no rule decides."""
    if len(pred) != len(reference):
        return False
    verdicts = [compare(p, r)[0] for p, r in zip(pred, reference, strict=True)]
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
      same: returns True if two numbers are equal. Called with `number` as the first argument.
      comma: True to parse a list such as "1,5" as a decimal if `number` is a decimal.
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
