"""Tells running text from a bare answer, and finds the answer that a sentence states."""

import re

_COMMAND_OR_TEXT = re.compile(
    r"\\(?:begin|end|text|mbox|mathrm|textbf|textit|textrm|mathbf|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+"
)
_DELIMITER = re.compile(r"(?<!\\)\$|\\\(|\\\[")
_WORD = re.compile(r"[A-Za-z]{3,}")
_FUNCTIONS = frozenset(
    """
    sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log exp sqrt mod and
    theta alpha beta gamma infinity
    """.split()  # noqa: SIM905
)
_FINAL = re.compile(r"(?i:final answer is)\s*:?\s*([^\n]{1,300})")
_STATED = re.compile(r"(?i:\banswer(?:\s+is|\s*:|\s*=)\s*:?)\s*([^\n]{1,300})")
_SENTENCE_END = re.compile(r"\.(?:\s|$)")


def is_prose(text: str) -> bool:
    """Whether a cleaned text is running text that holds an answer, rather than an answer.

    Args:
        text: the output of `clean`.

    Returns:
        True when it switches between text and mathematics, or is several words of which one has
        three letters or more and is no function.
    """
    if has_delimiters(text):
        return True
    if not any(char.isspace() for char in text):
        return False
    return any(
        match.group().lower() not in _FUNCTIONS and not match.group().isupper()
        for match in _WORD.finditer(_COMMAND_OR_TEXT.sub(" ", text))
    )


def has_delimiters(text: str) -> bool:
    """Whether a text switches to mathematics somewhere."""
    return _DELIMITER.search(text) is not None


def stated_answer(text: str) -> str | None:
    """The rest of the last sentence that says "answer is ..." or "answer: ..."."""
    return _last_sentence(_STATED, text)


def final_answer(text: str) -> str | None:
    """The rest of the last sentence that says "final answer is ..."."""
    return _last_sentence(_FINAL, text)


def _last_sentence(pattern: re.Pattern[str], text: str) -> str | None:
    matches = pattern.findall(text)
    if not matches:
        return None
    return _SENTENCE_END.split(matches[-1], maxsplit=1)[0].strip().strip("*").strip() or None
