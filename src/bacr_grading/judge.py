"""Grades a model output by rules and returns the comparisons that still need math-verify.

Called by `grader`, which sends these comparisons to worker processes. This module itself starts no
process and uses no computer algebra system. The rules are documented in docs/grading.md.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from bacr_grading.compare import Decision, bases_clash, decide
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
    unclosed_start,
    without_lead_in,
    without_withdrawn,
)
from bacr_grading.guards import nesting, not_text, refuse
from bacr_grading.normalize import clean
from bacr_grading.numbers import PLACES, clash, rounds_to
from bacr_grading.parsed_answer import ParsedAnswer, read
from bacr_grading.plain_units import with_units
from bacr_grading.pool import Request
from bacr_grading.statement import Claim, claims

STRICT = "strict"
LENIENT = "lenient"
MODES = (STRICT, LENIENT)

# Maximum number of characters of a text that are read. Only the end of a longer text is read,
# because the answer is at the end.
MAX_CHARS = 1 << 20
# Maximum number of characters at the end of prose that math-verify searches. The limit is needed
# because its regular expressions take quadratic time.
PROSE_CHARS = 4000
# Maximum length in characters of a text without a tag or box that is graded as an answer itself.
BARE_ANSWER_CHARS = 300
# Maximum length in characters of `Verdict.extracted`.
EXTRACTED_CHARS = 500
_NO_ANSWER = ParsedAnswer("")
_TRANSPOSED = re.compile(
    r"(?:(?<![\\A-Za-z])[A-Za-df-z]|[A-Za-z]\s*[)}\]])\^"
    r"(?:T|\{(?:T|\\top|\\intercal|\\text\{T\})\}|\\(?:top|intercal)|\\text\{T\})"
)
_CURRENCY = re.compile(r"[$€£]")
# A number in prose, with an optional sign, currency symbol and percent sign.
_LAST_NUMBER = re.compile(
    r"(?<![\w.,/^*)}])[-−–]?\s?\\?[$€£]?\d[\d,]*(?:\.\d+)?(?:\s?\\?%|\s(?:percent|pct)\b)?"
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of grading one text.

    Attributes:
      correct: True if the answer is correct in the requested mode. For a user's verifier, the score
        as a float in [0, 1].
      extracted: the answer extracted from the text, or None if the text has no answer.
      path: the rule that decided: "number", "string" or "list" (by rules only), "symbolic" (by
        math-verify), "guard" (rejected without a comparison), "none" (no answer or no usable
        reference), "verifier" (by a user's verifier), or "failed" (the verifier returned no score).
      timed_out: True if a worker was killed at the deadline. The answer then counts as incorrect.
      strict: True if the answer is correct in the strict mode, regardless of the requested mode.
        For a user's verifier, the same value as `correct`.
    """

    correct: bool | float
    extracted: str | None
    path: str
    timed_out: bool = False
    strict: bool | float = False


@dataclass(frozen=True, slots=True)
class Reading:
    """An interpretation of an answer, such as the last box or the list of the last boxes.

    The interpretation is correct if math-verify confirms all of its requests.

    Attributes:
      requests: the comparisons that math-verify has to make.
      strict: True if the interpretation also counts in the strict mode, provided that math-verify
        can parse the whole answer.
    """

    requests: tuple[Request, ...]
    strict: bool


@dataclass(frozen=True, slots=True)
class Undecided:
    """An answer that only math-verify can grade.

    Attributes:
      readings: interpretations of the answer. The answer is correct if any interpretation is
        correct.
      extracted: the answer, or None if math-verify has to extract it from the text.
    """

    readings: tuple[Reading, ...]
    extracted: str | None

    @property
    def requests(self) -> tuple[Request, ...]:
        """All comparisons that math-verify has to make, over all interpretations of the answer."""
        return tuple(request for reading in self.readings for request in reading.requests)


@dataclass(frozen=True, slots=True)
class Reference:
    r"""A usable reference answer.

    Attributes:
      text: the answer without `\boxed{}`, math delimiters and the surrounding solution. Grading
        against this text gives the same verdicts as grading against the whole reference.
      kind: "number", "text", "list" or "expression". Only expressions need the worker pool.
    """

    text: str
    kind: str


