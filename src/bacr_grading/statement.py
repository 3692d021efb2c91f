r"""What an answer states: one thing, in mathematics that is known, or more than that.

A computer algebra system finds a value in nearly anything: "\neq 5", "6 \\ 5", "5 = 6 = 5".
A reward must not, so that the strict mode compares such an answer by its spelling only.
"""

import math
import re
from typing import NamedTuple

from bacr_grading.compare import ELISION, Answer, split
from bacr_grading.forms import operations
from bacr_grading.normalize import LIST_COMMA, split_multiplier, split_unit, unit


class Claim(NamedTuple):
    """One equality that a right answer has to fulfil.

    Attributes:
      places: decimal places to which it is stated, or None for an exact statement.
    """

    answer: Answer
    reference: Answer
    places: int | None = None


# Most answers: integers and decimals.
_PLAIN = re.compile(r"[-+]?\$?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?%?")
_FRACTION = re.compile(r"-?\\d?frac\{([0-9]{1,18})\}\{([0-9]{1,18})\}")
_COMMAND = re.compile(r"\\(?:[A-Za-z]+|.)", re.DOTALL)
# Commands whose meaning the comparison knows. What negates, hedges, strikes out, hides, points from
# one thing to another or breaks a line is not among them.
_KNOWN = frozenset(
    "\\" + name
    for name in r"""
    frac dfrac tfrac cfrac sqrt binom dbinom tbinom pi infty e
    alpha beta gamma delta epsilon varepsilon zeta eta theta kappa lambda mu nu xi rho sigma tau
    phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega ell
    sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp min max gcd det arg
    sum prod int lim to cdot times div ast pm mp cup cap in le leq leqslant ge geq geqslant lt gt
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
# A unit, and right behind it another quantity.
_UNIT_THEN_MORE = re.compile(r"\\text\{[^{}]*\}(?:\^(?:\d|\{-?\d+\}))?[0-9A-Za-z(]")
# 2 5 behind a logarithm are its base and its number.
_TWO_NUMBERS = re.compile(r"(?<!\\log_)\d\s+\d")
_ORDER = re.compile(r"[<>]|\\(?:leq?(?:slant)?|geq?(?:slant)?|lt|gt|in)(?![A-Za-z])")
_RANGE = re.compile(r"^\(.*,|\[|\\\{|\\cup|\\cap")
_LETTER = (
    r"(?:[A-Za-z]|\\(?!sqrt|frac|binom|sin|cos|tan|log|ln|exp|lim|sum|prod|int|gcd|lcm|max|min|det|arg"
    r"|pi(?![A-Za-z])|infty|text)[A-Za-z]+(?:\s*\{[^{}]*\})?|\\text[a-z]*\{[^{}]*\})"
)
_BELOW = r"(?:\s*_\s*(?:\w|\{[^{}]*\}|\\[A-Za-z]+))?"
_MARKS = r"(?:\s*(?:'+|\^\s*(?:\{\s*(?:\\prime|\\ast|\*|'|-1)+\s*\}|\\prime|\\ast|\*)))?"
_ARGUMENTS = r"(?:\s*(?:\([^()=]*(?:\([^()=]*\)[^()=]*)*\)|\[[^\[\]=]*\]))?"
_D = r"(?:d|\\partial)\s?"
# What may stand in front of the equals sign: the name of what is asked for, and no expression.
_NAME = re.compile(
    rf"""
    {_LETTER}{_BELOW}{_MARKS}{_BELOW}{_ARGUMENTS}
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
# Commands that bind the variables of an expression, which is a constant then.
_BOUND = re.compile(r"\\(?:int|sum|prod|lim|begin|det)(?![A-Za-z])")
_APPROX = re.compile(r"\\approx(?![A-Za-z])")
_EQUALS = re.compile("(?<![<>!])=")
_COMMA = re.compile(f"[,;{LIST_COMMA}]")


def claims(raw: str, answer: Answer, reference: Answer) -> tuple[Claim, ...] | None:
    r"""What has to be true for an answer to be right.

    `raw` is the answer before its last full stops are cleaned away. One comparison with the
    reference, or for a chain ("\frac{5}{2} = 2.5", "\frac{2}{3} \approx 0.667") one for each of its
    members; None when the answer says more than one thing, or something whose meaning isn't known,
    so that only its spelling can be compared.
    """
    if raw == answer.text and (_PLAIN.fullmatch(raw) or _in_lowest_terms(raw)):
        return (Claim(answer, reference),)
    if ELISION.search(raw) and not ELISION.search(reference.text):
        return None
    if answer.key == reference.key:
        return (Claim(answer, reference),)
    if not _known_signs(answer, reference) or not _only_units(answer, reference):
        return None
    if _TWO_NUMBERS.search(answer.key) or not _comparable(answer, reference):
        return None
    wanted = _members(answer, reference)
    if not wanted or (answer.ratio and reference.ratio):
        return wanted
    return wanted if _is_evaluated(wanted, reference) else None


def _in_lowest_terms(text: str) -> bool:
    """True if a text is one plain fraction that needs no further work."""
    match = _FRACTION.fullmatch(text)
    if match is None:
        return False
    bottom = int(match[2])
    return bottom > 1 and math.gcd(int(match[1]), bottom) == 1


def _is_evaluated(wanted: tuple[Claim, ...], reference: Answer) -> bool:
    r"""True unless the reference is a number and the answer is arithmetic that leads to it.

    An operation that the reference leaves undone too may stay: `2^{10}` is right where the
    reference has a power. One member of a chain has to be evaluated.
    """
    allowed = None if reference.words else operations(reference)
    if allowed is None or any(_ORDER.search(claim.answer.key) for claim in wanted):
        return True
    members = [claim.answer for claim in wanted if claim.places is None]
    undone = {member: operations(member) for member in members}
    if any(left is None and not _BOUND.search(member.key) for member, left in undone.items()):
        return False
    return any(left is not None and left <= allowed for left in undone.values())


def _known_signs(answer: Answer, reference: Answer) -> bool:
    """Whether every sign and command is known, or is the reference's own."""
    text, theirs = answer.text, reference.text
    odd = {char for char in text if not _CHARACTERS.fullmatch(char)} - set(theirs)
    if odd or (_ODD_SIGNS.search(text) and not _ODD_SIGNS.search(theirs)):
        return False
    if "\\" not in text:
        return True
    if set(_COMMAND.findall(text)) - _KNOWN - set(_COMMAND.findall(theirs)):
        return False
    environments = set(_ENVIRONMENT.findall(text))
    if environments - _TABLES - set(_ENVIRONMENT.findall(theirs)):
        return False
    if "\\{" in text and ":" in text and ":" not in theirs:
        return False
    rows = _TABLE.sub("", text) if environments else text
    return "\\\\" not in rows or "\\\\" in theirs


def _only_units(answer: Answer, reference: Answer) -> bool:
    """Whether all running text in an answer joins a list, names a unit or is the reference's."""
    theirs = [content.strip() for _, content in _GROUP.findall(reference.text)]
    own = split_unit(reference.text) if reference.text[-1:].isalpha() else None
    theirs += [own[1]] if own else []
    for match in _GROUP.finditer(answer.text):
        content = match[2].strip()
        if match.group() == answer.text or content in theirs or _JOINING.fullmatch(content):
            continue
        if match[1] not in ("text", "mbox") and _SYMBOL.fullmatch(content):
            continue
        if match.start() == 0 and _named_quantity(content, answer.text[match.end() :]):
            continue
        if not names_what_is_counted(content):
            return False
    if _UNIT_THEN_MORE.search(answer.key):
        return False
    bare = split_unit(answer.text) if answer.text[-1:].isalpha() else None
    return bare is None or any(names_what_is_counted(bare[1], own) for own in theirs or [""])


def _named_quantity(words: str, rest: str) -> bool:
    """True if words that begin an answer name the quantity on the other side of an equals sign."""
    if not rest.lstrip().startswith("=") or not _WORDS.fullmatch(words):
        return False
    return not any(_denied(name) for name in words.casefold().split())


def _comparable(answer: Answer, reference: Answer) -> bool:
    """Whether both are of kinds that can be equal: brackets matter, and so do inequalities."""
    order = bool(_ORDER.search(answer.key))
    if order and not (_ORDER.search(reference.key) or _RANGE.search(reference.key)):
        return False
    if answer.items is None:
        return True
    kind = answer.items.kind
    if not order and kind in ("list", "set") and _ORDER.search(reference.key):
        return False
    theirs = reference.items.kind if reference.items else kind
    if "set" in (kind, theirs):
        return kind in ("list", "set") and theirs in ("list", "set")
    return theirs != "list" or kind in ("list", "()")


def _members(answer: Answer, reference: Answer) -> tuple[Claim, ...] | None:
    """The claims of an answer that may be a chain of equalities, or a list with names."""
    exact, approximate = split(answer.text, _APPROX), split(reference.text, _APPROX)
    if len(exact) > 1 and len(approximate) == 1:
        return _approximate(exact, reference)
    if answer.ratio and reference.ratio and len(answer.ratio) == len(reference.ratio):
        members = (*answer.ratio, *reference.ratio)
        if all(member.number for member in members):
            return (Claim(answer, reference),)
        return _proportions(answer.ratio, reference.ratio)
    parts = [part.strip() for part in split(answer.text, _EQUALS)]
    if len(parts) == 1:
        return (Claim(answer, reference),)
    if len(split(reference.text, _EQUALS)) > 1:
        return _equation(answer, reference, parts)
    if _listed(answer):
        named = all(_named_once(part) for part in split(answer.key, _COMMA))
        return (Claim(answer, reference),) if named else None
    if not parts[0] or _names(parts[0]):
        if len(parts) == 2 and answer.assignment:
            return (Claim(answer, reference),)
        parts = parts[1:]
    elif _names(parts[-1]):
        parts = parts[:-1]
    return tuple(Claim(Answer(part), reference) for part in parts)


def _equation(answer: Answer, reference: Answer, parts: list[str]) -> tuple[Claim, ...] | None:
    """The claim of an equation whose reference is an equation too; no chain is one."""
    if _listed(answer):
        return (Claim(answer, reference),)
    if len(parts) > 2:
        return None
    solved = reference.assignment is not None and operations(reference.assignment[1]) is not None
    if not solved or _names(parts[0]):
        return (Claim(answer, reference),)
    # "x = 5" is solved, and "2x = 10" is not.
    return (Claim(Answer(f"{parts[1]}={parts[0]}"), reference),) if _names(parts[1]) else None


def _proportions(answer: tuple[Answer, ...], reference: tuple[Answer, ...]) -> tuple[Claim, ...]:
    """The claims that two ratios of three or more are proportional."""
    return tuple(
        Claim(
            Answer(f"({one.key})*({reference[0].key})"), Answer(f"({other.key})*({answer[0].key})")
        )
        for one, other in zip(answer[1:], reference[1:], strict=True)
    )


def _listed(answer: Answer) -> bool:
    return len(split(answer.key, _COMMA)) > 1


def _named_once(part: str) -> bool:
    """Whether a member of a list is a value, or one name and its value."""
    sides = split(part, _EQUALS)
    return len(sides) == 1 or (len(sides) == 2 and _names(sides[0]))


def _names(head: str) -> bool:
    """True if what precedes an equals sign is the name of something, and no expression."""
    return _NAME.fullmatch(head.strip()) is not None


def _approximate(parts: list[str], reference: Answer) -> tuple[Claim, ...] | None:
    r"""The claims of "exact \approx decimal", or of a decimal behind the sign alone."""
    right = Answer(parts[-1].strip())
    number = right.number
    if len(parts) > 2 or number is None:
        return None
    name = parts[0].strip()
    if not name or _names(name):
        return (Claim(right, reference),)
    exact = _members(Answer(parts[0].strip()), reference)
    if exact is None:
        return None
    return (*exact, Claim(right, exact[-1].answer, number.places))


# --- words after a number -------------------------------------------------------------------------

# Words may follow each other ("square feet"), and "miles per hour" or "km/h" has two parts.
_PART = re.compile(r"\s*(?:/|\bper\b)\s*")
_OF = re.compile(r"\s+of\s+")
# Powers and brackets of a product of units: "kg m/s^2", "J/(kg K)".
_AROUND = re.compile(r"\^\s*\{?-?\d+\}?|[()*~{}]|\\cdot")
_WORDS = re.compile(r"[A-Za-z]+\.?(?:\s+[A-Za-z]+\.?){0,3}")
MOST_UNKNOWN = 2

# What may follow the thing that is counted, or stand alone: "18 years old", "18 left".
_TRAILING = frozenset("old left total each long tall wide deep high remaining altogether".split())  # noqa: SIM905
# Things that are counted without a plural s.
_COUNTED = frozenset(
    """
    baht children data deer dice feet fish franc geese grandchildren men mice people percent peso
    ruble rupee sheep teeth women won yen yuan
    """.split()  # noqa: SIM905
)
# Other things that school problems count, in the singular; a plural s may follow, and a number may
# stand in front of either ("1 slice", "5 slice").
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
# Units of the sciences, which no school problem's table has; compared without case.
_SCIENTIFIC = frozenset(
    """
    a ampere amp angstrom atm au bar c cal coulomb dyne erg ev f farad g gauss gev gy h henry hz j
    joule k kcal kelvin kev khz kj kn kpa kpc kv kw kwh lm lux lx ly m mev mhz mol mole mpc ms mw n
    newton nm ns ohm pa pascal pc ph s sr t tesla torr v volt w watt wb weber
    """.split()  # noqa: SIM905
)
# Words that could say more than what is counted: numbers and shares, how sure one is, whether,
# comparisons, and all that joins two answers. The plurals and the adverbs that would otherwise
# pass for a thing that is counted are the ones that matter.
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


def names_what_is_counted(words: str, reference: str = "") -> bool:
    """Whether words after a number are a unit, or the things counted, and say nothing else.

    True for units of the table, multipliers, plurals and a few nouns without one, with up to two
    words in front or "old", "left" and the like behind, and always for the words of the reference;
    False where a word could be another answer, a doubt or a negation.
    """
    text = " ".join(_AROUND.sub(" ", words).split()).strip(".").strip()
    if not text or text.casefold() == reference.strip().strip(".").casefold():
        return True
    parts = _PART.split(text)
    if len(parts) > 2:
        return False
    first = _OF.split(parts[0])
    if len(first) > 2 or not all(_counted(part, plural=True) for part in first):
        return False
    return all(_counted(p, plural=False) for p in parts[1:])


def _counted(text: str, *, plural: bool) -> bool:
    if _is_unit(text) or not text:
        return True
    if not _WORDS.fullmatch(text):
        return False
    names = [name.rstrip(".").casefold() for name in split_multiplier(text)[1].split()]
    if any(_denied(name) for name in names):
        return False
    while names and names[-1] in _TRAILING:
        names.pop()
    unknown = [name for name in names if not _is_unit(name)]
    # A letter by itself is a variable or one of several choices.
    if len(unknown) > MOST_UNKNOWN or any(len(name) == 1 for name in unknown):
        return False
    return not names or not plural or _is_unit(names[-1]) or _counts(names[-1])


def _is_unit(name: str) -> bool:
    return unit(name) is not None or name.casefold() in _SCIENTIFIC


def _denied(name: str) -> bool:
    if _is_unit(name):
        return False
    singular = {name, name[:-1], name[:-2], f"{name[:-3]}y"}
    return bool(_NEVER & singular) or name.endswith("ly")


def _counts(name: str) -> bool:
    if name in _NOUNS:
        return True
    ending = name.endswith("s") and not name.endswith(("ss", "us", "is")) and len(name) > 3
    return ending or name in _COUNTED
