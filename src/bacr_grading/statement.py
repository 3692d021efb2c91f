r"""Checks that an answer makes a single statement in notation that the comparison supports.

Used by the strict mode of `judge`. A computer algebra system extracts a value from almost any text,
including "\neq 5", "6 \\ 5" and "5 = 6 = 5". A reward function must not accept such answers as 5.
The strict mode therefore compares them with the reference only as strings.
"""

import math
import re
from typing import NamedTuple

from bacr_grading.compare import ELISION, is_same_without_text
from bacr_grading.forms import operations
from bacr_grading.normalize import LIST_COMMA, split_multiplier, split_unit
from bacr_grading.notation import plain_bases
from bacr_grading.parsed_answer import ParsedAnswer, split
from bacr_grading.units import unit


class Claim(NamedTuple):
    """A claim: an equality that must be true for the answer to be correct.

    Attributes:
      answer: the left side, usually the answer or a part of the answer.
      reference: the right side, usually the reference answer.
      places: number of decimal places to which the answer was rounded. None if it is exact.
    """

    answer: ParsedAnswer
    reference: ParsedAnswer
    places: int | None = None


# Integers and decimals, which most answers are.
_PLAIN = re.compile(r"[-+]?\$?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?%?")
_FRACTION = re.compile(r"-?\\d?frac\{([0-9]{1,18})\}\{([0-9]{1,18})\}")
_COMMAND = re.compile(r"\\(?:[A-Za-z]+|.)", re.DOTALL)
# LaTeX commands that the comparison supports. The list deliberately excludes commands that negate,
# strike out or hide something, as well as arrows and line breaks.
_KNOWN = frozenset(
    "\\" + name
    for name in r"""
    frac dfrac tfrac cfrac sqrt binom dbinom tbinom pi infty e
    alpha beta gamma delta epsilon varepsilon zeta eta theta kappa lambda mu nu xi rho sigma tau
    phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega ell
    sin cos tan cot sec csc arcsin arccos arctan arccot arcsec arccsc sinh cosh tanh
    log ln lg exp min max gcd det arg sum prod int lim
    to cdot times div ast pm mp cup cap in le leq leqslant ge geq geqslant lt gt
    approx bmod pmod mod left right big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr
    limits displaystyle textstyle quad qquad thinspace enspace text textnormal textrm textbf textit
    mbox mathrm mathbf mathit mathbb mathcal operatorname circ degree overline angle triangle
    lfloor rfloor lceil rceil lvert rvert vert begin end prime perp parallel emptyset wedge vee
    Pr partial overrightarrow vec hat bar
    , ; : ! % $ { } ( ) [ ] > |
    """.split()  # noqa: SIM905
) | {"\\ ", "\\\\", "\\\n"}
_CHARACTERS = re.compile(r"[A-Za-z0-9\s+\-*/^_=<>()\[\]{}|,;:.!%&$\\~°€£¢]*")
_ODD_SIGNS = re.compile(r"!\s*=|=\s*[=/<>]|[:/\\]\s*=|<\s*>")
_TABLE = re.compile(r"\\begin\{(\w*matrix|array)\}.*?\\end\{\1\}", re.DOTALL)
_ENVIRONMENT = re.compile(r"\\begin\s*\{([^{}]*)\}")
_TABLES = frozenset(["matrix", "pmatrix", "bmatrix", "vmatrix", "Bmatrix", "Vmatrix", "array"])
_GROUP = re.compile(
    r"\\(text(?:normal|rm|bf|it)?|mbox|math(?:rm|bf|it|bb|cal)|operatorname)\s*\{([^{}]*)\}"
)
_JOINING = re.compile(r"\s*,?\s*(?:and|or)?\s*")
_SYMBOL = re.compile(r"[A-Za-z]|gcd|lcm|lim|max|min|sin|cos|tan|log|ln")
# A unit that is directly followed by another quantity.
_UNIT_THEN_MORE = re.compile(r"\\text\{[^{}]*\}(?:\^(?:\d|\{-?\d+\}))?[0-9A-Za-z(]")
# Two numbers separated by a space. After a logarithm, "2 5" is its base and its argument.
_TWO_NUMBERS = re.compile(r"(?<!\\log_)\d\s+\d")
_ORDER = re.compile(r"[<>]|\\(?:leq?(?:slant)?|geq?(?:slant)?|lt|gt|in)(?![A-Za-z])")
_RANGE = re.compile(r"^\(.*,|\[|\\\{|\\cup|\\cap")
# LaTeX symbols and accents that a name may contain. Operations such as \sin and \sqrt are missing,
# because the equation \sin(x) = 1 does not state that the answer is 1.
_SYMBOLS = (
    r"(?:alpha|beta|gamma|delta|(?:var)?epsilon|zeta|eta|(?:var)?theta|iota|kappa|lambda|mu|nu|xi"
    r"|(?:var)?rho|(?:var)?sigma|tau|upsilon|(?:var)?phi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi"
    r"|Pi|Sigma|Upsilon|Phi|Psi|Omega|ell|hbar|Re|Im|nabla|triangle"
    r"|vec|hat|bar|tilde|dot|ddot|wide(?:hat|tilde)|over(?:line|rightarrow|leftrightarrow)"
    r"|underline|boldsymbol|pmb)"
)
# Words that name an operation, as in \operatorname{sin}(x).
_OPERATIONS = (
    r"(?:sqrt|cbrt|(?:arc|a)?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|lg|exp|lim|sum|prod|int|gcd|lcm"
    r"|max|min|det|arg|abs|floor|ceil|round|sgn|not)"
)
_LETTER = (
    rf"(?:[A-Za-z]|\\{_SYMBOLS}(?![A-Za-z])(?:\s*\{{[^{{}}]*\}})?"
    rf"|\\(?:text|math|mbox|operatorname)[a-z]*\s*"
    rf"\{{(?!\s*{_OPERATIONS}\s*\}}\s*[\^_(\[])[^{{}}]*\}})"
)
_BELOW = r"(?:\s*_\s*(?:\w|\{[^{}]*\}|\\[A-Za-z]+))?"
_MARKS = r"(?:\s*(?:'+|\^\s*(?:\{\s*(?:\\prime|\\ast|\*|')+\s*\}|\\prime|\\ast|\*)))?"
# The inverse of a function is a name, as in f^{-1}(2). For a variable, x^{-1} = 3 states that x is
# 1/3, so x^{-1} is not a name.
_INVERSE = r"\s*\^\s*\{\s*-\s*1\s*\}"
_CALL = r"\s*(?:\([^()=]*(?:\([^()=]*\)[^()=]*)*\)|\[[^\[\]=]*\])"
_D = r"(?:d|\\partial)\s?"
# Names of quantities such as "x", "f(x)", "\angle ABC" or "total cost". Only a name may precede the
# equals sign in an answer such as "x = 5".
_NAME = re.compile(
    rf"""
    {_LETTER}{_BELOW}{_MARKS}{_BELOW}(?:{_CALL})?
    | {_LETTER}{_BELOW}{_INVERSE}{_BELOW}{_CALL}
    | (?:m\s?)?(?:\\(?:angle|measuredangle|triangle|square)\s*)?(?:\\text\{{\s*)?[A-Z]{{2,4}}\}}?'?
    | \\(?:angle|measuredangle)\s*(?:[A-Za-z]|\\[a-z]+)
    | \[[A-Z]{{3,6}}\] | [|][A-Z]{{2}}[|]
    | \(\s*{_LETTER}{_BELOW}(?:\s*,\s*{_LETTER}{_BELOW})+\s*\)
    | \(\s*[A-Za-z]\s*\\circ\s*[A-Za-z]\s*\)\s*\([^()=]*\)
    | \\frac\s*\{{\s*{_D}[\w^]*\s?[A-Za-z]?\s*\}}\{{\s*{_D}[A-Za-z][\w^]*\s*\}}
    | d[a-z]/d[a-z] | \\Pr\s*(?:\([^()]*\)|\[[^\[\]]*\])
    | [A-Z][a-z]{{2,}}(?:\s[A-Za-z]+){{0,5}}
    | (?:area|volume|perimeter|probability|total|answer|ans|speed|distance|time|cost|price|number
      |height|width|length|radius|slope|mean|median|mode|range|average|maximum|minimum|profit|age
      |result|value|solution|ratio|percent|remainder|product|difference|sum)(?:\s[A-Za-z]+){{0,5}}
    """,
    re.VERBOSE,
)
_INVERSE_OF_MATRIX = re.compile(rf"\s*[A-Z]{_INVERSE}\s*")
# Commands that bind variables, so that an expression with letters can still be a constant.
_BOUND = re.compile(r"\\(?:int|sum|prod|lim|begin|det)(?![A-Za-z])")
_APPROX = re.compile(r"\\approx(?![A-Za-z])")
_EQUALS = re.compile("(?<![<>!])=")
_COMMA = re.compile(f"[,;{LIST_COMMA}]")


