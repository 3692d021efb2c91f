r"""Normalizes mathematical notation to a subset of LaTeX that math-verify can parse.

Handles Unicode symbols, synonymous commands, missing braces, fonts and colours. Called by
`normalize.clean` for every answer and reference.
"""

import re
import unicodedata

# --- braces ---------------------------------------------------------------------------------------

_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)


def closing_brace(text: str, start: int, limit: int | None = None) -> int | None:
    """Returns the position of the brace that closes the brace at `start`, or None if missing.

    Only positions before `limit` are searched. Escaped braces are ignored.
    """
    depth = 0
    for match in _BRACES.finditer(text, start, len(text) if limit is None else limit):
        token = match.group()
        if token == "{":
            depth += 1
        elif token == "}":
            depth -= 1
            if not depth:
                return match.start()
    return None


# --- Unicode --------------------------------------------------------------------------------------

# Unicode symbols, each followed by the LaTeX command with the same meaning.
_SYMBOLS = r"""
× \times · \cdot ⋅ \cdot π \pi ∞ \infty ≤ \le ⩽ \le ≥ \ge ⩾ \ge ≠ \ne ≈ \approx ∪ \cup ∩ \cap
∈ \in ± \pm ∓ \mp ° ^\circ ∅ \emptyset ∠ \angle △ \triangle ∧ \wedge ∨ \vee → \to ∑ \sum ∏ \prod
∫ \int … \ldots ⋯ \ldots ∣ | ⟨ \langle ⟩ \rangle ⌊ \lfloor ⌋ \rfloor ⌈ \lceil ⌉ \rceil ∘ \circ
ℝ \mathbb{R} ℕ \mathbb{N} ℤ \mathbb{Z} ℚ \mathbb{Q} ℂ \mathbb{C} ⊥ \perp ∥ \parallel
α \alpha β \beta γ \gamma δ \delta ε \varepsilon ζ \zeta η \eta θ \theta ι \iota κ \kappa
λ \lambda μ \mu µ \mu ν \nu ξ \xi ρ \rho σ \sigma τ \tau υ \upsilon φ \varphi ϕ \phi χ \chi
ψ \psi ω \omega Γ \Gamma Δ \Delta Θ \Theta Λ \Lambda Ξ \Xi Π \Pi Σ \Sigma Φ \Phi Ψ \Psi Ω \Omega
"""
_PLAIN: dict[str, str] = {
    **dict.fromkeys("−–—﹣‐‑", "-"),
    **dict.fromkeys("\u00a0\u2002\u2003\u2009\u202f\u3000", " "),
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\ufe0f\u2061\u2062", ""),
    **{symbol: f"{command} " for symbol, command in re.findall(r"(\S) (\S+)", _SYMBOLS)},
    "÷": "/",
    "∕": "/",
    "⁄": "/",
    "′": "'",
    "″": "''",
    "٪": "%",
    "﹪": "%",
}
_UNICODE = str.maketrans(_PLAIN)
_SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ"
_SUBSCRIPTS = "₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑₒₓₙₘₖᵢⱼ"
_RAISED = re.compile(f"[{_SUPERSCRIPTS}]+")
_LOWERED = re.compile(f"[{_SUBSCRIPTS}]+")
_SMALL_FRACTION = re.compile("([⁰¹²³⁴⁵⁶⁷⁸⁹]+)[⁄/]([₀₁₂₃₄₅₆₇₈₉]+)")
_ROOTS = {"√": "\\sqrt", "∛": "\\sqrt[3]", "∜": "\\sqrt[4]"}
_ROOT = re.compile(r"([√∛∜])\s*(\d+(?:\.\d+)?|[A-Za-z]|\\[A-Za-z]+|(?=[({]))")


def plain_signs(text: str) -> str:
    """Converts Unicode mathematics to LaTeX: ⅓, 10⁵, √2, x₁, ℝ, bold and full-width letters."""
    text = "".join(map(_fraction_or_digit, text))
    text = _SMALL_FRACTION.sub(_fraction, text)
    text = _RAISED.sub(_superscript, text)
    text = _LOWERED.sub(_subscript, text)
    text = text.translate(_UNICODE)
    return _roots(text)