def parse_reference(text: str | None) -> Reference | None:
    """Parses a reference answer.

    Called while a dataset is loaded, so that problems with an unusable reference never reach
    training.

    Returns:
      The reference, or None if it is unusable: empty, longer than 2,000 characters, with unbalanced
      braces or with control characters. No answer could be graded as correct against it.
    """
    if not isinstance(text, str):
        return None
    answer = _read_reference(text)
    if not answer.key or len(answer.text) > ANSWER_CAP or nesting(answer.text) is None:
        return None
    if not_text(answer.text):
        return None
    return Reference(answer.source or answer.text, _kind(with_units(answer)))


def _kind(answer: ParsedAnswer) -> str:
    if answer.number or answer.based:
        return "number"
    if answer.words:
        return "text"
    return "list" if answer.items else "expression"


# Cached because all rollouts of a group share the same reference.
@lru_cache(maxsize=16384)
def _read_reference(text: str) -> ParsedAnswer:
    """Extracts and parses the answer in a reference.

    The attribute `source` of the result is set if the reference is prose, from which only
    math-verify can extract the answer. A reference that is too long gives an empty answer.
    """
    raw = reference_answer(text)
    if len(raw) > ANSWER_CAP:
        # Skip parsing, because matching the patterns on a long text is slow.
        return ParsedAnswer("")
    answer = read(raw)
    if answer.number is None and has_delimiters(raw) and is_prose(answer.text):
        return ParsedAnswer(answer.text, source=raw)
    return answer


@lru_cache(maxsize=16384)
def _read_target(text: str) -> ParsedAnswer:
    """Parses the answer in a reference, in which plain units are recognized."""
    return with_units(_read_reference(text))


# Cached because many rollouts of a group have the same answer.
_read_answer = lru_cache(maxsize=4096)(read)


def judge(
    text: str | None, reference: str | None, *, mode: str, relative_tolerance: float = 0.0
) -> Verdict | Undecided:
    """Grades one model output by rules.

    Args:
      text: the model's output.
      reference: the reference answer, or a solution that contains it.
      mode: "strict" or "lenient".
      relative_tolerance: maximum error of a number, relative to the reference.

    Returns:
      The verdict, or an `Undecided` with the comparisons that only math-verify can decide.
    """
    if not isinstance(text, str):
        return Verdict(False, None, "none")
    text = text[-MAX_CHARS:]
    lenient = mode == LENIENT
    extracted = closed_answer(text)
    is_closed = extracted.source != "none"
    if not is_closed and lenient:
        extracted = open_answer(text)
    target = _NO_ANSWER
    if isinstance(reference, str):
        target = _read_target(reference[-MAX_CHARS:])
    if not target.key:
        return Verdict(False, extracted.answer[:EXTRACTED_CHARS] or None, "none")
    comparison = _Comparison(target, lenient, relative_tolerance)
    if extracted.source == "none" and lenient and not extracted.unclosed:
        return comparison.judge_open_text(text)
    if not extracted.answer:
        return Verdict(False, None, "none")
    # In the lenient mode, a sentence "the final answer is ..." after the box is a second
    # interpretation of the answer.
    later_statement = _later_statement(text) if lenient else None
    return comparison.judge_extracted(extracted, is_closed, later_statement)


def _later_statement(text: str) -> str | None:
    """Returns the answer in the last sentence "the final answer is ..." after the last box or tag.

    Returns None if no such sentence exists. An unclosed tag or box contains no answer, because the
    text may be truncated in the middle of a number.
    """
    first = max(len(text) - PROSE_CHARS, 0)
    start = max(text.rfind("\\boxed", first), text.rfind("</answer>", first))
    if start < 0:
        return None
    return last_sentence(FINAL, text[start : unclosed_start(text)])


