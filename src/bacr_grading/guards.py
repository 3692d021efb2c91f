"""Rejects answers that would take a computer algebra system too much time or memory to evaluate.

`judge` calls `refuse` before it sends a comparison to math-verify. The checks only look at the text
and evaluate nothing.
"""

import math
import re

# Limits of an answer: number of characters, nesting depth, number of consecutive digits, exponent,
# operand of a factorial, number of terms of an expanded power, and number of cells of a matrix. For
# comparison, the longest answer in MATH has 159 characters and the maximum nesting depth is 4.
MAX_CHARS = 1000
MAX_DEPTH = 24
MAX_DIGIT_RUN = 100
MAX_POWER = 10_000
MAX_FACTORIAL = 1000
MAX_TERMS = 5_000
MAX_MATRIX_CELLS = 64

_DIGITS = re.compile(rf"\d{{{MAX_DIGIT_RUN + 1},}}")
_LARGE_INTEGER = re.compile(r"\d[\d, ]*")
_FACTORIAL = re.compile(r"\d\s*!\s*!|(\d[\d,]*|[)}\]])\s*!(?!=)")
# A short sum of small numbers and variables, with at least one variable and without products or
# powers.
_SYMBOLIC = re.compile(r"(?=.*[A-Za-z])(?:[-+]?\d{0,3}[A-Za-z]?){1,6}")
_MOST_SYMBOLIC = 24
_BIG_OPERATOR = re.compile(r"\\(?:[dt]?binom|choose|sum|prod|bigcup|bigcap)")
_POWER = re.compile(r"(?:\^|\*\*)\s*")
_LETTER = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")
_SIGNED_INTEGER = re.compile(r"[-+]?\d+")
_ESCAPED = re.compile(r"\\.", re.DOTALL)
_NOT_TEXT = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f\ud800-\udfff]")
_CODE = re.compile(r"__|\b(?:import|lambda|eval|exec)\b")
_PYTHON_TOWER = re.compile(r"\*\*[\s(]*[\w.]+[\s)]*\*\*")
_UNBOUNDED_IN_EXPONENT = re.compile(r"!|\\[dt]?binom|\\sum|\\prod")


def refuse(text: str) -> bool:
    """True if an answer exceeds a limit and must not be sent to math-verify.

    The limits are generous, and no reference answer of MATH or GSM8K is close to them. The deadline
    and the memory limit of the workers still apply to all other answers.

    Args:
      text: the answer after `normalize.clean`.
    """
    if len(text) > MAX_CHARS or not_text(text) or _CODE.search(text):
        return True
    depth = nesting(text)
    if depth is None or depth > MAX_DEPTH:
        return True
    if _DIGITS.search(text):
        return True
    cell_ends = text.count("&") + text.count("\\\\")
    if cell_ends > MAX_MATRIX_CELLS:
        return True
    if _has_large_factorial(text):
        return True
    if _BIG_OPERATOR.search(text) and max(_integers(text), default=0) > MAX_FACTORIAL:
        return True
    return _has_large_power(text)


def _has_large_factorial(text: str) -> bool:
    """True if a text contains a double factorial, or a factorial of a large or unknown number."""
    for match in _FACTORIAL.finditer(text):
        operand = match.group(1)
        if operand in (")", "}", "]"):
            if not _is_symbolic(text, match.start()):
                return True
        elif operand is None or _integer(operand) > MAX_FACTORIAL:
            return True
    return False


def _is_symbolic(text: str, end: int) -> bool:
    """True if the parentheses that close at `end` contain a short sum with a variable, as in (2n)!.

    The factorial of such a sum is allowed, because it is not evaluated.
    """
    start = text.rfind("(", 0, end)
    if start < 0 or text[end] != ")":
        return False
    content = text[start + 1 : end].replace(" ", "")
    if len(content) > _MOST_SYMBOLIC:
        return False
    return _SYMBOLIC.fullmatch(content) is not None


def not_text(text: str) -> bool:
    """True if a text contains control characters or unpaired surrogates."""
    return _NOT_TEXT.search(text) is not None


def nesting(text: str) -> int | None:
    """Returns the maximum nesting depth of braces and brackets, or None for unbalanced braces."""
    braces = 0
    brackets = 0
    deepest = 0
    for char in _ESCAPED.sub("", text):
        braces += (char == "{") - (char == "}")
        brackets = max(brackets + (char in "([") - (char in ")]"), 0)
        if braces < 0:
            return None
        deepest = max(deepest, braces + brackets)
    return deepest if braces == 0 else None


def _integer(digits: str) -> int:
    return int(re.sub(r"\D", "", digits) or 0)


def _integers(text: str) -> list[int]:
    return [_integer(match.group()) for match in _LARGE_INTEGER.finditer(text)]


def _has_large_power(text: str) -> bool:
    """True if a text contains a tower of powers, a large power, or a power that has many terms."""
    if _PYTHON_TOWER.search(text):
        return True
    letters = len(set(_LETTER.findall(text)))
    for match in _POWER.finditer(text):
        exponent, end = _operand(text, match.end())
        if _POWER.match(text, end) or _UNBOUNDED_IN_EXPONENT.search(exponent):
            return True
        size = _exponent_size(exponent)
        if size is None or size > MAX_POWER:
            return True
        base = text[: match.start()].rstrip()
        if size > 1 and base.endswith((")", "}")):
            # A sum of k terms, raised to the power n, expands to C(n + k - 1, k - 1) terms.
            summands = min(max(letters, 2), 12)
            terms = math.comb(int(size) + summands - 1, summands - 1)
            if terms > MAX_TERMS:
                return True
    return False


def _operand(text: str, start: int) -> tuple[str, int]:
    """Returns the exponent that starts at position `start`, and the position of its end.

    The exponent is the content of a group in braces or parentheses, an integer, or one character.
    """
    if start >= len(text):
        return "", start
    opening = text[start]
    if opening in "{(":
        closing = "}" if opening == "{" else ")"
        depth = 0
        for position in range(start, len(text)):
            depth += (text[position] == opening) - (text[position] == closing)
            if not depth:
                return text[start + 1 : position], position + 1
        return text[start + 1 :], len(text)
    number = _SIGNED_INTEGER.match(text, start)
    end = number.end() if number else start + 1
    return text[start:end], end


def _exponent_size(exponent: str) -> int | float | None:
    """Returns an upper bound on the value of an exponent.

    Returns None if the exponent itself contains a large power or a tower of powers.
    """
    numbers = _integers(exponent)
    caret = _POWER.search(exponent)
    if caret is None:
        is_quotient = "\\frac" in exponent or "/" in exponent
        factors = numbers[:1] if is_quotient else numbers
        return math.prod(max(number, 1) for number in factors)
    inner, _ = _operand(exponent, caret.end())
    power = max(_integers(inner), default=1)
    if power > 64 or len(_POWER.findall(exponent)) > 1:
        return None
    return float(max(numbers, default=1)) ** power
