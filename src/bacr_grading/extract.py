r"""Extracts the answer from a model output or a reference solution.

The answer is the content of the last closed `<answer>` tag or `\boxed{...}`, or it is stated in a
sentence such as "the final answer is 42". Called by `judge`, which parses and compares the answer.
The run time of every function is linear in the length of the text.
"""

import re
from typing import NamedTuple

from bacr_grading.notation import closing_brace

# Maximum length of an answer in characters. The longest answer in MATH has 159 characters.
ANSWER_CAP = 2000
# Consecutive boxes (\boxed{...}) are joined into one list of answers. The list has at most
# RUN_LENGTH boxes with at most RUN_GAP characters between two of them.
RUN_GAP = 40
RUN_LENGTH = 16
# Only boxes of at most this many characters are checked for being hollow (see `_HOLLOW`).
MOST_HOLLOW = 64

_OPENERS = ("\\boxed", "\\fbox")
_BOX_OR_BRACE = re.compile(r"(\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)
_OPENED = re.compile(r"\\(?:boxed|fbox)\s*\{")
# TeX also accepts a single token without braces, as in "\boxed 2".
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s+([^\s{}$\\,;]+)")
# Words and punctuation after a command without braces are prose about the command, not an answer.
_NO_ANSWER = re.compile(r"[A-Za-z'.!?)*`\"-]{2,}|[^0-9A-Za-z]+")
# A hollow box has only whitespace or dots, as in "\boxed{...}". It mentions the command and
# contains no answer.
_HOLLOW = re.compile(r"[\s.…]*|\\[lc]?dots")
_ONLY_GLUE = re.compile(r"(?:[^0-9A-Za-z]|\\q?quad(?![A-Za-z])){0,12}\Z")
_SEPARATOR = re.compile(r"[,;]|\b(?:and|or)\b")
_GSM8K_MARK = "####"
_ANY_MARK = re.compile("####+")
# The mark before the answer of a solution: at the start of a line, or a separate word of a solution
# whose line breaks were removed. A mark within a sentence, such as "base ####, 4", is not matched.
_ANSWER_MARK = re.compile(r"^[^\S\n]*####(?!#)|(?<=\s)####(?=\s)", re.MULTILINE)
# A line that contains only a number, such as "1,200" or "$3.50".
_NUMBER_LINE = re.compile(r"[^\S\n]*[-+]?[$€£]?\d[\d,]*(?:[./]\d+)?[^\S\n]*[%.]?[^\S\n]*(?:\n|\Z)")

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
# Phrases that introduce an answer: `FINAL` matches "final answer is". `STATED` also matches "answer
# is", "answer:" and "answer =".
FINAL = re.compile(r"(?i:final answer is)\s*:?[^\S\n]*(?=[^\n])")
STATED = re.compile(r"(?i:\banswer(?:\s+is|\s*:|\s*=)\s*:?)[^\S\n]*\n?[^\S\n]*(?=[^\n])")
STATEMENT_CHARS = 300
# A clause ends at a comma, a full stop, or a word that begins the next clause.
_END = r"(?:(?!\.\s|\.\Z|\s(?:but|it|rather|so|thus|hence|therefore)\b)[^,;\n])"
_DENIED = re.compile(
    r"(?i:\b(?:not|never|neither|nor|cannot|rather than|instead of|other than|anything but|far from"
    r"|no longer|hardly|(?<!no )(?<!without )doubt|doubtful|unlikely|impossible|deny"
    r"|(?:false|untrue|wrong|incorrect) that)\b|n't\b|≠|\\neq?(?![a-z]))"
    rf"{_END}{{0,200}}"
)
# "13 is not the answer" rejects the number before it. In "I do not think the answer is 14", the
# number after it is rejected, which `_DENIED` matches.
_REJECTED = re.compile(
    rf"{_END}{{0,200}}(?i:\b(?:wrong|incorrect|false|mistaken|a mistake|an error)\b(?!\sthat\b)"
    r"|(?:\b(?:not|never|cannot)|n't)\s(?:(?!that\b)[a-z]+\s){0,4}"
    r"(?:answer|solution|result|correct|right|true)\b(?!\s?(?:that|is|was|equals|[:=])))"
    r"|(?:(?!\.\s)[^;\n]){0,200}(?i:\bwhich (?:is|was) (?:wrong|incorrect|false|not))\b"
)
# Matches a later sentence that withdraws an earlier answer, as in "The answer is 12. Actually, it
# is 15." and "That is wrong."
_CORRECTION = re.compile(
    r"""
    \b(?:no|wait|actually|sorry|oops|correction|rather|i\smean|make\sthat
      |on\s(?:second\sthoughts?|reflection))
    [\s,.:;!\u2013\u2014-]+
    (?:(?:it|that|this|the\s(?:\w+\s)?(?:answer|result|value|total|solution))
      (?:'s|\s(?:is|was|equals|(?:should|must|has\sto)\sbe))\s|(?:should|must)\sbe\s)?
    (?=[$\\+-]?\.?\d|\$|\\[(\[])
    | \b(?:that|this|it)(?:'s|\s(?:is|was))\s
      (?:wrong|incorrect|false|a\smistake|not\s(?:correct|right|true))\b(?!\sthat\b)
    | \bi\stake\s(?:that|it|this)\sback\b
    """,
    re.VERBOSE | re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"\.(?:\s|$)")


class Box(NamedTuple):
    r"""A closed box (`\boxed{...}`) or a closed `<answer>` tag in a text.

    Attributes:
      content: the stripped text inside the box or tag.
      start: position of the first character of the command or opening tag.
      end: position after the closing brace or closing tag.
    """

    content: str
    start: int
    end: int


class Extracted(NamedTuple):
    r"""The answer extracted from a text.

    Attributes:
      answer: stripped content of the box or tag, or "" if the text has neither.
      source: "box", "tag" or "none".
      run: the contents of the last boxes as one list, or None. For example, the list is "1, 2" for
        the text "\boxed{1} and \boxed{2}".
      unclosed: True if a box or tag was opened but never closed, as in a truncated response.
    """

    answer: str
    source: str
    run: str | None = None
    unclosed: bool = False


# --- boxes and tags -------------------------------------------------------------------------------


def last_box(text: str) -> Box | None:
    r"""Returns the last closed box (`\boxed{...}` or `\fbox{...}`) in a text, or None if missing.

    If boxes are nested, the box that starts last is returned. An empty box and a placeholder such
    as `\boxed{...}` are returned only if the text has no other box.
    """
    start = max(text.rfind(opener) for opener in _OPENERS)
    if start < 0:
        return None
    box = _box_at(text, start)
    if box is not None and not _is_hollow(box.content, 0, len(box.content)):
        return box
    # The last box is truncated or empty. Trying every start position in turn would take quadratic
    # time on a text such as "\boxed{\boxed{\boxed{...".
    last_start = _start_of_last_closed(text)
    if last_start is not None:
        return _box_at(text, last_start)
    return box or _bare_box(text)


def _start_of_last_closed(text: str) -> int | None:
    """Returns the position of the last closed and non-empty box. Takes linear time."""
    # One item for each brace that is still open: the span of the command if the brace opens a box,
    # otherwise None.
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
    r"""True if the content of `\boxed{...}` is only whitespace and dots.

    Args:
      text: the text that contains the box.
      start: position of the first character of the content.
      end: position after the last character of the content.
    """
    if end - start > MOST_HOLLOW:
        return False
    return _HOLLOW.fullmatch(text, start, end) is not None


def _box_at(text: str, start: int, limit: int | None = None) -> Box | None:
    """Returns the box at position `start` if it is closed before position `limit`, else None."""
    limit = len(text) if limit is None else limit
    opening = _OPENED.match(text, start, limit)
    if opening is None:
        return None
    end = closing_brace(text, opening.end() - 1, limit)
    if end is None:
        return None
    return Box(text[opening.end() : end].strip(), start, end + 1)


def _bare_box(text: str) -> Box | None:
    r"""Returns the last box without braces, such as `\boxed 2`, or None if missing.

    At the end of a text that ends inside of a tag or box, such a box may be truncated, and is
    ignored.
    """
    last = None
    end = len(text.rstrip(",;\\"))
    for match in _BARE_BOX.finditer(text):
        content = match.group(1).rstrip(".")
        if _NO_ANSWER.fullmatch(content):
            continue
        if match.end() >= end and unclosed_start(text[: match.start()]) is not None:
            continue
        last = Box(content, match.start(), match.end())
    return last


def unclosed_start(text: str) -> int | None:
    r"""Returns the position where the last tag or box opens if it is not closed, else None.

    If neither the last `<answer>` nor the last `\boxed{` is closed, the first of them counts. Tags
    and boxes before the last `</think>` are ignored, because the answer begins after it.
    """
    starts = []
    begin = max(text.rfind("</think>"), 0)
    tag = text.rfind("<answer>", begin)
    if tag > text.rfind("</answer>", begin):
        starts.append(tag)
    box = max(text.rfind(opener, begin) for opener in _OPENERS)
    opening = _OPENED.match(text, box) if box >= 0 else None
    if opening is not None and closing_brace(text, opening.end() - 1) is None:
        starts.append(box)
    return min(starts, default=None)


def box_run(text: str, last: Box, *, adjacent: bool = False) -> str | None:
    r"""Joins the contents of the last boxes (`\boxed{...}`) into a comma-separated list.

    Boxes are joined if they are separated by a comma, a semicolon, "and" or "or". The list is
    graded as a whole, so an answer with several boxes does not get several attempts. At most
    `RUN_LENGTH` boxes are joined.

    Args:
      text: the text.
      last: the last box in the text.
      adjacent: if True, also join boxes that directly follow each other. Used for references.

    Returns:
      The list, or None if it would contain only one box.
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
    r"""Extracts the answer for a training reward.

    The answer must be in a closed `<answer>` tag or `\boxed{...}` after the thinking.
    """
    response = after_thinking(text)
    return Extracted("", "none", unclosed=True) if response is None else _closed(response)


def after_thinking(text: str) -> str | None:
    """Returns the text after the last `</think>`, or the whole text if it contains no thinking.

    Returns None if the text contains `<think>` without `</think>`, that is, if the thinking never
    ended.
    """
    end = text.rfind("</think>")
    if end < 0:
        return None if "<think>" in text else text
    return text[end + len("</think>") :]


def last_tag(text: str) -> Box | None:
    """Returns the last closed `<answer>` tag, or None if missing."""
    end = text.rfind("</answer>")
    if end < 0:
        return None
    start = text.rfind("<answer>", 0, end)
    if start < 0:
        return None
    content = text[start + len("<answer>") : end]
    return Box(content.strip(), start, end + len("</answer>"))


def _closed(text: str) -> Extracted:
    """Extracts the answer from the last closed tag or box.

    If the text has a closed tag, the answer is the last box after the tag, otherwise the last box
    inside the tag, otherwise the content of the tag. Without a tag, it is the last box.
    """
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
    """Extracts the last box, and the list of the last boxes as `Extracted.run`.

    Returns None if the text has no box, or if the last box is only a part of a number.
    """
    box = last_box(text) if "\\" in text else None
    if box is None:
        return None
    before = text[max(box.start - 1, 0) : box.start]
    after = text[box.end : box.end + 1]
    # A box next to a digit is only a part of a number: "6\boxed{5}" is rendered as 65.
    if before.isdigit() or after.isdigit():
        return None
    return Extracted(box.content, "box", box_run(text, box))


def open_answer(text: str) -> Extracted:
    """Extracts the answer for the lenient mode, which also accepts an answer inside the thinking.

    Tries three places in order: a closed tag or box after the thinking (as in `closed_answer`), a
    closed tag or box anywhere in the text, and the line after "####", which marks the answer in
    GSM8K.
    """
    extracted = closed_answer(text)
    if extracted.source == "none":
        extracted = _closed(text)
    if extracted.source != "none" or extracted.unclosed:
        return extracted
    line = _marked_line(text)
    return extracted if line is None else Extracted(line, "tag")


def reference_answer(text: str) -> str:
    """Extracts the answer from a reference, which may be a full solution.

    The answer is the content of the last boxes. Without a box, it is the line that is marked by
    "####" (see `answer_mark`), otherwise the last sentence of the form "final answer is ...",
    otherwise the whole reference.
    """
    box = last_box(text)
    if box is not None:
        return box_run(text, box, adjacent=True) or box.content
    mark = answer_mark(text)
    if mark is not None:
        return text[mark.end() :].strip().partition("\n")[0].strip()
    # Solutions written as prose contain math delimiters and state the answer in a sentence.
    stated_answer = last_sentence(FINAL, text) if has_delimiters(text) else None
    return stated_answer or text.strip()


def answer_mark(text: str) -> re.Match[str] | None:
    """Returns the "####" before the final answer of a solution, or None if missing.

    The last "####" of the text marks the answer if the rest of its line is the last line of the
    text, is a number, or is followed only by a line such as "The answer is: 72". Otherwise it is a
    Markdown heading. Without blanks around it, as in "72.#### 72", it marks only a number at the
    end of the text.
    """
    if _GSM8K_MARK not in text:
        return None
    mark = _last_match(_ANSWER_MARK, text)
    if mark is None:
        mark = _last_match(_ANY_MARK, text)
        assert mark is not None
        number = _NUMBER_LINE.fullmatch(text[mark.end() :].rstrip())
        return None if number is None else mark
    marked_text = text[mark.end() :].strip()
    rest = marked_text.partition("\n")[2]
    rest = rest.strip()
    if not rest:
        return mark
    if _NUMBER_LINE.match(marked_text):
        return mark
    is_one_line = "\n" not in rest
    if is_one_line and STATED.search(rest):
        return mark
    return None


def _last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """Returns the last match of a pattern, or None if there is none."""
    last = None
    for match in pattern.finditer(text):
        last = match
    return last


def _marked_line(text: str) -> str | None:
    """Returns the text between the last "####" and the end of the line, or None if missing."""
    mark = text.rfind(_GSM8K_MARK)
    if mark < 0:
        return None
    rest = text[mark + len(_GSM8K_MARK) :].strip()
    line, _, _ = rest.partition("\n")
    return line.strip()


# --- prose ----------------------------------------------------------------------------------------


def is_prose(text: str) -> bool:
    """True if a cleaned text is prose that may contain an answer, rather than an answer itself.

    A text is prose if it contains math delimiters. It is also prose if it has several words and one
    of them is a common short word or has at least three letters. Function names and words in upper
    case, such as the points ABC, do not count.
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
    r"""True if a text contains an opening math delimiter: `$`, `\(` or `\[`."""
    return _DELIMITER.search(text) is not None


def last_sentence(pattern: re.Pattern[str], text: str) -> str | None:
    """Returns the rest of the sentence after the last match of a pattern.

    Args:
      pattern: `FINAL` or `STATED`.
      text: the text to search.

    Returns:
      The rest of the sentence, or None if the pattern does not match or no text follows it.
    """
    start = last_statement(pattern, text)
    if start is None:
        return None
    line = text[start:].split("\n", 1)[0][:STATEMENT_CHARS]
    sentence = _SENTENCE_END.split(line, maxsplit=1)[0]
    return sentence.strip().strip("*").strip() or None


def last_statement(pattern: re.Pattern[str], text: str) -> int | None:
    """Returns the end position of the last match of `FINAL` or `STATED`, or None if missing."""
    starts = [match.end() for match in pattern.finditer(text)]
    return starts[-1] if starts else None


def without_withdrawn(text: str) -> str:
    """Removes the answers that prose denies, rejects or replaces.

    These are, for example, "not 13", "13 is wrong", "13 is not the answer", "I doubt that the
    answer is 13", and the text before a correction such as "Actually, it is 15".
    """
    corrections = list(_CORRECTION.finditer(text))
    if corrections:
        text = text[corrections[-1].end() :]
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
# Number of characters at the end of an answer in which `_LEAD_OUT` is searched. It is longer than
# every phrase that the pattern matches.
_LAST = 40


def without_lead_in(answer: str) -> str:
    """Removes a standard phrase around an answer, so that "The final answer is 42." becomes "42.".

    At most one phrase is removed at the start and one at the end, and only if it has one of a few
    fixed forms. All other words are kept and compared. Do not pass answers with more than a few
    thousand characters.
    """
    last = answer[-1:]
    if last != "." and not last.isalpha() and answer[:1] not in _FIRST:
        return answer
    text = " ".join(answer.split())
    lead_in = _LEAD_IN.match(text) if text[:1] in _FIRST else None
    rest = text
    if lead_in:
        if lead_in.group().startswith("\\text") != bool(lead_in["close"]):
            # The closing brace of \text{...} is inside the answer.
            return answer
        rest = text[lead_in.end() :]
    ending = _LEAD_OUT.search(rest, max(len(rest) - _LAST, 0))
    if ending:
        rest = rest[: ending.start()]
    if lead_in and "**" in lead_in.group() and rest.endswith("**") and rest.count("**") == 1:
        # The opening ** was removed together with the phrase before the answer, so the closing **
        # is removed too.
        rest = rest[:-2]
    is_changed = lead_in is not None or ending is not None
    rest = rest.strip()
    return rest if is_changed and rest else answer