class _Comparison(NamedTuple):
    """Compares answers with a fixed reference.

    Attributes:
      reference: the reference answer.
      lenient: True for the lenient mode, False for the strict mode.
      tolerance: maximum error of a number, relative to the reference.
    """

    reference: ParsedAnswer
    lenient: bool
    tolerance: float

    def judge_extracted(
        self, extracted: Extracted, is_closed: bool, later_statement: str | None = None
    ) -> Verdict | Undecided:
        r"""Grades an extracted answer.

        The answer has up to three interpretations: the last box (`\boxed{...}`), the list formed by
        the last boxes, and, in the lenient mode, a sentence after the last box that states the
        answer. The answer is correct if any interpretation is correct.

        Args:
          extracted: the answer.
          is_closed: True if the box or tag is closed, which the strict mode requires.
          later_statement: the answer stated in a sentence after the box, for the lenient mode only.
        """
        shortened = extracted.answer[:EXTRACTED_CHARS]
        if len(extracted.answer) > ANSWER_CAP:
            return Verdict(False, shortened, "guard")
        candidates = [(extracted.answer, is_closed)]
        if extracted.run is not None:
            candidates.append((extracted.run, is_closed))
        if later_statement is not None:
            candidates.append((later_statement, False))
        readings: list[Reading] = []
        first_path = ""
        has_prose = False
        for content, counts_in_strict in candidates:
            if len(content) > ANSWER_CAP:
                continue
            raw = without_lead_in(content)
            answer = with_units(_read_answer(raw), self.reference)
            strict: Reading | bool = False
            path = ""
            if counts_in_strict:
                strict, path = self._decide_strictly(raw, answer)
            if strict is True:
                return Verdict(True, shortened, path, strict=True)
            decision: Reading | bool = strict
            if self.lenient:
                decision, path = self._decide_leniently(answer, strict)
            if decision is True:
                return Verdict(True, shortened, path)
            if decision is not False:
                readings.append(decision)
            if strict and decision is not strict:
                readings.append(strict)
            has_prose = has_prose or path == "prose"
            first_path = first_path or path
        if readings:
            return Undecided(tuple(readings), shortened)
        if has_prose and self.lenient:
            return self.judge_open_text(extracted.answer)
        # In the strict mode, prose was compared as a string.
        return Verdict(False, shortened, first_path.replace("prose", "string"))

    def _decide_strictly(self, raw: str, answer: ParsedAnswer) -> tuple[Reading | bool, str]:
        """Applies the strict rules to one interpretation of an answer.

        Args:
          raw: the answer before `normalize.clean`.
          answer: the parsed answer.

        Returns:
          A pair. The first item is the verdict, or a `Reading` with the comparisons that only
          math-verify can decide. The second item is the rule that decided.
        """
        equalities = claims(raw, answer, self.reference)
        if equalities is None:
            return False, "string"
        requests: list[Request] = []
        path = ""
        for claim in equalities:
            verdict, path = self._decide_claim(claim)
            if verdict is None:
                refusal = _refusal(claim.answer, claim.reference)
                if refusal is not None:
                    return False, refusal
                request = _request(claim.answer.text, claim.reference)
                requests.append(request._replace(search=False, places=claim.places or PLACES))
            elif not verdict:
                return False, path
        if requests:
            return Reading(tuple(requests), strict=True), "symbolic"
        return True, path

    def _decide_claim(self, claim: Claim) -> Decision:
        """Compares the two sides of a claim (an equality that must be true) by rules."""
        answer = claim.answer
        reference = claim.reference
        if claim.places is None:
            return decide(answer, reference, lenient=False, relative_tolerance=self.tolerance)
        if answer.number is None or reference.number is None:
            return None, "symbolic"
        if clash(answer.unit, self.reference.unit or reference.unit, lenient=False):
            return False, "number"
        return rounds_to(reference.number, answer.number, claim.places), "number"

    def _decide_leniently(
        self, answer: ParsedAnswer, strict: Reading | bool
    ) -> tuple[Reading | bool, str]:
        """Applies the lenient rules, which allow further text around the correct value.

        Args:
          answer: the parsed answer.
          strict: the first item of the result of `_decide_strictly`.

        Returns:
          A pair as in `_decide_strictly`.
        """
        reference = self.reference
        if answer.ratio or reference.ratio:
            return strict, "list"
        verdict, path = self._decide_by_lenient_rules(answer)
        if verdict is not None:
            return verdict, path
        refusal = _refusal(answer, reference)
        if refusal is not None:
            return False, refusal
        request = _request(answer.text, reference)
        if isinstance(strict, Reading):
            strict_answers = [strict_request.answer for strict_request in strict.requests]
            return Reading((request,), strict=strict_answers == [answer.text]), path
        return Reading((request,), strict=False), path

    def _decide_by_lenient_rules(self, answer: ParsedAnswer) -> Decision:
        return decide(answer, self.reference, lenient=True, relative_tolerance=self.tolerance)

    def judge_open_text(self, text: str) -> Verdict | Undecided:
        """Grades a text without a tag or box, for the lenient mode only.

        A short text is compared as if it were the answer. Prose is graded in three steps. First,
        the sentence that states the answer is compared. If the prose has no such sentence, its last
        number is compared, provided that it has a percent sign or a currency symbol. If neither
        step decides, math-verify searches the prose.
        """
        tail = text[-PROSE_CHARS:].strip()
        answer = clean(tail)
        if not answer:
            return Verdict(False, None, "none")
        is_short = len(answer) <= BARE_ANSWER_CHARS
        has_prose = not is_short or is_prose(answer)
        if is_short:
            verdict, path = self._decide_by_lenient_rules(read(answer))
            if verdict or (verdict is False and not has_prose):
                return Verdict(verdict, answer, path)
        if not has_prose:
            return self.judge_extracted(Extracted(answer, "tag"), is_closed=False)
        prose = without_withdrawn(tail)
        stated_answer = last_sentence(STATED, prose)
        if stated_answer is not None:
            verdict, path = self._decide_by_lenient_rules(read(stated_answer))
            if verdict is not None:
                return Verdict(verdict, stated_answer, path)
        return self._search_prose(prose)

    def _search_prose(self, prose: str) -> Verdict | Undecided:
        """Grades an answer in prose by rules if possible, and otherwise requests math-verify.

        The rules apply if no sentence states the answer and the last number has a percent sign or a
        currency symbol. If this number is not correct, math-verify searches the prose.

        Args:
          prose: the end of the text, without answers that the text itself withdraws.
        """
        if _refuse_reference(self.reference) or not_text(prose):
            return Verdict(False, None, "guard")
        statement_start = last_statement(STATED, prose)
        searched = prose if statement_start is None else prose[statement_start:]
        number = _last_number(searched) if statement_start is None else None
        if number is not None:
            verdict, path = self._decide_by_lenient_rules(read(number))
            if verdict:
                return Verdict(True, number, path)
        request = _request(searched, self.reference)._replace(prose=True)
        return Undecided((Reading((request,), strict=False),), None)