def claims(raw: str, answer: ParsedAnswer, reference: ParsedAnswer) -> tuple[Claim, ...] | None:
    r"""Returns the equalities that must all be true for an answer to be correct.

    Args:
      raw: the answer before `normalize.clean` removed delimiters and the final full stop.
      answer: the parsed answer.
      reference: the reference answer.

    Returns:
      A single comparison with the reference, or one comparison for each member of a chain such as
      "\frac{5}{2} = 2.5" or "\frac{2}{3} \approx 0.667". None if the answer makes more than one
      statement or uses unsupported notation, and can therefore only be compared as a string.
    """
    if raw == answer.text and (_PLAIN.fullmatch(raw) or _in_lowest_terms(raw)):
        return (Claim(answer, reference),)
    if ELISION.search(raw) and not ELISION.search(reference.text):
        return None
    if is_same_without_text(answer, reference):
        return (Claim(answer, reference),)
    if not _known_signs(answer, reference) or not _only_units(answer, reference):
        return None
    if _TWO_NUMBERS.search(answer.key) or not _comparable(answer, reference):
        return None
    equalities = _members(answer, reference)
    if not equalities or (answer.ratio and reference.ratio) or (answer.clock and reference.clock):
        return equalities
    return equalities if _is_evaluated(equalities, reference) else None