def _compatible(text: str) -> str:
    return unicodedata.normalize("NFKC", text).replace("−", "-")


def _fraction(match: re.Match[str]) -> str:
    return f"\\frac{{{_compatible(match[1])}}}{{{_compatible(match[2])}}}"


def _superscript(run: re.Match[str]) -> str:
    return f"^{{{_compatible(run[0])}}}"


def _subscript(run: re.Match[str]) -> str:
    content = _compatible(run[0])
    return f"_{content}" if len(content) == 1 else f"_{{{content}}}"


def _fraction_or_digit(char: str) -> str:
    """Converts a Unicode fraction to LaTeX, and a styled letter or digit to ASCII.

    All other characters are returned unchanged.
    """
    if char.isascii():
        return char
    kind = unicodedata.decomposition(char)
    if kind.startswith("<fraction>"):
        top, _, bottom = unicodedata.normalize("NFKC", char).partition("⁄")
        return f"\\frac{{{top}}}{{{bottom}}}" if bottom else char
    if kind.startswith(("<font>", "<wide>")) and char not in _PLAIN:
        return unicodedata.normalize("NFKC", char)
    digit = unicodedata.decimal(char, None)
    return char if digit is None else str(digit)


def _roots(text: str) -> str:
    r"""Converts root signs such as √ to `\sqrt` with braces around the radicand."""
    if not any(sign in text for sign in _ROOTS):
        return text
    text = _ROOT.sub(_root, text)
    for sign, command in _ROOTS.items():
        text = text.replace(sign, f"{command} ")
    for command in ("\\sqrt(", "\\sqrt[3](", "\\sqrt[4]("):
        start = text.find(command)
        while start >= 0:
            opening = start + len(command) - 1
            closing = _closing_bracket(text, opening)
            if closing is None:
                break
            inner = text[opening + 1 : closing]
            text = f"{text[:opening]}{{{inner}}}{text[closing + 1 :]}"
            start = text.find(command, start + 1)
    return text


def _root(match: re.Match[str]) -> str:
    content = f"{{{match[2]}}}" if match[2] else ""
    return f"{_ROOTS[match[1]]}{content}"


def _closing_bracket(text: str, start: int) -> int | None:
    depth = 0
    for position in range(start, len(text)):
        depth += (text[position] == "(") - (text[position] == ")")
        if not depth:
            return position
    return None


# --- commands that print the same sign ------------------------------------------------------------

_SYNONYMS = {
    name: target
    for target, names in (
        ("\\emptyset", "varnothing"),
        ("\\{", "lbrace"),
        ("\\}", "rbrace"),
        ("[", "lbrack"),
        ("]", "rbrack"),
        ("(", "lparen"),
        (")", "rparen"),
        ("|", "vert lvert rvert mvert"),
        ("\\le", "leqq leqslant leq"),
        ("\\ge", "geqq geqslant geq"),
        ("\\ne", "neq"),
        ("<", "lt"),
        (">", "gt"),
        (":", "colon"),
        ("\\wedge", "land"),
        ("\\vee", "lor"),
        ("\\to", "rightarrow longrightarrow"),
        ("\\ldots", "dots dotsc dotso cdots dotsb"),
        ("\\frac", "nicefrac sfrac xfrac flatfrac"),
        ("\\binom", "dbinom tbinom"),
        ("\\cdot", "cdotp centerdot"),
        ("\\tan", "tg"),
        ("\\cot", "ctg cotg"),
        ("\\arctan", "arctg atan"),
        ("\\arcsin", "asin"),
        ("\\arccos", "acos"),
        ("\\infty", "infin"),
        ("\\mathbb{R}", "R reals Reals"),
        ("\\mathbb{N}", "N"),
        ("\\mathbb{Z}", "Z"),
        ("\\mathbb{Q}", "Q"),
        ("^\\circ", "textdegree"),
        ("\\$", "textdollar"),
        ("\\%", "textpercent"),
        ("£", "pounds textsterling"),
        ("€", "euro texteuro"),
        ("i", "imath"),
    )
    for name in names.split()
}
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_BLACKBOARD = re.compile(r"\\(?:Bbb|mathbb|mathbbm|mathds)\s*(?:\{\s*([A-Z])\s*\}|([A-Z]))")
_NO_MEMBERS = re.compile(r"\\\{\s*\\\}")
# A single token as an argument without braces: \frac\pi 2 means \frac{\pi}{2}, which math-verify
# does not parse.
_TOKEN = r"(\\(?!sqrt|[dtc]?frac|text|math)[A-Za-z]+|[0-9A-Za-z])"
_BARE_FRACTION = re.compile(rf"\\([dtc]?frac)\s*{_TOKEN}\s*{_TOKEN}")
_RAISED_FRACTION = re.compile(r"\^\s*(\\[dtc]?frac\{[^{}]*\}\{[^{}]*\})")
_BARE_ROOT = re.compile(rf"\\sqrt\s*(\[[^\[\]{{}}]*\])\s*{_TOKEN}")
_WORD_BELOW = re.compile(
    r"_\s*\{?\s*\\(?:(?:text(?:rm|it|bf)?|math(?:rm|it|bf)|mbox|operatorname)\s*\{\s*([A-Za-z0-9]+)"
    r"\s*\}|(max|min))\s*(\}?)"
)
_INFIX = re.compile(r"\{([^{}]*)\\(over|choose)(?![A-Za-z])([^{}]*)\}")


