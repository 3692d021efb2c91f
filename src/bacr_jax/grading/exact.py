"""Exact match, for tasks whose answers have one spelling: no parsing and no processes."""

import collections
from collections.abc import Callable, Sequence
from types import TracebackType

from bacr_jax.grading.grader import check_request
from bacr_jax.grading.verdict import STRICT, Verdict


class ExactGrader:
    """Compares the text of the last closed answer tag, stripped, with the stripped reference.

    Has the interface of `Grader`; both modes mean the same.
    """

    def __init__(self) -> None:
        self._counts: collections.Counter[str] = collections.Counter()

    def grade(
        self,
        texts: Sequence[str | None],
        golds: Sequence[str | None],
        *,
        mode: str = STRICT,
        poll: Callable[[], object] | None = None,
    ) -> list[Verdict]:
        """Grades texts against their references.

        Args:
            texts: completions with their answer tags.
            golds: one reference for each text.
            mode: "strict" or "lenient".
            poll: called once before the work.

        Returns:
            One verdict for each text.

        Raises:
            UserError: unknown mode, or not one reference for each text.
        """
        check_request(texts, golds, mode)
        if poll is not None:
            poll()
        verdicts = [self._one(text, gold) for text, gold in zip(texts, golds, strict=True)]
        self._counts["graded"] += len(verdicts)
        self._counts["correct"] += sum(verdict.correct for verdict in verdicts)
        self._counts["no_answer"] += sum(verdict.extracted is None for verdict in verdicts)
        return verdicts

    def submit(
        self, texts: Sequence[str | None], golds: Sequence[str | None], *, mode: str = STRICT
    ) -> "ExactPending":
        """Grades at once; the result is there when this returns."""
        return ExactPending(self.grade(texts, golds, mode=mode))

    def counters(self) -> dict[str, int]:
        """Totals since the start: graded, correct, no_answer."""
        return {name: self._counts[name] for name in ("graded", "correct", "no_answer")}

    def close(self) -> None:
        """Does nothing: there is nothing to release."""

    def __enter__(self) -> "ExactGrader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @staticmethod
    def _one(text: str | None, gold: str | None) -> Verdict:
        if not isinstance(text, str) or not isinstance(gold, str):
            return Verdict(False, None, "none")
        end = text.rfind("</answer>", text.rfind("</think>") + 1)
        begin = text.rfind("<answer>", text.rfind("</think>") + 1, end) if end >= 0 else -1
        if begin < 0:
            return Verdict(False, None, "none")
        answer = text[begin + 8 : end].strip()
        correct = answer == gold.strip() and bool(answer)
        return Verdict(correct, answer, "string", strict=correct)


class ExactPending:
    """Verdicts that are already there, with the interface of `Grader.submit`'s result."""

    def __init__(self, verdicts: list[Verdict]):
        self._verdicts = verdicts

    def done(self) -> bool:
        """Whether the verdicts are there: always."""
        return True

    def result(self, poll: Callable[[], object] | None = None) -> list[Verdict]:
        """The verdicts."""
        return self._verdicts

    def cancel(self) -> None:
        """Does nothing: there is nothing left to cancel."""