def _in_lowest_terms(text: str) -> bool:
    """True if a text is a single fraction of two integers in lowest terms."""
    match = _FRACTION.fullmatch(text)
    if match is None:
        return False
    denominator = int(match[2])
    return denominator > 1 and math.gcd(int(match[1]), denominator) == 1


def _is_evaluated(equalities: tuple[Claim, ...], reference: ParsedAnswer) -> bool:
    r"""True unless the reference is a number and the answer is unevaluated arithmetic.

    The answer may contain the operations that the reference contains: `2^{10}` is accepted if the
    reference contains a power. In a chain of equalities, only one member has to be evaluated.
    """
    allowed = None if reference.words else operations(reference)
    if allowed is None or any(_ORDER.search(claim.answer.key) for claim in equalities):
        return True
    has_evaluated_member = False
    for claim in equalities:
        if claim.places is not None:
            continue
        undone = operations(claim.answer)
        if undone is None:
            if not _BOUND.search(claim.answer.key):
                return False
        elif undone <= allowed:
            has_evaluated_member = True
    return has_evaluated_member


def _known_signs(answer: ParsedAnswer, reference: ParsedAnswer) -> bool:
    """True if every character and command of an answer is supported or occurs in the reference."""
    text = answer.text
    target = reference.text
    odd_characters = {char for char in text if not _CHARACTERS.fullmatch(char)} - set(target)
    if odd_characters or (_ODD_SIGNS.search(text) and not _ODD_SIGNS.search(target)):
        return False
    if "\\" not in text:
        return True
    if set(_COMMAND.findall(text)) - _KNOWN - set(_COMMAND.findall(target)):
        return False
    environments = set(_ENVIRONMENT.findall(text))
    if environments - _TABLES - set(_ENVIRONMENT.findall(target)):
        return False
    if "\\{" in text and ":" in text and ":" not in target:
        # Set-builder notation, such as {x : x > 0}.
        return False
    # Outside of a matrix or array, a line break separates two statements.
    outside_tables = _TABLE.sub("", text) if environments else text
    return "\\\\" not in outside_tables or "\\\\" in target


