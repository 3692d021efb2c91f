"""Reference answers, read when the data is loaded, so that unusable rows never reach training."""

from dataclasses import dataclass
from functools import lru_cache

from bacr_jax.grading.compare import Answer, read
from bacr_jax.grading.extract import ANSWER_CAP, reference_answer
from bacr_jax.grading.guards import nesting, not_text
from bacr_jax.grading.prose import has_delimiters, is_prose


@dataclass(frozen=True, slots=True)
class ParsedGold:
    """A usable reference answer.

    Attributes:
        text: the answer without its box, delimiters or the solution around it. Grading against it
            is grading against the reference it came from.
        kind: "number", "text", "list" or "expression". Only expressions need the worker pool.
    """

    text: str
    kind: str


def parse_gold(text: str | None) -> ParsedGold | None:
    r"""Reads a reference: an answer, a solution with a boxed answer, or one with a "####" line.

    Args:
        text: the reference. Boxes that a separator joins ("\boxed{1} and \boxed{2}") are a list.

    Returns:
        The answer, or None when no output could ever be graded correct against it: nothing there,
        braces that do not balance, control characters, or more than 2,000 characters.
    """
    if not isinstance(text, str):
        return None
    answer = read_gold(text)
    if not answer.key or len(answer.text) > ANSWER_CAP or nesting(answer.text) is None:
        return None
    if not_text(answer.text):
        return None
    if answer.number or answer.based:
        kind = "number"
    elif answer.words:
        kind = "text"
    else:
        kind = "list" if answer.items else "expression"
    return ParsedGold(answer.source or answer.text, kind)


@lru_cache(maxsize=16384)
def read_gold(text: str) -> Answer:
    """Reads a reference for comparing. Cached: a group of rollouts shares its reference."""
    raw = reference_answer(text)
    answer = read(raw)
    if answer.number is None and has_delimiters(raw) and is_prose(answer.text):
        return Answer(answer.text, source=raw)
    return answer
