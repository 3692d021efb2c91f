"""The verdict on one text as far as it can be had at once, and the questions that remain."""

import re
from dataclasses import dataclass
from functools import lru_cache

from bacr_grading.compare import Answer, Decision, bases_clash, decide, read
from bacr_grading.extract import (
    ANSWER_CAP,
    FINAL,
    STATED,
    Extracted,
    closed_answer,
    has_delimiters,
    is_prose,
    last_sentence,
    last_statement,
    open_answer,
    reference_answer,
    without_denials,
    without_lead_in,
)
from bacr_grading.guards import nesting, not_text, refuse
from bacr_grading.normalize import clean
from bacr_grading.numbers import PLACES, clash, rounds_to
from bacr_grading.pool import Request
from bacr_grading.statement import Claim, claims

STRICT = "strict"
LENIENT = "lenient"
MODES = (STRICT, LENIENT)

# Text beyond this is not read. The answer is at the end, so it is the start that is dropped.
MAX_CHARS = 1 << 20
# The end of a running text that math-verify searches; its patterns can take quadratic time.
PROSE_CHARS = 4000
BARE_ANSWER_CHARS = 300
EXTRACTED_CHARS = 500
_TRANSPOSED = re.compile(
    r"(?:(?<![\\A-Za-z])[A-Za-df-z]|[A-Za-z]\s*[)}\]])\^"
    r"(?:T|\{(?:T|\\top|\\intercal|\\text\{T\})\}|\\(?:top|intercal)|\\text\{T\})"
)
_CURRENCY = re.compile(r"[$€£]")
# The last number of a running text: a sign may precede its currency.
_LAST_NUMBER = re.compile(
    r"(?<![\w.,/^*)}])[-−–]?\s?\\?[$€£]?\d[\d,]*(?:\.\d+)?(?:\s?\\?%|\s(?:percent|pct)\b)?"
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on one text.

    Attributes:
      correct: whether the answer is right in the mode asked for; of a verifier of one's own the
        score in [0, 1], a float.
      extracted: the answer that was found, or None.
      path: what decided: "number", "string", "list" (no computer algebra), "symbolic"
        (math-verify), "guard" (refused unseen), "none" (no answer, or no usable reference),
        "verifier" (one's own), "failed" (which gave no score).
      timed_out: a worker was killed at the deadline, and so there is no verdict but "incorrect".
      strict: whether the answer is right in the strict mode, whatever mode was asked for; the same
        score of a verifier of one's own.
    """

    correct: bool | float
    extracted: str | None
    path: str
    timed_out: bool = False
    strict: bool | float = False


@dataclass(frozen=True, slots=True)
class Reading:
    """What math-verify has to say yes to for one reading of an answer to be right.

    Attributes:
      strict: whether the strict mode accepts this reading too, when math-verify understood the
        whole of it.
    """

    requests: tuple[Request, ...]
    strict: bool


@dataclass(frozen=True, slots=True)
class Undecided:
    """What only math-verify can decide.

    Attributes:
      readings: readings of the answer; one that is right is enough.
      extracted: the answer, or None where math-verify has to find it.
    """

    readings: tuple[Reading, ...]
    extracted: str | None

    @property
    def requests(self) -> tuple[Request, ...]:
        """Everything to ask."""
        return tuple(request for reading in self.readings for request in reading.requests)


@dataclass(frozen=True, slots=True)
class Reference:
    """A usable reference answer.

    Attributes:
      text: the answer without its box, delimiters or the solution around it. Grading against it
        is grading against the reference it came from.
      kind: "number", "text", "list" or "expression". Only expressions need the worker pool.
    """

    text: str
    kind: str


def parse_reference(text: str | None) -> Reference | None:
    """Reads a reference when the data is loaded, so that unusable rows never reach training.

    None: no output could ever be graded correct against it: nothing there, braces that do not
    balance, control characters, or more than 2,000 characters.
    """
    if not isinstance(text, str):
        return None
    answer = _read_reference(text)
    if not answer.key or len(answer.text) > ANSWER_CAP or nesting(answer.text) is None:
        return None
    if not_text(answer.text):
        return None
    if answer.number or answer.based:
        kind = "number"
    elif answer.words:
        kind = "text"
    else:
        kind = "list" if answer.items else "expression"
    return Reference(answer.source or answer.text, kind)


@lru_cache(maxsize=16384)
def _read_reference(text: str) -> Answer:
    """Reads a reference for comparing. Cached: a group of rollouts shares its reference."""
    raw = reference_answer(text)
    if len(raw) > ANSWER_CAP:
        # Read before it is parsed: nothing this long is an answer, and every pattern takes time.
        return Answer("")
    answer = read(raw)
    if answer.number is None and has_delimiters(raw) and is_prose(answer.text):
        return Answer(answer.text, source=raw)
    return answer


def judge(
    text: str | None, reference: str | None, *, mode: str, relative_tolerance: float = 0.0
) -> Verdict | Undecided:
    """Grades one text without a computer algebra system, or says what to ask one."""
    if not isinstance(text, str):
        return Verdict(False, None, "none")
    text, lenient = text[-MAX_CHARS:], mode == LENIENT
    found = closed_answer(text)
    closed = found.source != "none"
    if not closed and lenient:
        found = open_answer(text)
    extracted = found.answer[:EXTRACTED_CHARS] or None
    target = _read_reference(reference[-MAX_CHARS:]) if isinstance(reference, str) else Answer("")
    if not target.key:
        return Verdict(False, extracted, "none")
    against = _Comparison(target, lenient, relative_tolerance)
    if found.source == "none" and lenient and not found.unclosed:
        return against.open_text(text)
    if not found.answer:
        return Verdict(False, None, "none")
    # A later "the final answer is ..." is a second reading, in reports only.
    return against.found(found, closed, _stated_later(text) if lenient else None)


def _stated_later(text: str) -> str | None:
    tail = text[-PROSE_CHARS:]
    place = max(tail.rfind("\\boxed"), tail.rfind("</answer>"))
    return last_sentence(FINAL, tail[place:]) if place >= 0 else None


@dataclass(frozen=True, slots=True)
class _Comparison:
    """What an answer is compared with, and how."""

    reference: Answer
    lenient: bool
    tolerance: float

    def found(
        self, found: Extracted, closed: bool, stated: str | None = None
    ) -> Verdict | Undecided:
        """Compares the answer, read as the last box and as the list of the last boxes."""
        extracted = found.answer[:EXTRACTED_CHARS]
        if len(found.answer) > ANSWER_CAP:
            return Verdict(False, extracted, "guard")
        readings: list[Reading] = []
        first_path = ""
        prose = False
        for content, counts in ((found.answer, closed), (found.run, closed), (stated, False)):
            if content is None or len(content) > ANSWER_CAP:
                continue
            raw = without_lead_in(content)
            answer = read(raw)
            strict, path = self._strictly(raw, answer) if counts else (False, "")
            if strict is True:
                return Verdict(True, extracted, path, strict=True)
            wanted: Reading | bool = strict
            if self.lenient:
                wanted, path = self._leniently(answer, strict)
            if wanted is True:
                return Verdict(True, extracted, path)
            if wanted is not False:
                readings.append(wanted)
            if strict and wanted is not strict:
                readings.append(strict)
            # An answer in running text was compared as a string, and that is all in strict mode.
            prose = prose or path == "prose"
            first_path = first_path or path
        if readings:
            return Undecided(tuple(readings), extracted)
        if prose and self.lenient:
            return self.open_text(found.answer)
        return Verdict(False, extracted, first_path.replace("prose", "string"))

    def _strictly(self, raw: str, answer: Answer) -> tuple[Reading | bool, str]:
        """The strict verdict on one reading, or what is left to ask; and what decided it."""
        wanted = claims(raw, answer, self.reference)
        if wanted is None:
            return False, "string"
        requests: list[Request] = []
        path = ""
        for claim in wanted:
            verdict, path = self._decide_claim(claim)
            if verdict is None and (refusal := _refusal(claim.answer, claim.reference)):
                verdict, path = False, refusal
            if verdict is False:
                return False, path
            if verdict is None:
                asked = _request(claim.answer.text, claim.reference)
                requests.append(asked._replace(search=False, places=claim.places or PLACES))
        return (Reading(tuple(requests), strict=True), "symbolic") if requests else (True, path)

    def _decide_claim(self, claim: Claim) -> Decision:
        """Compares one claim as far as that is certain."""
        answer, reference = claim.answer, claim.reference
        if claim.places is None:
            return decide(answer, reference, lenient=False, relative_tolerance=self.tolerance)
        if answer.number is None or reference.number is None:
            return None, "symbolic"
        if clash(answer.unit, self.reference.unit or reference.unit, lenient=False):
            return False, "number"
        return rounds_to(reference.number, answer.number, claim.places), "number"

    def _leniently(self, answer: Answer, strict: Reading | bool) -> tuple[Reading | bool, str]:
        """As `_strictly`, for the lenient mode: an answer may hold more than what is right."""
        reference = self.reference
        if answer.ratio or reference.ratio:
            return strict, "list"
        verdict, path = decide(answer, reference, lenient=True, relative_tolerance=self.tolerance)
        if verdict is not None:
            return verdict, path
        if refusal := _refusal(answer, reference):
            return False, refusal
        requests = (_request(answer.text, reference),)
        same = isinstance(strict, Reading) and [r.answer for r in strict.requests] == [answer.text]
        return Reading(requests, strict=same), path

    def _read(self, candidate: str) -> Decision:
        return decide(
            read(candidate), self.reference, lenient=True, relative_tolerance=self.tolerance
        )

    def open_text(self, text: str) -> Verdict | Undecided:
        """Lenient reports also read a text without tag or box."""
        reference, tail = self.reference, text[-PROSE_CHARS:].strip()
        whole = clean(tail)
        if not whole:
            return Verdict(False, None, "none")
        short = len(whole) <= BARE_ANSWER_CHARS
        prose = not short or is_prose(whole)
        statement = last_statement(STATED, tail) if prose else None
        stated = None if statement is None else last_sentence(STATED, tail)
        for candidate in (whole if short else None, stated):
            if candidate is None:
                continue
            verdict, path = self._read(candidate)
            certain = verdict is False and (not prose or candidate is not whole)
            if verdict or certain:
                return Verdict(bool(verdict), candidate, path)
        if not prose:
            return self.found(Extracted(whole, "tag"), closed=False)
        if _refuse_reference(reference) or not_text(tail):
            return Verdict(False, None, "guard")
        searched = without_denials(tail if statement is None else tail[statement:])
        if statement is None and (number := _last_number(searched)):
            verdict, path = self._read(number)
            if verdict:
                return Verdict(True, number, path)
        asked = _request(searched, reference)._replace(prose=True)
        return Undecided((Reading((asked,), strict=False),), None)


def _last_number(text: str) -> str | None:
    """The last number of a running text, if it has a percent sign or a currency."""
    numbers = _LAST_NUMBER.findall(text)
    if not numbers:
        return None
    number: str = numbers[-1].strip()
    return number if number.endswith(("%", "percent", "pct")) or _CURRENCY.search(number) else None


def _refusal(answer: Answer, reference: Answer) -> str | None:
    """The path of the verdict "incorrect" without asking math-verify, or None when to ask it."""
    if bases_clash(answer.key, reference.key):
        return "number"
    if _TRANSPOSED.search(answer.key) or _TRANSPOSED.search(reference.key):
        # The parser's products commute, which those of matrices do not.
        return "string"
    if is_prose(answer.text):
        return "prose"
    return "guard" if refuse(answer.text) or _refuse_reference(reference) else None


def _refuse_reference(reference: Answer) -> bool:
    return not_text(reference.source) if reference.source else refuse(reference.text)


def _request(text: str, reference: Answer) -> Request:
    source = reference.source
    return Request(text, source or reference.text, reference_is_prose=bool(source))