def _only_units(answer: ParsedAnswer, reference: ParsedAnswer) -> bool:
    """True if no words in an answer can change its meaning.

    For example, words may join list members, name a unit, a counted noun or a quantity, or occur in
    the reference.
    """
    reference_words = [content.strip() for _, content in _GROUP.findall(reference.text)]
    reference_unit = _bare_unit(reference.text)
    if reference_unit is not None:
        reference_words.append(reference_unit)
    # The digits of a number such as \text{2A}_{16} are no words.
    text = plain_bases(answer.text)
    for match in _GROUP.finditer(text):
        content = match[2].strip()
        if match.group() == text or content in reference_words:
            continue
        if not _is_harmless(match, content, text):
            return False
    if _UNIT_THEN_MORE.search(answer.key):
        return False
    answer_unit = _bare_unit(answer.text)
    if answer_unit is None:
        return True
    return any(names_counted_noun(answer_unit, words) for words in reference_words or [""])


def _bare_unit(text: str) -> str | None:
    r"""Returns the words after the number in an answer, without `\text`, or None if missing."""
    if not text[-1:].isalpha():
        return None
    number_and_words = split_unit(text)
    return None if number_and_words is None else number_and_words[1]


def _is_harmless(match: re.Match[str], content: str, text: str) -> bool:
    r"""True if the words in `\text{...}` cannot change the meaning of an answer.

    Args:
      match: a match of `_GROUP` in `text`.
      content: the words inside the braces.
      text: the whole answer.
    """
    if _JOINING.fullmatch(content):
        return True
    if match[1] not in ("text", "mbox") and _SYMBOL.fullmatch(content):
        return True
    if match.start() == 0 and _is_quantity_name(content, text[match.end() :]):
        return True
    return names_counted_noun(content)


def _is_quantity_name(words: str, rest: str) -> bool:
    """True if the words at the start of an answer name a quantity, as in "area = 5".

    Args:
      words: the words at the start of the answer.
      rest: the rest of the answer, which must begin with the equals sign.
    """
    if not rest.lstrip().startswith("=") or not _WORDS.fullmatch(words):
        return False
    return not any(_could_change_meaning(name) for name in words.casefold().split())


def _comparable(answer: ParsedAnswer, reference: ParsedAnswer) -> bool:
    """True if the types of the answer and the reference can be equal.

    Their brackets must agree, and an inequality can only be equal to an inequality or an interval.
    """
    is_inequality = answer.assignment is None and bool(_ORDER.search(answer.key))
    if is_inequality and not (_ORDER.search(reference.key) or _RANGE.search(reference.key)):
        return False
    if answer.items is None:
        return True
    kind = answer.items.kind
    if not is_inequality and kind in ("list", "set") and _ORDER.search(reference.key):
        return False
    target_kind = reference.items.kind if reference.items else kind
    if "set" in (kind, target_kind):
        return kind in ("list", "set") and target_kind in ("list", "set")
    return target_kind != "list" or kind in ("list", "()")


