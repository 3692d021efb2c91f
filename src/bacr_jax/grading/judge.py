"""The verdict on one text as far as it can be had at once, and the questions that remain."""

import re
from dataclasses import dataclass

from bacr_jax.grading.compare import Answer, bases_clash, decide, read
from bacr_jax.grading.extract import ANSWER_CAP, Found, closed_answer, open_answer
from bacr_jax.grading.gold import read_gold
from bacr_jax.grading.guards import not_text, refuse
from bacr_jax.grading.normalize import clean
from bacr_jax.grading.pool import Request
from bacr_jax.grading.prose import final_answer, is_prose, stated_answer
from bacr_jax.grading.verdict import LENIENT, STRICT, Verdict

# Text beyond this is not read. The answer is at the end, so it is the start that is dropped.
MAX_CHARS = 1 << 20
# The end of a running text that math-verify searches; its patterns can take quadratic time.
PROSE_CHARS = 4000
BARE_ANSWER_CHARS = 300
EXTRACTED_CHARS = 500

# An answer in running text was compared as a string, and that is all in the strict mode.
PROSE = "string"

# Integers against integers are most of what training grades.
_INTEGER = re.compile(r"-?[0-9]{1,18}\Z")


@dataclass(frozen=True, slots=True)
class Question:
    """What only math-verify can decide.

    Attributes:
        requests: readings of the answer; one that is right is enough.
        extracted: the answer, or None where math-verify has to find it.
        closed: whether it was in a closed tag or box and no lenient rule was needed so far, so
            that the strict mode accepts it too.
    """

    requests: tuple[Request, ...]
    extracted: str | None
    closed: bool


def judge(
    text: str | None, gold: str | None, *, mode: str, relative_tolerance: float = 0.0
) -> Verdict | Question:
    """Grades one text without a computer algebra system, or says what to ask one.

    Args:
        text: a model's output.
        gold: its reference.
        mode: "strict" or "lenient".
        relative_tolerance: largest accepted relative error between two numbers.

    Returns:
        The verdict, or the question that remains.
    """
    if not isinstance(text, str):
        return Verdict(False, None, "none")
    text = text[-MAX_CHARS:]
    found = closed_answer(text)
    closed = found.source != "none"
    if not closed and mode == LENIENT:
        found = open_answer(text)
    extracted = found.answer[:EXTRACTED_CHARS] or None
    if not isinstance(gold, str):
        return Verdict(False, extracted, "none")
    reference = read_gold(gold[-MAX_CHARS:])
    if not reference.key:
        return Verdict(False, extracted, "none")
    if found.source == "none":
        if mode == LENIENT and not found.unclosed:
            return _judge_open(text, reference, relative_tolerance)
        return Verdict(False, None, "none")
    if not found.answer:
        return Verdict(False, None, "none")
    if found.run is None and reference.integer is not None and _INTEGER.match(found.answer):
        correct = int(found.answer) == reference.integer
        if correct or mode == STRICT:
            return Verdict(correct, extracted, "number", strict=correct and closed)
    # A later "the final answer is ..." is a second reading, in reports only.
    stated = _stated_later(text) if mode == LENIENT else None
    return _judge_found(found, reference, mode, closed, relative_tolerance, stated)


def _stated_later(text: str) -> str | None:
    tail = text[-PROSE_CHARS:]
    place = max(tail.rfind("\\boxed"), tail.rfind("</answer>"))
    return final_answer(tail[place:]) if place >= 0 else None


def _judge_found(
    found: Found,
    gold: Answer,
    mode: str,
    closed: bool,
    tolerance: float,
    stated: str | None = None,
) -> Verdict | Question:
    """Compares the answer, read as the last box and as the list of the last boxes."""
    extracted = found.answer[:EXTRACTED_CHARS]
    if len(found.answer) > ANSWER_CAP:
        return Verdict(False, extracted, "guard")
    requests: list[Request] = []
    first_path = ""
    strict_open = prose = False
    for content, counts in ((found.answer, closed), (found.run, closed), (stated, False)):
        if content is None or len(content) > ANSWER_CAP:
            continue
        answer = read(content)
        strict, path = decide(answer, gold, lenient=False, relative_tolerance=tolerance)
        wanted = strict
        if mode == LENIENT and not strict:
            wanted, path = decide(answer, gold, lenient=True, relative_tolerance=tolerance)
        if wanted:
            return Verdict(True, extracted, path, strict=counts and bool(strict))
        if wanted is None:
            request = _request(answer, gold)
            prose = prose or request == PROSE
            if isinstance(request, Request):
                requests.append(request)
                strict_open = strict_open or (counts and strict is None)
            else:
                path = request
        first_path = first_path or path
    if prose and mode == LENIENT and not requests:
        return _judge_open(found.answer, gold, tolerance)
    if requests:
        return Question(tuple(requests), extracted, strict_open)
    return Verdict(False, extracted, first_path)


def _request(answer: Answer, gold: Answer) -> Request | str:
    """What to ask math-verify, or the path of the verdict "incorrect" without asking."""
    if bases_clash(answer.key, gold.key):
        return "number"
    if not answer.key:
        return "none"
    if is_prose(answer.text):
        return PROSE
    if refuse(answer.text) or _refuse_gold(gold):
        return "guard"
    return Request(answer.text, gold.source or gold.text, gold_is_prose=bool(gold.source))


def _refuse_gold(gold: Answer) -> bool:
    return bool(not_text(gold.source) if gold.source else refuse(gold.text))


def _judge_open(text: str, gold: Answer, tolerance: float) -> Verdict | Question:
    """Lenient reports also read a text without tag or box."""
    tail = text[-PROSE_CHARS:].strip()
    whole = clean(tail)
    prose = len(whole) > BARE_ANSWER_CHARS or is_prose(whole)
    if not whole:
        return Verdict(False, None, "none")
    candidates = [whole] if len(whole) <= BARE_ANSWER_CHARS else []
    stated = stated_answer(tail) if prose else None
    for candidate in candidates + ([stated] if stated else []):
        answer = read(candidate)
        verdict, path = decide(answer, gold, lenient=True, relative_tolerance=tolerance)
        if verdict or (verdict is False and not prose):
            return Verdict(bool(verdict), candidate, path)
    if not prose:
        return _judge_found(Found(whole, "tag"), gold, LENIENT, False, tolerance)
    if _refuse_gold(gold) or not_text(tail):
        return Verdict(False, None, "guard")
    request = Request(tail, gold.source or gold.text, prose=True, gold_is_prose=bool(gold.source))
    return Question((request,), None, False)