def _last_number(text: str) -> str | None:
    """Returns the last number in prose if it has a percent sign or currency symbol, else None."""
    numbers = _LAST_NUMBER.findall(text)
    if not numbers:
        return None
    number: str = numbers[-1].strip()
    is_percentage = number.endswith(("%", "percent", "pct"))
    return number if is_percentage or _CURRENCY.search(number) else None


def _refusal(answer: ParsedAnswer, reference: ParsedAnswer) -> str | None:
    """Returns the rule that rejects an answer without math-verify, or None if none does.

    If a rule is returned, the answer is incorrect and the rule is the verdict's path.
    """
    if bases_clash(answer.key, reference.key):
        return "number"
    if _TRANSPOSED.search(answer.key) or _TRANSPOSED.search(reference.key):
        # math-verify parses products as commutative, but matrix products are not commutative.
        return "string"
    if is_prose(answer.text):
        return "prose"
    return "guard" if refuse(answer.text) or _refuse_reference(reference) else None


def _refuse_reference(reference: ParsedAnswer) -> bool:
    return not_text(reference.source) if reference.source else refuse(reference.text)


def _request(text: str, reference: ParsedAnswer) -> Request:
    if reference.source:
        return Request(text, reference.source, reference_is_prose=True)
    return Request(text, reference.text)
