"""Finds the answer in a text: the last closed box or answer tag, or a sentence that states it.

Called by `judge`. Every function takes time linear in the text. Does not parse the answer.
"""

import re
from typing import NamedTuple

from bacr_grading.notation import closing_brace

# Characters of an answer; a longer box is not one. The longest answer in MATH has 159.
ANSWER_CAP = 2000
# Largest distance in characters, and largest number, of boxes that are read as one list.
RUN_GAP = 40
RUN_LENGTH = 16
# Characters of a box that contains only blanks and dots and therefore mentions the command.
MOST_HOLLOW = 64

_OPENERS = ("\\boxed", "\\fbox")
_BOX_OR_BRACE = re.compile(r"(\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)
_OPENED = re.compile(r"\\(?:boxed|fbox)\s*\{")
# TeX also boxes a single token: "\boxed 2". A word behind the command is not an answer.
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s+([^\s{}$\\,;]+)")
_NO_ANSWER = re.compile(r"[A-Za-z'.!?)*`\"-]{2,}|[^0-9A-Za-z]+")
# A box with this content is a mention of the command and not an answer.
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
# The start of a sentence that states an answer: "final answer is", or "answer is" or "answer:".
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


class Box(NamedTuple):
    """The content of a closed box or tag, and the positions of its first and last characters."""

    content: str
    start: int
    end: int


class Extracted(NamedTuple):
    r"""The answer of a text.

    Attributes:
      answer: stripped content of the box or tag; the empty string if the text has none.
      source: "box", "tag" or "none".
      run: the last boxes read as one list ("\boxed{1} and \boxed{2}" is "1, 2"), or None.
      unclosed: a box or tag was opened and never closed, so that the text ends inside an answer.
    """

    answer: str
    source: str
    run: str | None = None
    unclosed: bool = False


# --- boxes and tags -------------------------------------------------------------------------------


def last_box(text: str) -> Box | None:
    """Returns the balanced box that opens last, or None if no box in the text is closed.

    An empty box, and a mention of the command, count only if the text has no other box.
    """
    start = max(text.rfind(opener) for opener in _OPENERS)
    if start < 0:
        return None
    box = _box_at(text, start)
    if box is not None and not _is_hollow(box.content, 0, len(box.content)):
        return box
    # The last box is cut off or empty. Trying each opener in turn would take quadratic time on
    # "\boxed{\boxed{\boxed{...".
    last_start = _start_of_last_closed(text)
    if last_start is not None:
        return _box_at(text, last_start)
    return box or _bare_box(text)


def _start_of_last_closed(text: str) -> int | None:
    """Returns the position of the last box that closes and is not empty, in one forward pass."""
    # The span of the command for every open box, None for every other open brace.
    stack: list[tuple[int, int] | None] = []
    starts: list[int] = []
    for match in _BOX_OR_BRACE.finditer(text):
        token = match.group()
        if token == "}":
            opening = stack.pop() if stack else None
            if opening and not _is_hollow(text, opening[1], match.start()):
                starts.append(opening[0])
        elif match[1] or token == "{":
            stack.append(match.span() if match[1] else None)
    return max(starts, default=None)


def _is_hollow(text: str, start: int, end: int) -> bool:
    """True if a box contains only blanks and dots."""
    if end - start > MOST_HOLLOW:
        return False
    return _HOLLOW.fullmatch(text, start, end) is not None


def _box_at(text: str, start: int, limit: int | None = None) -> Box | None:
    """Returns the box at `start` if its braces close before `limit`, else None."""
    limit = len(text) if limit is None else limit
    opening = _OPENED.match(text, start, limit)
    if opening is None:
        return None
    end = closing_brace(text, opening.end() - 1, limit)
    if end is None:
        return None
    return Box(text[opening.end() : end].strip(), start, end + 1)


def _bare_box(text: str) -> Box | None:
    """Returns the last box without braces around a number, a letter or a short expression."""
    last = None
    for match in _BARE_BOX.finditer(text):
        content = match.group(1).rstrip(".")
        if not _NO_ANSWER.fullmatch(content):
            last = Box(content, match.start(), match.end())
    return last


def box_run(text: str, last: Box, *, adjacent: bool = False) -> str | None:
    """Returns the content of the last boxes as one list, with commas between them.

    Boxes are joined if a comma, "and" or "or" separates them. The list is right only as a whole, so
    that further boxes do not give an answer a second chance. At most RUN_LENGTH boxes are read.

    Args:
      last: the last box of the text.
      adjacent: join boxes with nothing between them too, for reference answers.

    Returns:
      The list, or None if only one box belongs to it.
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
        is_separated = len(between) <= RUN_GAP and _SEPARATOR.search(between) is not None
        is_adjacent = adjacent and _ONLY_GLUE.match(between) is not None
        if not is_separated and not is_adjacent:
            break
        if box.content not in contents:
            contents.insert(0, box.content)
        start = previous
    return ", ".join(contents) if len(contents) > 1 else None


def closed_answer(text: str) -> Extracted:
    """Finds the answer that a training reward may use: a closed tag or box after the thinking."""
    response = after_thinking(text)
    return Extracted("", "none", unclosed=True) if response is None else _closed(response)


def after_thinking(text: str) -> str | None:
    """Returns the text behind the last `</think>`, or all of a text without thinking.

    None if the text has `<think>` but not `</think>`, so that the thinking never ended.
    """
    end = text.rfind("</think>")
    if end < 0:
        return None if "<think>" in text else text
    return text[end + len("</think>") :]


def last_tag(text: str) -> Box | None:
    """Returns the last closed answer tag; None if the text has none."""
    end = text.rfind("</answer>")
    if end < 0:
        return None
    start = text.rfind("<answer>", 0, end)
    if start < 0:
        return None
    content = text[start + len("<answer>") : end]
    return Box(content.strip(), start, end + len("</answer>"))


def _closed(text: str) -> Extracted:
    """Returns the last closed tag, or the box in or behind it; without a tag, the last box."""
    tag = last_tag(text)
    if tag is not None:
        if "\\" not in text[tag.start :]:
            return Extracted(tag.content, "tag")
        box = _boxed(text[tag.end :]) or _boxed(tag.content)
        return box or Extracted(tag.content, "tag")
    box = _boxed(text)
    if box is not None:
        return box
    is_unclosed = "\\boxed" in text or "<answer>" in text
    return Extracted("", "none", unclosed=is_unclosed)


def _boxed(text: str) -> Extracted | None:
    """Returns the last box and the list of the last boxes; None without a usable box."""
    box = last_box(text) if "\\" in text else None
    if box is None:
        return None
    before = text[max(box.start - 1, 0) : box.start]
    after = text[box.end : box.end + 1]
    # A box next to a digit is a part of a number: "6\boxed{5}" prints 65.
    if before.isdigit() or after.isdigit():
        return None
    return Extracted(box.content, "box", box_run(text, box))


def open_answer(text: str) -> Extracted:
    """Finds the answer for reports, which also accept an answer in the thinking.

    Reads the same tags and boxes as `closed_answer`, first behind the thinking, then in the whole
    text, and then the line after "####", the mark of GSM8K's reference solutions.
    """
    extracted = closed_answer(text)
    if extracted.source == "none":
        extracted = _closed(text)
    if extracted.source != "none" or extracted.unclosed:
        return extracted
    line = _marked_line(text)
    return extracted if line is None else Extracted(line, "tag")


def reference_answer(text: str) -> str:
    """Returns the answer in a reference.

    That is the content of its last boxes. Without a box it is the line after "####", else the last
    sentence "final answer is ...", else the whole reference.
    """
    box = last_box(text)
    if box is not None:
        return box_run(text, box, adjacent=True) or box.content
    line = _marked_line(text)
    if line is not None:
        return line
    # Solutions in running text have math delimiters, and state the answer in a sentence.
    stated_answer = last_sentence(FINAL, text) if has_delimiters(text) else None
    return stated_answer or text.strip()


def _marked_line(text: str) -> str | None:
    """Returns the text between the last "####" and the end of its line; None without the mark."""
    mark = text.rfind(_GSM8K_MARK)
    if mark < 0:
        return None
    rest = text[mark + len(_GSM8K_MARK) :].strip()
    line, _, _ = rest.partition("\n")
    return line.strip()


# --- prose ----------------------------------------------------------------------------------------


def is_prose(text: str) -> bool:
    """True if a cleaned text is running text, which contains an answer but is not one.

    Running text has math delimiters, or has several words of which one has three letters or more,
    is not the name of a function and, unlike the points ABC, not in capitals.
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
    """True if a text contains a math delimiter."""
    return _DELIMITER.search(text) is not None


def last_sentence(pattern: re.Pattern[str], text: str) -> str | None:
    """Returns the text from the last match of a pattern to the end of its sentence.

    Args:
      pattern: `FINAL` or `STATED`.

    Returns:
      The text, or None if nothing matches or nothing follows the match.
    """
    start = last_statement(pattern, text)
    if start is None:
        return None
    line = text[start:].split("\n", 1)[0][:STATEMENT_CHARS]
    sentence = _SENTENCE_END.split(line, maxsplit=1)[0]
    return sentence.strip().strip("*").strip() or None


def last_statement(pattern: re.Pattern[str], text: str) -> int | None:
    """Returns the position behind the last match of `FINAL` or `STATED`; None without a match."""
    starts = [match.end() for match in pattern.finditer(text)]
    return starts[-1] if starts else None


def without_denials(text: str) -> str:
    """Removes negated and rejected answers from running text: "not 13", "13 is wrong"."""
    return _DENIED.sub(" ", _REJECTED.sub(" ", text))


# --- sentences around an answer -------------------------------------------------------------------

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
# Characters at the end of an answer that are searched; every ending is shorter.
_LAST = 40


def without_lead_in(answer: str) -> str:
    """Removes a fixed sentence around an answer: "The final answer is 42." becomes "42.".

    Removes only whole phrases of a fixed form, once, at the start and the end. All other words stay
    and are compared. The answer has some thousand characters at most.
    """
    last = answer[-1:]
    if last != "." and not last.isalpha() and answer[:1] not in _FIRST:
        return answer
    text = " ".join(answer.split())
    lead_in = _LEAD_IN.match(text) if text[:1] in _FIRST else None
    rest = text
    if lead_in:
        if lead_in.group().startswith("\\text") != bool(lead_in["close"]):
            # The braces of \text{...} end inside the answer.
            return answer
        rest = text[lead_in.end() :]
    ending = _LEAD_OUT.search(rest, max(len(rest) - _LAST, 0))
    if ending:
        rest = rest[: ending.start()]
    if lead_in and "**" in lead_in.group() and rest.endswith("**") and rest.count("**") == 1:
        # The emphasis began before the answer.
        rest = rest[:-2]
    is_changed = lead_in is not None or ending is not None
    rest = rest.strip()
    return rest if is_changed and rest else answer
