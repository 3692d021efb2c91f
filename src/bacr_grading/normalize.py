"""Normalizes answers, so that equivalent spellings become equal strings, and parses units.

Called by `compare` for every answer and reference. The comparison itself is not done here.
"""

import re
from typing import NamedTuple

from bacr_grading.notation import (
    closing_brace,
    one_command,
    plain_bases,
    plain_signs,
    without_style,
)
from bacr_grading.units import POWERS, SPACED_SIGN, common_unit, is_unambiguous, unit

_BLANKS = re.compile(r"\s{2,}")
_WRAPPERS = (("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("`", "`"))
# `clean` only strips answers that start with a brace or end with one of these characters.
_ENDINGS = frozenset(")]*`.,;:\\")
# Maximum number of nested delimiters that are removed from an answer.
_MOST_LAYERS = 8
# Matches numbers that none of the rules below changes, so that the rules can be skipped.
_NUMERAL = re.compile(r"-?(?:[0-9](?:[0-9,]*[0-9])?(?:\.[0-9]+)?|\\frac\{[0-9]+\}\{[0-9]+\})\Z")
_DOLLAR = re.compile(r"(?<!\\)\$")
# Euler's number and the imaginary unit in upright type, which math-verify would parse as a unit at
# the end of an answer.
_UPRIGHT = re.compile(r"\\mathrm\s*\{\s*([ei])\s*\}")

# Placeholder for the two backslashes between the rows of a matrix, so that no rule below splits
# them.
ROW_END = "¶"
# Placeholder for a comma that is definitely a list separator, so that "32, 349" is not parsed as
# one number with a thousands separator.
LIST_COMMA = "¦"


def _joined_names(match: re.Match[str]) -> str:
    r"""Rewrites the unit in `\text{...}` with a star for each space and without braces."""
    if match[1].isalpha() or unit(match[1]) is None:
        return match[0]
    names = SPACED_SIGN.sub(r"\1", match[1]).replace("{", "").replace("}", "").split()
    return f"\\text{{{'*'.join(names)}}}"


# Rewrite rules (substring, pattern, replacement), applied in this order. For speed, a rule is
# skipped if the substring does not occur in the answer. Every pattern takes time linear in the
# length of the answer, which is at most ANSWER_CAP characters.
_REWRITES = tuple(
    (needle, re.compile(pattern), replacement)
    for needle, pattern, replacement in (
        ("\\", r"\\(?:math(?:rm|bf|it)|text(?:bf|it|rm|normal)|mbox|operatorname)\b", r"\\text"),
        ("{", r"\{([,:])\}", r"\1"),
        ("\\pmod", r"^(-?\d+)\s*\\pmod\s*\{[^{}]*\}$", r"\1"),
        # "25,\!000": a comma followed by a negative space is a thousands separator.
        ("\\!", r"(,?)\s*\\!\s*", r"\1"),
        ("~", r"[~\s]+", " "),
        # "40 , 200" is a list of two numbers.
        (" ,", r"(?<=\d)\s+,\s*(?=\d{3}(?!\d))", LIST_COMMA),
        ("\\", r"\\[,;:> ]|\\(?:q?quad|thinspace|enspace)(?![A-Za-z])", " "),
        ("\\", r"\\([%$])", r"\1"),
        ("p", r"\\text\s*\{\s*(?:percent(?:age)?|pct)\s*\}|\b(?:percent(?:age)?|pct)\b", "%"),
        ("\\text", r",?\s*\\text\s*\{\s*,?\s*(?:and|or)\s*\}", ", "),
        ("and", r",?\s*(?<![A-Za-z\\])and(?![A-Za-z])", ", "),
        ("or", r",?\s*(?<![A-Za-z\\])or(?![A-Za-z])", ", "),
        ("\\", r"\\(?:vee|wedge)(?![A-Za-z])", ", "),
        ("\\", r"\\(?:left|right)\s*\.", ""),
        ("\\", r"\\(?:left|right|[bB]igg?[lr]?|(?:display|text)style|limits)(?![A-Za-z])\s*", ""),
        ("frac", r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        ("\\", r"\\(?:cdot|times|ast)(?![A-Za-z])", "*"),
        ("\\circ", r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))", "°"),
        ("eq", r"\\([nlg])eq(?:slant)?(?![A-Za-z])", r"\\\1e"),
        ("\\degree", r"\s*\\degree(?![A-Za-z])", "°"),
        ("\\approx", r"^\\approx(?![A-Za-z])", ""),
        # "2 1/2" is a mixed fraction.
        ("/", r"(?<=\d)\s+(\d+)\s*/\s*(\d+)(?!\d)", r"\\frac{\1}{\2}"),
        # "32, 349" is a list of two numbers, but "32,349" is one number.
        (",", r"(?<=\d),\s+(?=\d{3}(?!\d))", LIST_COMMA),
        # \tan^{-1} is the inverse function and not 1/\tan.
        ("^", r"\\(sin|cos|tan|cot|sec|csc)\s*\^\s*\{\s*-\s*1\s*\}", r"\\arc\1"),
        # The names of a product such as "kg m/s^{2}", which would be lost with the spaces below.
        ("\\text{", r"(?<=[^{])\\text\{([^{}]*(?:\{-?\d\}[^{}]*)*)\}", _joined_names),
        # A unit with an exponent, such as "5 cm^2". Units with one letter are not included, because
        # the letter may be a variable.
        ("^", r"(?<=[\s\d}])(mm|cm|km|in|ft|yd|mi)\s?\^\s?(\{[23]\}|[23](?!\d))", r"\\text{\1}^\2"),
        ("", r"(?<!\d)\s+|\s+(?!\d)", ""),
        ("\\", r"\\(frac|sqrt)([0-9A-Za-z])", r"\\\1{\2}"),
        ("frac", r"(\\frac\{[^{}]*\})([0-9A-Za-z])", r"\1{\2}"),
        ("^{", r"\^\{([^{}\\])\}", r"^\1"),
    )
)
_SPACED_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d])")