def _members(answer: ParsedAnswer, reference: ParsedAnswer) -> tuple[Claim, ...] | None:
    """Returns the equalities of an answer, which may be a chain, a ratio or a list.

    Returns:
      The equalities, or None if the answer makes more than one statement.
    """
    around_approx = split(answer.text, _APPROX)
    if len(around_approx) > 1 and len(split(reference.text, _APPROX)) == 1:
        return _approximate(around_approx, reference)
    if answer.ratio and reference.ratio and len(answer.ratio) == len(reference.ratio):
        if all(member.number for member in (*answer.ratio, *reference.ratio)):
            return (Claim(answer, reference),)
        return _proportions(answer.ratio, reference.ratio)
    sides = [side.strip() for side in split(answer.text, _EQUALS)]
    if len(sides) == 1:
        return (Claim(answer, reference),)
    if len(split(reference.text, _EQUALS)) > 1:
        return _equation(answer, reference, sides)
    if _is_list(answer):
        has_values = all(_is_value_or_named(part) for part in split(answer.key, _COMMA))
        return (Claim(answer, reference),) if has_values else None
    if len(sides) == 2 and answer.assignment and (not sides[0] or _is_name(sides[0])):
        return (Claim(answer, reference),)
    return tuple(Claim(ParsedAnswer(side), reference) for side in _without_name(sides))


def _without_name(sides: list[str]) -> list[str]:
    """Removes the name of a quantity, or an empty side, from one end of a chain of equalities.

    Args:
      sides: the parts of an answer between its equals signs.
    """
    if not sides[0] or _is_name(sides[0]):
        return sides[1:]
    if _INVERSE_OF_MATRIX.fullmatch(sides[0]) and "matrix}" in sides[-1]:
        return sides[1:]
    if _is_name(sides[-1]):
        return sides[:-1]
    return sides


def _equation(
    answer: ParsedAnswer, reference: ParsedAnswer, sides: list[str]
) -> tuple[Claim, ...] | None:
    """Returns the comparison of an answer with a reference that is an equation.

    Args:
      answer: the answer, which contains an equals sign.
      reference: the reference equation.
      sides: the parts of the answer between its equals signs.

    Returns:
      The comparison. None if the answer is a chain of equalities, or if only the reference is
      solved for its variable.
    """
    if _is_list(answer):
        return (Claim(answer, reference),)
    if len(sides) > 2:
        return None
    solution = reference.assignment
    if solution is None or operations(solution.value) is None or _is_name(sides[0]):
        return (Claim(answer, reference),)
    # "5 = x" is a solved equation, but "2x = 10" is not.
    if not _is_name(sides[1]):
        return None
    return (Claim(ParsedAnswer(f"{sides[1]}={sides[0]}"), reference),)


def _proportions(
    answer: tuple[ParsedAnswer, ...], reference: tuple[ParsedAnswer, ...]
) -> tuple[Claim, ...]:
    """Returns the equalities that must be true for two ratios to be proportional.

    The ratio a : b : c is proportional to p : q : r if b * p = q * a and c * p = r * a.
    """
    equalities = []
    for member, target in zip(answer[1:], reference[1:], strict=True):
        left = ParsedAnswer(f"({member.key})*({reference[0].key})")
        right = ParsedAnswer(f"({target.key})*({answer[0].key})")
        equalities.append(Claim(left, right))
    return tuple(equalities)


def _is_list(answer: ParsedAnswer) -> bool:
    return len(split(answer.key, _COMMA)) > 1


def _is_value_or_named(part: str) -> bool:
    """True if a list member has the form "value" or "name = value"."""
    sides = split(part, _EQUALS)
    return len(sides) == 1 or (len(sides) == 2 and _is_name(sides[0]))


def _is_name(side: str) -> bool:
    """True if one side of an equation is the name of a quantity and not an expression."""
    return _NAME.fullmatch(side.strip()) is not None


def _approximate(sides: list[str], reference: ParsedAnswer) -> tuple[Claim, ...] | None:
    r"""Returns the equalities of "exact \approx decimal" or "name \approx decimal".

    Args:
      sides: the parts of the answer between the approximation signs.
      reference: the reference answer.

    Returns:
      The equalities, or None if the last side is not a number or there are more than two sides.
    """
    decimal = ParsedAnswer(sides[-1].strip())
    if len(sides) > 2 or decimal.number is None:
        return None
    left = sides[0].strip()
    if not left or _is_name(left):
        return (Claim(decimal, reference),)
    exact = _members(ParsedAnswer(left), reference)
    if exact is None:
        return None
    return (*exact, Claim(decimal, exact[-1].answer, decimal.number.places))


