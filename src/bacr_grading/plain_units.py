r"""Finds units that an answer contains without `\text`, such as km/s in "10 km/s".

Called by `judge` before an answer is compared. The letters of such a unit would otherwise be parsed
as variables.
"""

import re

from bacr_grading.normalize import VARIABLE, canonical, split_unit
from bacr_grading.numbers import parse_number
from bacr_grading.parsed_answer import ParsedAnswer
from bacr_grading.statement import names_counted_noun
from bacr_grading.units import SPACED_SIGN, is_unambiguous, unit

_SPACE = r"(?:\s|~|\\[,;:> ]|\\quad(?![A-Za-z]))"
_NAME = r"[A-Za-z]+(?:\s?\^\s?(?:-?\d|\{-?\d\}))?"
_SIGN = rf"(?:{_SPACE}?(?:/|\*|\\cdot(?![A-Za-z])){_SPACE}?\(?|{_SPACE})"
# A quick test for texts with a letter after a number, a root or a fraction.
_CANDIDATE = re.compile(rf"[\d.}}]{_SPACE}*[A-Za-z]")
_WITH_UNIT = re.compile(
    rf"(?P<number>.*(?:[\d}}]|\d\.))(?P<space>{_SPACE}*)(?P<unit>{_NAME}(?:{_SIGN}{_NAME}\)?){{0,5}})",
    re.DOTALL,
)
# The end of a value: the comma of a list, a relation, or a word between two values.
_VALUE_END = re.compile(
    r"(\s?(?:(?<!\\)[,;]|[=<>]|\\(?:approx|le|ge|in)(?![A-Za-z])|\\text\{\s*(?:and|or)\s*\}"
    r"|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])))"
)
_TEXT = re.compile(r"\\(?:text[a-z]*|mbox|mathrm|operatorname)\s*\{[^{}]*(?:\{-?\d\}[^{}]*)*\}")
_WORD = re.compile("[A-Za-z]+")
# A quotient of nouns, such as "eggs/day".
_COUNTED_QUOTIENT = re.compile(r"[A-Za-z]{3,}/[A-Za-z]{3,}")


def with_units(answer: ParsedAnswer, reference: ParsedAnswer | None = None) -> ParsedAnswer:
    r"""Encloses plain units of an answer in `\text{...}`.

    A unit is enclosed if it can't be a product of variables, or if it is the reference's unit.
    Answers that are parsed as a number without this step are returned unchanged.

    Args:
      answer: an answer or a reference.
      reference: the reference of an answer. If the reference has a variable, nothing is enclosed.
    """
    if not _CANDIDATE.search(answer.text) or answer.number is not None:
        return answer
    target = None
    if reference is not None:
        if _has_variable(reference):
            return answer
        target = reference.unit
    pieces = _VALUE_END.split(answer.text)
    pieces[::2] = [_with_unit(piece, target) for piece in pieces[::2]]
    text = "".join(pieces)
    return answer if text == answer.text else ParsedAnswer(text, answer.source)


def _has_variable(reference: ParsedAnswer) -> bool:
    value = reference.assignment.value if reference.assignment else reference
    return value.number is None and VARIABLE.search(_TEXT.sub("", value.text)) is not None


def _with_unit(value: str, target: tuple[str, int] | None) -> str:
    r"""Encloses the unit at the end of a value in `\text{...}`, if it has a plain unit.

    Args:
      value: a text that contains one value, such as a member of a list.
      target: the unit of the reference, or None.
    """
    stripped = value.rstrip()
    match = _WITH_UNIT.fullmatch(stripped)
    if match is None or parse_number(canonical(value)):
        return value
    if "/" not in value and split_unit(stripped):
        # The rules for words after a number apply.
        return value
    number = match["number"]
    is_number = parse_number(canonical(number.strip())) is not None
    if not is_number and VARIABLE.search(_TEXT.sub("", number)):
        return value
    names = match["unit"].replace("\\cdot", "*")
    names = re.sub(_SPACE, " ", names)
    names = SPACED_SIGN.sub(r"\1", names)
    is_target = target is not None and unit(names) == target
    is_attached = not match["space"]
    if is_target or _is_surely_unit(names, is_attached):
        return f"{number}\\text{{ {names}}}"
    return value


def _is_surely_unit(names: str, is_attached: bool) -> bool:
    """True if the text after a number can only be a unit or a quotient such as "eggs/day".

    Args:
      names: the text after the number.
      is_attached: True if there is no space between the number and the text.
    """
    words = _WORD.findall(names)
    if is_attached and split_unit(f"1{words[0]}") is None:
        return False
    if is_unambiguous(names):
        return True
    if not _COUNTED_QUOTIENT.fullmatch(names):
        return False
    return all(map(names_counted_noun, words))