_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_LETTERS_OUTSIDE = re.compile(r"[^()\s.,;]")
_LETTERS = re.compile(r"\(?[A-Za-z][A-Za-z'.-]*\)?\Z")


def clean(answer: str) -> str:
    """Removes math delimiters, emphasis, styles and the final full stop from an answer.

    The result is still valid LaTeX, which can be parsed.
    """
    if _NUMERAL.match(answer):
        return answer
    text = answer if answer.isascii() else plain_signs(answer)
    # Collapse whitespace first, because patterns that start with whitespace take quadratic time on
    # a long run of spaces.
    text = _BLANKS.sub(" ", text)
    if "$" in text and len(_DOLLAR.findall(text)) > 1:
        text = _DOLLAR.sub("", text)
    text = without_style(one_command(_UPRIGHT.sub(r"\1", text))).strip()
    for _ in range(_MOST_LAYERS):
        if text[-1:] not in _ENDINGS and text[:1] != "{":
            break
        stripped = _strip_layer(text)
        if stripped == text:
            break
        text = stripped
    return text


def _strip_layer(text: str) -> str:
    """Removes one pair of delimiters or braces around a text, and trailing punctuation."""
    for left, right in _WRAPPERS:
        if text.startswith(left) and text.endswith(right):
            text = text[len(left) : -len(right)].strip() or text
    if text.endswith((".", ",", ";", ":")):
        text = text[:-1].rstrip()
    # Keep two backslashes, which are a line break.
    if text.endswith("\\") and not text.endswith("\\\\"):
        text = text[:-1].rstrip()
    if text.startswith("{") and closing_brace(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    return text


def canonical(text: str) -> str:
    """Rewrites a cleaned answer so that equivalent spellings become equal strings.

    The result is used only for comparisons. It is not valid LaTeX, because spaces are removed.
    """
    if _NUMERAL.match(text):
        return text
    text = plain_bases(text.replace("\\\\", ROW_END))
    for needle, pattern, replacement in _REWRITES:
        if needle in text:
            text = pattern.sub(replacement, text)
    if " " in text:
        text = _SPACED_THOUSANDS.sub(lambda match: match.group().replace(" ", ""), text)
    return text


class Words(NamedTuple):
    r"""An answer that consists of words, such as a name, a weekday or a multiple-choice letter.

    Attributes:
      letters: the text in lower case, without spaces and enclosing parentheses.
      is_text: True if the answer is inside `\text{...}`. Otherwise its letters could be a product
        of variables.
    """

    letters: str
    is_text: bool


def words(text: str) -> Words | None:
    """Parses a canonical answer that consists of words, or returns None for any other answer."""
    plain = _TEXT.sub(r"\1", text)
    is_text = plain != text and not _LETTERS_OUTSIDE.search(_TEXT.sub("", text))
    if not is_text and not _LETTERS.match(plain):
        return None
    if "\\" in plain or not any(char.isalpha() for char in plain):
        return None
    return Words(unmarked(text), is_text)


def unmarked(text: str) -> str:
    r"""Returns a canonical answer in lower case, without `\text` and enclosing parentheses."""
    plain = _TEXT.sub(r"\1", text)
    if plain.startswith("(") and plain.endswith(")"):
        plain = plain[1:-1]
    return plain.rstrip(".").casefold()


# --- units ----------------------------------------------------------------------------------------

# A letter outside of a LaTeX command.
VARIABLE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]")
_MULTIPLIERS = {"dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6}
_MULTIPLIERS |= {"billion": 10**9, "trillion": 10**12}
# A multiplier with an optional plural s. A following "th" is rejected, because a millionth is a
# fraction.
_MULTIPLIER = re.compile(rf"(?i)({'|'.join(_MULTIPLIERS)})(?!th(?!ousand))(?:s(?![a-z]))?")
# Words with a mathematical meaning, which are never parsed as units.
_MATHEMATICS = frozenset(
    """
    abs alpha and approximately arccos arcsin arctan beta by choose cos cosh cot csc cubed delta
    det div divided eighth eighths equals exp factorial fifth fifths fourth fourths from gamma
    gcd half halves hundredth hundredths if inf infinity is lambda lcm lim log max minus mod
    modulo mu nan negative not of omega or over phi pi plus power psi quarter quarters ratio
    root sec sin sinh sqrt squared tan tanh theta third thirds times to versus when where
    """.split()  # noqa: SIM905
)
_BARE_UNIT = re.compile(
    r"(.*(?:[\d}%]|\d\.))\s+([A-Za-z][A-Za-z.]*(?:/[A-Za-z]+)?(?:\s+[A-Za-z][A-Za-z.]*){0,3})\Z",
    re.DOTALL,
)
_ATTACHED_UNIT = re.compile(
    r"(?s)(.*[\d}])\s*([mck]m|[mk]g|[mM]L|ml|ft|oz|lbs?|tsp|tbsp|cups?|[mk]ph|hrs?|min|USD|[ap]\.?m)\Z"
)


def split_unit(text: str) -> tuple[str, str] | None:
    """Splits a cleaned answer such as "18 square feet" into the number and up to four words.

    Each word must be a known unit or have at least three letters, because one or two letters may be
    variables. Mathematical words such as "pi" and "over" are not accepted.

    Returns:
      The number and the words as strings, or None if the answer does not have this form.
    """
    match = _BARE_UNIT.match(text)
    if match is not None:
        names = match.group(2).split()
        # "of" is allowed between two words, as in "cups of sugar".
        connecting_count = [name.casefold() for name in names[1:-1]].count("of")
        unit_count = sum(_is_unit_word(name.rstrip(".")) for name in names)
        if unit_count + connecting_count == len(names):
            return match.group(1), " ".join(names)
        return None
    match = _ATTACHED_UNIT.match(text)
    return (match.group(1), match.group(2)) if match else None


def _is_unit_word(name: str) -> bool:
    name = name.casefold()
    if name in _MATHEMATICS:
        return False
    if "/" in name:
        return is_unambiguous(name)
    return len(name) >= 3 or common_unit(name) is not None or name in POWERS or name == "fl"


def split_multiplier(name: str) -> tuple[int, str]:
    """Splits the words after a number into a factor and the remaining words.

    For example, "hundred millions" becomes (10**8, "") and "dozen eggs" becomes (12, "eggs").
    """
    factor = 1
    rest = name.strip()
    while match := _MULTIPLIER.match(rest):
        factor *= _MULTIPLIERS[match[1].casefold()]
        rest = rest[match.end() :].strip()
    return factor, rest
