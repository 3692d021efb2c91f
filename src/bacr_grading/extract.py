"""Where the answer is in a text: the last closed box or answer tag, in linear time; or prose."""

import re
from dataclasses import dataclass

from bacr_grading.notation import closing_brace

# A box that holds more than this is not an answer. The longest answer in MATH has 159 characters.
ANSWER_CAP = 2000
# Boxes further apart than this, or more of them, are separate statements and not one list.
RUN_GAP = 40
RUN_LENGTH = 16
# Blanks and dots in a box that mentions the command.
MOST_HOLLOW = 64

_OPENERS = ("\\boxed", "\\fbox")
_BOX_OR_BRACE = re.compile(r"(\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)
_OPENED = re.compile(r"\\(?:boxed|fbox)\s*\{")
# TeX also boxes a single token: "\boxed 2". A word behind the command is no answer.
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s+([^\s{}$\\,;]+)")
_NO_ANSWER = re.compile(r"[A-Za-z'.!?)*`\"-]{2,}|[^0-9A-Za-z]+")
# A box around nothing is a mention of the command too.
_HOLLOW = re.compile(r"[\s.…]*|\\[lc]?dots")
_ONLY_GLUE = re.compile(r"(?:[^0-9A-Za-z]|\\q?quad(?![A-Za-z])){0,12}\Z")
_SEPARATOR = re.compile(r"[,;]|\b(?:and|or)\b")
_GSM8K_MARK = "####"

_COMMAND_OR_TEXT = re.compile(
    r"\\(?:begin|end|text|mbox|mathrm|textbf|textit|textrm|mathbf|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+"
)
_DELIMITER = re.compile(r"(?<!\\)\$|\\\(|\\\[")
_WORD = re.compile(r"[A-Za-z]{3,}")
_SHORT_WORD = re.compile(r"(?<![^\s])(?i:so|it|is|we|be|he|my)(?=\s)")
_FUNCTIONS = frozenset(
    """
    sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log exp sqrt mod and
    theta alpha beta gamma infinity
    """.split()  # noqa: SIM905
)
# The head of a sentence that states an answer: "final answer is", or "answer is" or "answer:".
FINAL = re.compile(r"(?i:final answer is)\s*:?[^\S\n]*(?=[^\n])")
STATED = re.compile(r"(?i:\banswer(?:\s+is|\s*:|\s*=)\s*:?)[^\S\n]*\n?[^\S\n]*(?=[^\n])")
STATEMENT_CHARS = 300
_END = r"(?:(?!\.\s|\.\Z|\s(?:but|it|rather)\b)[^,;\n])"
_DENIED = re.compile(
    r"(?i:\b(?:not|never|neither|nor|cannot|rather than|instead of|other than)\b|n't\b)"
    rf"{_END}{{0,200}}"
)
_REJECTED = re.compile(
    rf"{_END}{{0,200}}(?i:\b(?:wrong|incorrect|false|mistaken|a mistake|an error)\b)"
)
_SENTENCE_END = re.compile(r"\.(?:\s|$)")


@dataclass(frozen=True, slots=True)
class Box:
    """A closed box or tag: its content and where the whole of it starts and ends."""

    content: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Extracted:
    r"""The answer of a text.

    Attributes:
      answer: what the box or tag holds, stripped; the empty string when there is none.
      source: "box", "tag" or "none".
      run: the last boxes read as one list ("\boxed{1} and \boxed{2}" is "1,2"), or None.
      unclosed: a box or tag was opened and never closed, so the text was cut inside an answer.
    """

    answer: str
    source: str
    run: str | None = None
    unclosed: bool = False


# --- boxes and tags -------------------------------------------------------------------------------


def last_box(text: str) -> Box | None:
    """Returns the balanced box that opens last, or None if no box in the text is closed.

    A mention of the command, and a box around nothing, count only if the text has no other box.
    """
    start = max(text.rfind(opener) for opener in _OPENERS)
    if start < 0:
        return None
    box = _box_at(text, start)
    if box is not None and not _is_hollow(box.content, 0, len(box.content)):
        return box
    # The last one is cut off. One forward pass finds the last that closes; trying each opener in
    # turn would take quadratic time on "\boxed{\boxed{\boxed{...".
    stack: list[tuple[int, int] | None] = []
    last = -1
    for match in _BOX_OR_BRACE.finditer(text):
        token = match.group()
        if token == "}":
            opened = stack.pop() if stack else None
            if opened and not _is_hollow(text, opened[1], match.start()):
                last = max(last, opened[0])
        elif match[1] or token == "{":
            stack.append(match.span() if match[1] else None)
    if last >= 0:
        return _box_at(text, last)
    return box or _bare_box(text)


def _is_hollow(text: str, start: int, end: int) -> bool:
    return end - start <= MOST_HOLLOW and _HOLLOW.fullmatch(text, start, end) is not None


def _box_at(text: str, start: int, limit: int | None = None) -> Box | None:
    """Returns the box whose command starts at `start`, if it has braces that close by `limit`."""
    limit = len(text) if limit is None else limit
    opening = _OPENED.match(text, start, limit)
    if opening is None:
        return None
    end = closing_brace(text, opening.end() - 1, limit)
    return None if end is None else Box(text[opening.end() : end].strip(), start, end + 1)


def _bare_box(text: str) -> Box | None:
    """Returns the last box without braces around a number, a letter or a short expression."""
    last = None
    for match in _BARE_BOX.finditer(text):
        content = match.group(1).rstrip(".")
        if not _NO_ANSWER.fullmatch(content):
            last = Box(content, match.start(), match.end())
    return last


def box_run(text: str, last: Box, *, adjacent: bool = False) -> str | None:
    """Joins the boxes up to `last` that separators join with commas; None: it stands alone.

    A run never adds a second chance: it is right only as a whole list. `adjacent`: boxes with
    nothing between them are joined too (for reference answers). Only so many boxes are looked at.
    """
    contents = [last.content]
    start = last.start
    for _ in range(RUN_LENGTH - 1):
        previous = max(text.rfind(opener, 0, start) for opener in _OPENERS)
        if previous < 0:
            break
        box = _box_at(text, previous, start)
        if box is None:
            break
        between = text[box.end : start]
        joined = len(between) <= RUN_GAP and _SEPARATOR.search(between) is not None
        if not joined and not (adjacent and _ONLY_GLUE.match(between)):
            break
        if box.content not in contents:
            contents.insert(0, box.content)
        start = previous
    return ", ".join(contents) if len(contents) > 1 else None


def closed_answer(text: str) -> Extracted:
    """Finds the answer that a training reward may use: a closed tag or box after the thinking."""
    said = after_thinking(text)
    return Extracted("", "none", unclosed=True) if said is None else _closed(said)


def after_thinking(text: str) -> str | None:
    """What follows the last `</think>`; all of it without a tag; None: thinking never ended."""
    thought = text.rfind("</think>")
    if thought < 0:
        return None if "<think>" in text else text
    return text[thought + len("</think>") :]


def last_tag(text: str) -> Box | None:
    """The last closed answer tag."""
    end = text.rfind("</answer>")
    begin = text.rfind("<answer>", 0, end) if end >= 0 else -1
    if begin < 0:
        return None
    return Box(text[begin + len("<answer>") : end].strip(), begin, end + len("</answer>"))


def _closed(text: str) -> Extracted:
    tag = last_tag(text)
    if tag is not None:
        if "\\" not in text[tag.start :]:
            return Extracted(tag.content, "tag")
        return _boxed(text[tag.end :]) or _boxed(tag.content) or Extracted(tag.content, "tag")
    return _boxed(text) or Extracted("", "none", unclosed="\\boxed" in text or "<answer>" in text)


def _boxed(text: str) -> Extracted | None:
    box = last_box(text) if "\\" in text else None
    if box is None:
        return None
    before, after = text[max(box.start - 1, 0) : box.start], text[box.end : box.end + 1]
    # A box that digits touch is a part of a number: "6\boxed{5}" shows 65.
    if before.isdigit() or after.isdigit():
        return None
    return Extracted(box.content, "box", box_run(text, box))


def open_answer(text: str) -> Extracted:
    """Finds the answer for reports: as `closed_answer`, but thinking counts when nothing else does.

    Also reads the line after "####", the mark of GSM8K's reference solutions.
    """
    found = closed_answer(text)
    if found.source == "none":
        found = _closed(text)
    line = _marked_line(text) if found.source == "none" and not found.unclosed else None
    return found if line is None else Extracted(line, "tag")


def reference_answer(text: str) -> str:
    """Reads the answer out of a reference.

    Takes its last boxes, else the line after "####", else its last sentence "final answer is ...",
    else all of it.
    """
    box = last_box(text)
    if box is not None:
        return box_run(text, box, adjacent=True) or box.content
    line = _marked_line(text)
    if line is not None:
        return line
    # A solution in running text states its answer in a sentence.
    stated = last_sentence(FINAL, text) if has_delimiters(text) else None
    return stated or text.strip()


def _marked_line(text: str) -> str | None:
    mark = text.rfind(_GSM8K_MARK)
    if mark < 0:
        return None
    return text[mark + len(_GSM8K_MARK) :].strip().split("\n", 1)[0].strip()


# --- prose ----------------------------------------------------------------------------------------


def is_prose(text: str) -> bool:
    """Whether a cleaned text is running text that holds an answer, rather than an answer.

    Running text switches between text and mathematics, or is several words of which one has three
    letters or more, is no function and, unlike the points ABC, not all capitals.
    """
    if has_delimiters(text):
        return True
    if not any(char.isspace() for char in text):
        return False
    if _SHORT_WORD.search(text):
        return True
    return any(
        match.group().lower() not in _FUNCTIONS and not match.group().isupper()
        for match in _WORD.finditer(_COMMAND_OR_TEXT.sub(" ", text))
    )


def has_delimiters(text: str) -> bool:
    """Whether a text switches to mathematics somewhere."""
    return _DELIMITER.search(text) is not None


def last_sentence(pattern: re.Pattern[str], text: str) -> str | None:
    """Returns what follows the last match of `FINAL` or `STATED`, to the end of its sentence."""
    start = last_statement(pattern, text)
    if start is None:
        return None
    line = text[start:].split("\n", 1)[0][:STATEMENT_CHARS]
    return _SENTENCE_END.split(line, maxsplit=1)[0].strip().strip("*").strip() or None


def last_statement(pattern: re.Pattern[str], text: str) -> int | None:
    """Returns where the content of the last match of `FINAL` or `STATED` begins."""
    starts = [match.end() for match in pattern.finditer(text)]
    return starts[-1] if starts else None


def without_denials(text: str) -> str:
    """Removes what running text denies: "not 13", "isn't 13", "13 is wrong"."""
    return _DENIED.sub(" ", _REJECTED.sub(" ", text))


# --- sentences around an answer, which say nothing themselves -------------------------------------

_SUBJECT = r"""
    (?:(?:the|my|our)\s)?(?:(?:final|correct)\s)?(?:answer|result|solution)
    (?:\s(?:to|of|for)\s(?:the|this)\s(?:question|problem))?
"""
_CONNECTIVE = r"(?:so|thus|hence|therefore|finally|in\sconclusion),?\s"
_VERB = r"(?:\s?is\s?(?:equal\sto|:|=)?|\sequals|\s?[:=])"
_LEAD_IN = re.compile(
    rf"""
    (?:\\text\{{\s?)?(?:\*\*|\#+\s)?
    (?:final\sanswer(?:\*\*)?:(?:\*\*)?\s(?=the\sfinal\sanswer))?
    (?: (?:{_CONNECTIVE})?{_SUBJECT}(?:\*\*)?{_VERB}
      | {_SUBJECT}(?=\s?(?:\$|\\\(|\\\[))
      | (?:so|thus|hence|therefore),?(?=\s) )
    (?:\*\*)?\s?(?P<close>\}})?\s?
    """,
    re.VERBOSE | re.IGNORECASE,
)
_LEAD_OUT = re.compile(
    r"(?:\s?is (?:the|our|my) (?:final )?answer|[.]\s?I hope (?:it|this) is correct)[.]?\Z",
    re.IGNORECASE,
)
_FIRST = frozenset("*#\\aAfFhHiImMoOrRsStT")
# The longest of the endings has fewer characters.
_LAST = 40


def without_lead_in(answer: str) -> str:
    """Takes a fixed sentence from around an answer: "The final answer is 42." is "42.".

    Only whole phrases of one fixed form go, once, and only from the start and the end, so that
    whatever else the text (some thousand characters at most) says is still there to be compared.
    """
    if answer[:1] not in _FIRST and not answer[-1:].isalpha() and answer[-1:] != ".":
        return answer
    text = " ".join(answer.split())
    match = _LEAD_IN.match(text) if text[:1] in _FIRST else None
    rest = text[match.end() :] if match else text
    if match and match.group().startswith("\\text") != bool(match["close"]):
        return answer
    ending = _LEAD_OUT.search(rest, max(len(rest) - _LAST, 0))
    rest = rest[: ending.start()] if ending else rest
    if match and "**" in match.group() and rest.endswith("**") and rest.count("**") == 1:
        rest = rest[:-2]
    changed = (match or ending) and rest.strip()
    return rest.strip() if changed else answer
