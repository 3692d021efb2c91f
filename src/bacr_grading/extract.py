"""Where the answer is in a text: the last closed box or answer tag, in linear time; or prose."""

import re
from dataclasses import dataclass

from bacr_grading.normalize import closing_brace

# A box that holds more than this is not an answer. The longest answer in MATH has 159 characters.
ANSWER_CAP = 2000
# Boxes further apart than this, or more of them, are separate statements and not one list.
RUN_GAP = 40
RUN_LENGTH = 16

_OPENERS = ("\\boxed", "\\fbox")
_BOX_OR_BRACE = re.compile(r"(\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)
_OPENED = re.compile(r"\\(?:boxed|fbox)\s*\{")
# TeX also boxes a single token: "\boxed 2".
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s+([^\s{}$\\,;]+)")
_ONLY_GLUE = re.compile(r"(?:[^0-9A-Za-z]|\\q?quad(?![A-Za-z])){0,12}\Z")
_SEPARATOR = re.compile(r"[,;]|\b(?:and|or)\b")
_GSM8K_MARK = "####"

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
_FINAL = re.compile(r"(?i:final answer is)\s*(?::\s*)?([^\n]{1,300})")
_STATED = re.compile(r"(?i:\banswer(?:\s+is|\s*:|\s*=)\s*:?)\s*([^\n]{1,300})")
_SENTENCE_END = re.compile(r"\.(?:\s|$)")


@dataclass(frozen=True, slots=True)
class Box:
    """One closed box: its content and where the whole command starts and ends."""

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
    """The balanced box that opens last, or None when no box in the text is closed."""
    start = max(text.rfind(opener) for opener in _OPENERS)
    if start < 0:
        return None
    box = _box_at(text, start)
    if box is not None:
        return box
    # The last one is cut off. One forward pass finds the last that closes; trying each opener in
    # turn would take quadratic time on "\boxed{\boxed{\boxed{...".
    stack: list[int | None] = []
    last = -1
    for match in _BOX_OR_BRACE.finditer(text):
        token = match.group()
        if token == "}":
            opened = stack.pop() if stack else None
            last = last if opened is None else max(last, opened)
        elif match[1] or token == "{":
            stack.append(match.start() if match[1] else None)
    return _box_at(text, last) if last >= 0 else None


def _box_at(text: str, start: int, limit: int | None = None) -> Box | None:
    """The box whose command starts at `start`, if it closes before `limit`."""
    limit = len(text) if limit is None else limit
    opening = _OPENED.match(text, start, limit)
    if opening is None:
        bare = _BARE_BOX.match(text, start, limit)
        return Box(bare.group(1).rstrip("."), start, bare.end()) if bare else None
    end = closing_brace(text, opening.end() - 1, limit)
    return None if end is None else Box(text[opening.end() : end].strip(), start, end + 1)


def box_run(text: str, last: Box, *, adjacent: bool = False) -> str | None:
    """Joins the boxes up to `last` that separators join with commas; None: it stands alone.

    A run never adds a second chance: it is right only as a whole list. `adjacent`: boxes with
    nothing between them are joined too (for reference answers).
    """
    contents = [last.content]
    start = last.start
    while len(contents) < RUN_LENGTH:
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
    r"""Finds the answer that a training reward may use: a closed tag or box after the thinking.

    A closing think tag ends the thinking; an opening one without it means that the text never left
    the thinking. Of `<answer>...</answer>` and `\boxed{...}`, closed, the one that ends last
    counts. A box inside the last answer tag is the answer.
    """
    thought = text.rfind("</think>")
    if thought < 0 and "<think>" in text:
        return Extracted("", "none", unclosed=True)
    return _closed(text if thought < 0 else text[thought + len("</think>") :])


def _closed(text: str) -> Extracted:
    end = text.rfind("</answer>")
    begin = text.rfind("<answer>", 0, end) if end >= 0 else -1
    if begin >= 0:
        content = text[begin + len("<answer>") : end].strip()
        if "\\" not in text[begin:]:
            return Extracted(content, "tag")
        later = _boxed(text[end + len("</answer>") :])
        return later or _boxed(content) or Extracted(content, "tag")
    return _boxed(text) or Extracted("", "none", unclosed="\\boxed" in text or "<answer>" in text)


def _boxed(text: str) -> Extracted | None:
    box = last_box(text) if "\\" in text else None
    if box is None or _is_part_of_a_number(text, box):
        return None
    return Extracted(box.content, "box", box_run(text, box))


def _is_part_of_a_number(text: str, box: Box) -> bool:
    r"""Whether digits touch a box: "6\boxed{5}" shows 65."""
    before, after = text[max(box.start - 1, 0) : box.start], text[box.end : box.end + 1]
    return before.isdigit() or after.isdigit()


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
    stated = final_answer(text) if has_delimiters(text) else None
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
