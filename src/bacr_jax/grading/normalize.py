"""One spelling for answers that differ only in how LaTeX writes them."""

import re

_UNICODE = str.maketrans(
    {
        **{chr(0xFF10 + digit): str(digit) for digit in range(10)},
        **dict.fromkeys("−–—﹣－‐‑", "-"),
        **dict.fromkeys("\u00a0\u2002\u2003\u2009\u202f\u3000", " "),
        **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", ""),
        "＋": "+",
        "（": "(",
        "）": ")",
        "，": ",",
        "．": ".",
        "／": "/",
        "：": ":",
        "＝": "=",
        "％": "%",
        "×": "\\times ",
        "·": "\\cdot ",
        "⋅": "\\cdot ",
        "÷": "/",
        "π": "\\pi ",
        "∞": "\\infty ",
        "√": "\\sqrt ",
        "≤": "\\le ",
        "≥": "\\ge ",
        "≠": "\\ne ",
        "≈": "\\approx ",
        "∪": "\\cup ",
        "∩": "\\cap ",
        "∈": "\\in ",
        "±": "\\pm ",
        "°": "^\\circ ",
        "²": "^{2}",
        "³": "^{3}",
        "½": "\\frac{1}{2}",
        "¼": "\\frac{1}{4}",
        "¾": "\\frac{3}{4}",
    }
)
_WRAPPERS = (("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("`", "`"))

_STRIPPABLE = frozenset("$)]*`.,;:\\}")
# What every rule below leaves alone.
_NUMERAL = re.compile(r"-?(?:[0-9](?:[0-9,]*[0-9])?(?:\.[0-9]+)?|\\frac\{[0-9]+\}\{[0-9]+\})\Z")
# Outside matrices "\\\\frac" is "\\frac" that was escaped once too often.
# Euler's number and the imaginary unit; math-verify takes them for a unit at the end.
# \\frac\\pi 2 is \\frac{\\pi}{2}; math-verify reads only the part before it.
_FRAC_OF_COMMANDS = re.compile(
    r"\\([dtc]?frac)\s*(\\(?!sqrt|[dtc]?frac|text|math)[A-Za-z]+|[0-9A-Za-z])\s*"
    r"(\\(?!sqrt|[dtc]?frac|text|math)[A-Za-z]+|[0-9A-Za-z])"
)
_UPRIGHT = re.compile(r"\\mathrm\s*\{\s*([ei])\s*\}")
_DOLLAR = re.compile(r"(?<!\\)\$")
_DOUBLED = re.compile(r"\\\\(?=[A-Za-z])")


def clean(answer: str) -> str:
    """Strips what is not part of an answer: math delimiters, emphasis, the full stop after it.

    Args:
        answer: what a box or tag holds.

    Returns:
        LaTeX that a parser can still read.
    """
    if _NUMERAL.match(answer):
        return answer
    text = answer if answer.isascii() else answer.translate(_UNICODE)
    if "\\begin" not in text:
        text = _DOUBLED.sub(r"\\", text)
    if text.count("$") > 1 and len(_DOLLAR.findall(text)) > 1:
        text = _DOLLAR.sub("", text)
    if "frac" in text:
        text = _FRAC_OF_COMMANDS.sub(r"\\\1{\2}{\3}", text)
    text = _UPRIGHT.sub(r"\1", text).strip()
    for _ in range(8):
        if not text or (text[-1] not in _STRIPPABLE and text[0] != "{"):
            break
        before = text
        for left, right in _WRAPPERS:
            if (
                len(text) > len(left) + len(right)
                and text.startswith(left)
                and text.endswith(right)
            ):
                inner = text[len(left) : -len(right)]
                if (left if left[0] == "\\" else left[0]) not in inner:
                    text = inner.strip()
        if text[-1:] in ".,;:" and not text.endswith(".."):
            text = text[:-1].rstrip()
        if text.endswith("\\") and not text.endswith("\\\\"):
            text = text[:-1].rstrip()
        if text.startswith("{") and _whole_group(text):
            text = text[1:-1].strip()
        if text == before:
            break
    return text


def _whole_group(text: str) -> bool:
    """Whether the brace that opens the text closes at its very end."""
    depth = 0
    escaped = False
    for place, char in enumerate(text):
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if not depth:
                return place == len(text) - 1
    return False


# Stands for the two backslashes between the rows of a matrix, so that no rewrite splits them.
ROW_END = "¶"
# Stands for a comma that surely separates a list, where without it one number could be read.
LIST_COMMA = "¦"

# In order: a rule runs only where its first string occurs, which most answers are spared. Each
# pattern is linear in an answer, which is at most ANSWER_CAP characters long.
_REWRITES: tuple[tuple[str, re.Pattern[str], str], ...] = tuple(
    (needle, re.compile(pattern), replacement)
    for needle, pattern, replacement in (
        (
            "\\",
            r"\\(?:mathrm|mathbf|mathit|textbf|textit|textrm|textnormal|mbox|operatorname)\b",
            r"\\text",
        ),
        ("{,}", r"\{,\}", ","),
        ("{:}", r"\{:\}", ":"),
        ("\\pmod", r"^(-?\d+)\s*\\pmod\s*\{[^{}]*\}$", r"\1"),
        # "25,\!000": the negative space marks the comma as a thousands separator
        ("\\!", r"(,?)\s*\\!\s*", r"\1"),
        ("~", "~", " "),
        ("\\", r"\\[,;:> ]|\\(?:q?quad|thinspace|enspace)(?![A-Za-z])", " "),
        ("\\%", r"\\%", "%"),
        ("p", r"\\text\s*\{\s*(?:percent(?:age)?|pct)\s*\}|\b(?:percent(?:age)?|pct)\b", "%"),
        ("\\text", r",?\s*\\text\s*\{\s*,?\s*(?:and|or)\s*\}", ", "),
        ("and", r",?\s*(?<![A-Za-z\\])and(?![A-Za-z])", ", "),
        ("or", r",?\s*(?<![A-Za-z\\])or(?![A-Za-z])", ", "),
        ("\\", r"\\(?:left|right)\s*\.", ""),
        ("\\", r"\\(?:left|right|[bB]igg?[lr]?|(?:display|text)style|limits)(?![A-Za-z])\s*", ""),
        ("frac", r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        ("eq", r"\\(le|ge|ne)q(?![A-Za-z])", r"\\\1"),
        ("\\lt", r"\\lt(?![A-Za-z])", "<"),
        ("\\gt", r"\\gt(?![A-Za-z])", ">"),
        ("\\", r"\\(?:cdot|times|ast)(?![A-Za-z])", "*"),
        ("\\$", r"\\\$", "$"),
        ("\\circ", r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))", "°"),
        ("\\degree", r"\s*\\degree(?![A-Za-z])", "°"),
        ("\\approx", r"^\\approx(?![A-Za-z])", ""),
        ("\\sim", r"^\\sim(?![A-Za-z])", ""),
        # 2 1/2 is two and a half
        ("/", r"(?<=\d)\s+(\d+)\s*/\s*(\d+)(?!\d)", r"\\frac{\1}{\2}"),
        # "32, 349" is two numbers, "32,349" is one
        (",", r"(?<=\d),\s+(?=\d{3}(?!\d))", LIST_COMMA),
        ("", r"(?<!\d)\s+|\s+(?!\d)", ""),
        ("frac", r"\\frac\{([^{}]*)\}([0-9A-Za-z])", r"\\frac{\1}{\2}"),
        ("frac", r"\\frac([0-9A-Za-z])\{", r"\\frac{\1}{"),
        ("frac", r"\\frac([0-9A-Za-z])([0-9A-Za-z])", r"\\frac{\1}{\2}"),
        ("\\sqrt", r"\\sqrt([0-9A-Za-z])", r"\\sqrt{\1}"),
        ("^{", r"\^\{([^{}\\])\}", r"^\1"),
        ("_{", r"_\{([^{}\\])\}", r"_\1"),
        ("", r"[.,;]$", ""),
    )
)
_SPACED_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d])")


