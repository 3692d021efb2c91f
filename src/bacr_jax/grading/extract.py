"""Where the answer is in a text: the last closed box or answer tag, in linear time."""

import re
from dataclasses import dataclass

from bacr_jax.grading.prose import final_answer, has_delimiters

# A box that holds more than this is not an answer. The longest answer in MATH has 159 characters.
ANSWER_CAP = 2000
# Boxes further apart than this, or more of them, are separate statements and not one list.
RUN_GAP = 40
RUN_LENGTH = 16

_OPENERS = ("\\boxed", "\\fbox")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_BOX_OR_BRACE = re.compile(r"(\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)
_AFTER_OPENER = re.compile(r"\\(?:boxed|fbox)\s*\{")
# TeX also boxes a single token: "\boxed 2".
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s+([^\s{}$\\,;]+)")
_ONLY_GLUE = re.compile(r"(?:[^0-9A-Za-z]|\\q?quad(?![A-Za-z])){0,12}\Z")
_SEPARATOR = re.compile(r"[,;]|\b(?:and|or)\b")
_GSM8K_MARK = "####"


@dataclass(frozen=True, slots=True)
class Box:
    """One closed box: its content and where the whole command starts and ends."""

    content: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Found:
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


NOTHING = Found("", "none")


def last_box(text: str) -> Box | None:
    """Finds the balanced box that opens last.

    Args:
        text: any text.

    Returns:
        The box, or None when no box in the text is closed.
    """
    start = max(text.rfind(opener) for opener in _OPENERS)
    if start < 0:
        return None
    box = _box_at(text, start)
    if box is not None:
        return box
    # The last one is cut off. One forward pass finds the last that closes; trying each opener in
    # turn would take quadratic time on "\boxed{\boxed{\boxed{...".
    stack: list[int | None] = []
    best: tuple[int, int] | None = None
    for match in _BOX_OR_BRACE.finditer(text):
        token = match.group()
        if match.group(1):
            stack.append(match.start())
        elif token == "{":
            stack.append(None)
        elif token == "}" and stack:
            opened = stack.pop()
            if opened is not None and (best is None or opened > best[0]):
                best = (opened, match.end())
    return _box_at(text, best[0]) if best else None


def _box_at(text: str, start: int, limit: int | None = None) -> Box | None:
    """The box whose command starts at `start`, if it closes before `limit`."""
    limit = len(text) if limit is None else limit
    opening = _AFTER_OPENER.match(text, start, limit)
    if opening is None:
        bare = _BARE_BOX.match(text, start, limit)
        return Box(bare.group(1).rstrip("."), start, bare.end()) if bare else None
    depth = 1
    for match in _BRACES.finditer(text, opening.end(), limit):
        token = match.group()
        if token == "{":
            depth += 1
        elif token == "}":
            depth -= 1
            if not depth:
                return Box(text[opening.end() : match.start()].strip(), start, match.end())
    return None


def box_run(text: str, last: Box, *, adjacent: bool = False) -> str | None:
    """Reads the boxes up to `last` that a separator joins as one list.

    A run never adds a second chance: it is right only as a whole list.

    Args:
        text: the text that holds the boxes.
        last: its last box.
        adjacent: also join boxes with nothing between them (for reference answers).

    Returns:
        The contents joined with commas, or None when the last box stands alone.
    """
    contents = [last.content]
    start = last.start
    while len(contents) < RUN_LENGTH:
        previous = max(text.rfind(opener, 0, start) for opener in _OPENERS)
        if previous < 0 or start - previous > ANSWER_CAP:
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


def closed_answer(text: str) -> Found:
    r"""Finds the answer that a training reward may use: a closed tag or box after the thinking.

    Args:
        text: a completion, with its tags. A closing think tag ends the thinking; an opening one
            without it means that the text never left the thinking.

    Returns:
        The last closed `<answer>...</answer>` or `\boxed{...}`, whichever ends last. A box inside
        the last answer tag is the answer.
    """
    thought = text.rfind("</think>")
    if thought >= 0:
        text = text[thought + 8 :]
    elif "<think>" in text:
        return Found("", "none", unclosed=True)
    return _closed(text)


def _closed(text: str) -> Found:
    end = text.rfind("</answer>")
    begin = text.rfind("<answer>", 0, end) if end >= 0 else -1
    if begin >= 0:
        tail = text[end + 9 :]
        later = last_box(tail) if "\\" in tail else None
        if later is not None:
            return Found(later.content, "box", box_run(tail, later))
        content = text[begin + 8 : end].strip()
        inner = last_box(content) if "\\" in content else None
        if inner is not None:
            return Found(inner.content, "box", box_run(content, inner))
        return Found(content, "tag")
    box = last_box(text) if "\\" in text else None
    if box is not None:
        return Found(box.content, "box", box_run(text, box))
    if "\\boxed" in text or "<answer>" in text:
        return Found("", "none", unclosed=True)
    return NOTHING


def open_answer(text: str) -> Found:
    """Finds the answer for reports: as `closed_answer`, but thinking counts when nothing else does.

    Also reads the line after "####", the mark of GSM8K's reference solutions.
    """
    found = closed_answer(text)
    if found.source != "none":
        return found
    found = _closed(text)
    if found.source == "none" and not found.unclosed:
        mark = text.rfind(_GSM8K_MARK)
        if mark >= 0:
            line = text[mark + len(_GSM8K_MARK) :].strip().split("\n", 1)[0]
            return Found(line.strip(), "tag")
    return found


def reference_answer(text: str) -> str:
    """Reads the answer out of a reference.

    Takes its last boxes, else the line after "####", else its last sentence "final answer is ...",
    else all of it.
    """
    box = last_box(text) if "\\" in text else None
    if box is not None:
        return box_run(text, box, adjacent=True) or box.content
    mark = text.rfind(_GSM8K_MARK)
    if mark >= 0:
        return text[mark + len(_GSM8K_MARK) :].strip().split("\n", 1)[0].strip()
    # A solution in running text states its answer in a sentence.
    stated = final_answer(text) if has_delimiters(text) else None
    return stated or text.strip()