# --- words after a number -------------------------------------------------------------------------

# Separates the two parts of a unit such as "miles per hour" or "km/h".
_PART = re.compile(r"\s*(?:/|\bper\b)\s*")
_OF = re.compile(r"\s+of\s+")
# Exponents, brackets and dots in a product of units, such as "kg m/s^2" or "J/(kg K)".
_AROUND = re.compile(r"\^\s*\{?-?\d+\}?|[()*~{}]|\\cdot")
_WORDS = re.compile(r"[A-Za-z]+\.?(?:\s+[A-Za-z]+\.?){0,3}")
MOST_UNKNOWN = 2

# Words that may follow a counted noun or a number, as in "18 years old" and "18 left".
_TRAILING = frozenset("old left total each long tall wide deep high remaining altogether".split())  # noqa: SIM905
# Plural nouns that do not end with an s.
_COUNTED = frozenset(
    """
    baht children data deer dice feet fish franc geese grandchildren men mice people percent peso
    ruble rupee sheep teeth women won yen yuan
    """.split()  # noqa: SIM905
)
# Other nouns that are counted in school problems, in the singular. The singular is accepted after
# any number, because models write "5 slice".
_NOUNS = frozenset(
    """
    actor adult animal ant apartment apple arrangement attempt backpack bag ball balloon banana bar
    barrel basket battery bead bean bee bill bird bite block board boat book bottle bowl box boy
    bracelet brick bucket bug bulb bunch bus button cake call calorie candle candy car card
    carton cat chair chapter chick chicken child chip chocolate choice circle class classmate clip
    clove coin color combination computer container cookie corner couple coupon cow crate crayon
    crumb cube cupcake customer dancer delegate desk diagonal digit dime divisor doctor dog doll
    donut door dot doughnut draw dress drop duck duckling edge egg element email employee envelope
    eraser event face factor family farmer finger fish flip floor flower fly folder friend fruit
    function game gift girl glass goal goat goldfish goose grape group guest handshake hat head hen
    hit hole home homer horse house individual inning integer item jar jelly jug key kid kitten
    lamb lamp lap leaf lemon lesson letter lightbulb line loaf lollipop loss magazine man marble
    mark marker match mate meal meeting member message mistake mouse move muffin mug necklace
    nickel night note notebook number nurse nut object octave onion option orange order orphan
    outcome outfit pack package packet page painting pair pancake panel parent part passenger path
    patient pattern peach pear pen pencil penguin penny people period permutation person peso phone
    photo picture pie piece pig pill pinch pitch pitcher pizza plane plant plate player pocket
    point pole pond pool portion possibility post potato prize problem program pup puppy puzzle
    question rabbit racer recipe rectangle region residue revolution ring road robot roll room root
    rope rose rotation row ruler run runner rupee sandwich scoop seat section seed sequence serving
    set shape share sheet shelf shell ship shirt shoe shot shower side singer skater slice snack
    sock soldier solution song space spectator spider spoon square stair stalk stamp stapler star
    step stick sticker stone store story strawberry string student subset survey sweater swimmer
    table tablet tail task teacher team term test throw ticket tie tile tin tire toffee tomato
    tooth toothpick toss toy track trail train tray treat tree trial triangle trip truck turn unit
    value vegetable vertex vertices vote voter wagon walk wall watch watermelon way wheel win
    window winner woman word worker yen yolk
    """.split()  # noqa: SIM905
)
# Scientific units that are not in the table of units in `normalize`. They are case-insensitive.
_SCIENTIFIC = frozenset(
    """
    a ampere amp angstrom atm au bar c cal coulomb dyne erg ev f farad g gauss gev gy h henry hz j
    joule k kcal kelvin kev khz kj kn kpa kpc kv kw kwh lm lux lx ly m mev mhz mol mole mpc ms mw n
    newton nm ns ohm pa pascal pc ph s sr t tesla torr v volt w watt wb weber
    """.split()  # noqa: SIM905
)
# Words that could change the meaning of an answer: numbers, fractions, comparisons, words that
# express doubt or negation, and words that join two answers. Plurals are the most important words
# in this list, because they would otherwise be accepted as counted nouns.
_NEVER = frozenset(
    """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
    sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety
    once twice thrice double doubled triple tripled half halves third thirds quarter quarters
    fourth fourths fifth fifths sixth sixths seventh sevenths eighth eighths ninth ninths tenth
    tenths hundredth hundredths thousandth thousandths millionth millionths billionth billionths
    first hundred squared cubed squares cubes eins sechs trois dos tres seis dois zes
    plus minus least most under over below above within between beyond minimum maximum
    about around roughly approx like versus unless perhaps maybe guess guesses possibly
    other others else otherwise either neither nor not never none yes nope false true
    unknown unsure sometimes always besides instead thus hence also and but then than except
    is was has does this his its us as alias alternatives options choices guesswork doubts
    oder ou vel aut und sowie ossia sive
    """.split()  # noqa: SIM905
)