def one_command(text: str) -> str:
    """Replaces synonymous LaTeX commands by one command and adds optional braces."""
    if "\\" not in text:
        return text
    text = _COMMAND.sub(_synonym, text)
    text = _BLACKBOARD.sub(_blackboard_letter, text)
    text = _NO_MEMBERS.sub(r"\\emptyset", text)
    if "frac" in text:
        text = _BARE_FRACTION.sub(r"\\\1{\2}{\3}", text)
        text = _RAISED_FRACTION.sub(r"^{\1}", text)
    if "[" in text:
        text = _BARE_ROOT.sub(r"\\sqrt\1{\2}", text)
    if "_" in text:
        text = _WORD_BELOW.sub(_subscript_word, text)
    if "\\over" in text or "\\choose" in text:
        text = _INFIX.sub(_prefix, f"{{{text}}}")
        if text.startswith("{") and closing_brace(text, 0) == len(text) - 1:
            text = text[1:-1]
    return text


def _synonym(match: re.Match[str]) -> str:
    return _SYNONYMS.get(match[1], match[0])


def _blackboard_letter(match: re.Match[str]) -> str:
    return f"\\mathbb{{{match[1] or match[2]}}}"


def _subscript_word(match: re.Match[str]) -> str:
    if match[0].count("{") > match[0].count("}"):
        return match[0]
    return f"_{{{match[1] or match[2]}}}"


def _prefix(match: re.Match[str]) -> str:
    r"""Converts `{a \over b}` to `\frac{a}{b}` and `{a \choose b}` to `\binom{a}{b}`."""
    command = "\\frac" if match[2] == "over" else "\\binom"
    return f"{command}{{{match[1].strip()}}}{{{match[3].strip()}}}"


# --- numbers in another base ----------------------------------------------------------------------

_DIGITS = r"[0-9A-Za-z]+(?:\.[0-9A-Za-z]+)?"
# Digits in parentheses or in a font, with a base as subscript. A letter or a bracket in front makes
# the parentheses an argument, as in f(2)_3.
_GROUPED_DIGITS = re.compile(
    rf"(?<![A-Za-z0-9)}}\]])"
    rf"(?:\(\s*({_DIGITS})\s*\)|\\(?:text|math|mbox|operatorname)[a-z]*\s*\{{\s*({_DIGITS})\s*\}})"
    r"\s*_\s*(?:(\d)(?!\d)|\{\s*(\d+)\s*\})"
)


def plain_bases(text: str) -> str:
    r"""Rewrites numbers such as `(1010)_2` and `\text{2A}_{16}` without the group: `1010_{2}`."""
    return _GROUPED_DIGITS.sub(_without_group, text) if "_" in text else text