def canonical(text: str) -> str:
    """Rewrites a cleaned answer so that equal spellings become equal strings.

    Args:
        text: the output of `clean`.

    Returns:
        A string for comparing. It is not meant for a LaTeX parser: the spaces are gone.
    """
    if _NUMERAL.match(text):
        return text
    text = text.replace("\\\\", ROW_END)
    for needle, pattern, replacement in _REWRITES:
        if needle in text:
            text = pattern.sub(replacement, text)
    if " " in text:
        text = _SPACED_THOUSANDS.sub(lambda match: match.group().replace(" ", ""), text)
    return text


_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_LETTERS_OUTSIDE = re.compile(r"[^()\s.,;]")
_LETTERS = re.compile(r"\(?[A-Za-z][A-Za-z'.-]*\)?\Z")


def words(text: str) -> tuple[str, bool] | None:
    """Reads a canonical answer that is prose: a name, a weekday, a choice letter.

    Returns:
        The lower-case text without spaces and enclosing parentheses, and whether it was marked as
        text in LaTeX (so that its letters can't be a product of variables); None for mathematics.
    """
    plain = _TEXT.sub(r"\1", text)
    marked = plain != text and not _LETTERS_OUTSIDE.search(_TEXT.sub("", text))
    if not marked and not _LETTERS.match(plain):
        return None
    if not any(char.isalpha() for char in plain) or "\\" in plain:
        return None
    return unmarked(text), marked


def unmarked(text: str) -> str:
    """The lower-case text of a canonical answer without its marks of text and outer parentheses."""
    plain = _TEXT.sub(r"\1", text)
    if plain.startswith("(") and plain.endswith(")"):
        plain = plain[1:-1]
    return plain.rstrip(".").casefold()