def names_counted_noun(words: str, reference: str = "") -> bool:
    """True if the words after a number are only a unit or a counted noun, such as "18 red apples".

    Accepts known units, multipliers such as "million", plural nouns and a list of singular nouns.
    Up to two other words may precede them, and words such as "old" and "left" may follow. The words
    of the reference are always accepted. Words that could express another answer, doubt or negation
    are rejected.
    """
    text = " ".join(_AROUND.sub(" ", words).split())
    text = text.strip(".").strip()
    target = reference.strip().strip(".")
    if not text or text.casefold() == target.casefold() or unit(words) is not None:
        return True
    parts = _PART.split(text)
    if len(parts) > 2:
        return False
    around_of = _OF.split(parts[0])
    if len(around_of) > 2 or not all(_is_counted(part, plural=True) for part in around_of):
        return False
    return all(_is_counted(part, plural=False) for part in parts[1:])


def _is_counted(text: str, *, plural: bool) -> bool:
    """True if a text of up to four words is a unit or a counted noun.

    Args:
      text: the words.
      plural: if True, the last word must be a unit, a plural, or a noun in `_NOUNS` or `_COUNTED`.
    """
    if _is_unit(text) or not text:
        return True
    if not _WORDS.fullmatch(text):
        return False
    names = [name.rstrip(".").casefold() for name in split_multiplier(text)[1].split()]
    if any(_could_change_meaning(name) for name in names):
        return False
    while names and names[-1] in _TRAILING:
        names.pop()
    other_words = [name for name in names if not _is_unit(name)]
    # A single letter could be a variable or a multiple-choice answer.
    if len(other_words) > MOST_UNKNOWN or any(len(name) == 1 for name in other_words):
        return False
    if not names or not plural:
        return True
    return _is_unit(names[-1]) or _is_countable(names[-1])


def _is_unit(name: str) -> bool:
    return unit(name) is not None or name.casefold() in _SCIENTIFIC


def _could_change_meaning(name: str) -> bool:
    """True if a word could change the meaning of an answer.

    These are the words of `_NEVER`, their plurals, and words that end with "ly", except for units.
    """
    if _is_unit(name):
        return False
    singulars = {name, name[:-1], name[:-2], f"{name[:-3]}y"}
    return bool(_NEVER & singulars) or name.endswith("ly")


def _is_countable(name: str) -> bool:
    """True if a word is in `_NOUNS` or `_COUNTED`, or looks like a regular plural."""
    if name in _NOUNS or name in _COUNTED:
        return True
    return len(name) > 3 and name.endswith("s") and not name.endswith(("ss", "us", "is"))