def _without_group(match: re.Match[str]) -> str:
    digits = match[1] or match[2]
    base = match[3] or match[4]
    return f"{digits}_{{{base}}}" if are_digits(digits, base) else match[0]


def are_digits(text: str, base: str) -> bool:
    """True if a text is a number in a base: "1010" in base 2, and "ff", but not "f", in base 16.

    A single letter may be a variable.
    """
    if text.isalpha() and len(text) == 1:
        return False
    # A base has at most two digits. Python would not parse thousands of digits.
    size = int(base) if len(base) <= 2 else 0
    if not 2 <= size <= 36:
        return False
    digits = text.replace(".", "")
    return all(int(digit, 36) < size for digit in digits)


# --- fonts and colours ----------------------------------------------------------------------------

_COLOURS = re.compile(
    r"\\(?:textcolor|colorbox|color)\s*(?:\[[^\[\]]*\])?\{[^{}]*\}\s*"
    r"|\\fcolorbox\s*\{[^{}]*\}\s*\{[^{}]*\}\s*"
)
_SWITCHES = re.compile(
    r"\\(?:bf|rm|it|sf|tt|em|bfseries|itshape|boldmath|tiny|scriptsize|footnotesize|small|normalsize"
    r"|large|Large|LARGE|huge|Huge|mathstrut|strut|nolimits|allowbreak|nobreak)(?![A-Za-z])\s*"
)
# Commands that change only the appearance of their argument.
_LOOKS = re.compile(
    r"\\(?:underline|uline|underbar|boldsymbol|bm|pmb|mathbf|mathsf|mathtt|mathnormal|ensuremath"
    r"|textup|textmd|textsl|textsf|texttt|emph|textbf|textit|mathrm|mathit)\s*\{"
)
_LETTERS = re.compile(r"[A-Za-z]")
_TEXT_NUMBER = re.compile(
    r"\\(?:text|textrm|textnormal|mbox|hbox|mathrm|textbf|textit|mathit)\s*\{\s*"
    r"([-+]?\s?\\?[$€£]?\s?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:\s*/\s*\d+)?\s?\\?%?)"
    r"(\s+[A-Za-z][A-Za-z .]*)?\s*\}"
)
_ALWAYS = ("underline", "uline", "underbar", "boldsymbol", "bm", "pmb", "ensuremath")
# Maximum number of font commands that are processed in one answer.
_MOST_FONTS = 64


def without_style(text: str) -> str:
    r"""Removes fonts, colours and underlining, which do not change the value of an answer.

    Words stay inside `\text{...}`, but numbers are moved out of it: `\textbf{6}` becomes `6`, and
    `\text{3 hours}` becomes `3\text{ hours}`.
    """
    if "\\" not in text:
        return text
    if "color" in text:
        text = _COLOURS.sub("", text)
    text = _SWITCHES.sub("", text)
    text = _TEXT_NUMBER.sub(_number_and_words, text)
    position = 0
    for _ in range(_MOST_FONTS):
        opening = _LOOKS.search(text, position)
        if opening is None:
            break
        closing = closing_brace(text, opening.end() - 1)
        if closing is None:
            break
        content = text[opening.end() : closing]
        name = opening[0].rstrip("{").strip().lstrip("\\")
        letters = _LETTERS.search(re.sub(r"\\[A-Za-z]+", "", content))
        is_formula = name.startswith("math") and "\\" in content
        if name in _ALWAYS or is_formula or not letters:
            content = _group_if_needed(text, opening.start(), content)
            text = text[: opening.start()] + content + text[closing + 1 :]
            position = opening.start()
        else:
            position = opening.end()
    return _TEXT_NUMBER.sub(_number_and_words, text)


def _group_if_needed(text: str, start: int, content: str) -> str:
    r"""Wraps content in braces if it follows a command, `^` or `_` at position `start`."""
    command = re.search(r"\\[A-Za-z]+\Z", text[max(start - 32, 0) : start])
    needs_group = start > 0 and (text[start - 1] in "^_" or command)
    return f"{{{content}}}" if needs_group else content


def _number_and_words(match: re.Match[str]) -> str:
    number = match[1].strip()
    return f"{number}\\text{{ {match[2].strip()}}}" if match[2] else number
