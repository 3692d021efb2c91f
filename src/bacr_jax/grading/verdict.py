"""What grading says about one answer."""

from dataclasses import dataclass

STRICT = "strict"
LENIENT = "lenient"
MODES = (STRICT, LENIENT)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on one text.

    Attributes:
        correct: whether the answer is right in the mode asked for.
        extracted: the answer that was found, or None.
        path: what decided: "number", "string", "list" (no computer algebra), "symbolic"
            (math-verify), "guard" (refused unseen), "none" (no answer, or no usable reference).
        timed_out: a worker was killed at the deadline, and so there is no verdict but "incorrect".
        strict: whether the answer is right in the strict mode, whatever mode was asked for.
    """

    correct: bool
    extracted: str | None
    path: str
    timed_out: bool = False
    strict: bool = False
