"""The samples of one setting as arrays, and how numbers are rounded for a report."""

import collections
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from bacr_jax.evaluation.samples import EvalSetting, Sample

# Beyond these digits, sums depend on the order in which a machine takes them.
_DIGITS = 10


@dataclass(frozen=True)
class Graded:
    """The samples of a setting, problems by samples.

    Attributes:
      budget: thinking tokens that the policy was told; NO_BUDGET: none.
      ids: identifier of each problem.
      levels: of each problem.
      subjects: of each problem.
      correct: lenient verdicts; scores in [0, 1] where a verifier of one's own gave them.
      strict: strict verdicts; the same scores.
      thinking: thinking tokens.
      total: thinking, forced and answer tokens.
      forced_tokens: tokens put between thinking and answer.
      answered: sampled answer tokens.
      forced: the budget ended the thinking.
      finished: the answer was closed.
      timed_out: the grader's deadline passed.
      answers: extracted answers, None where there is none.
      paths: how many verdicts each path decided.
    """

    budget: int
    ids: list[str]
    levels: Int[np.ndarray, "n"]
    subjects: list[str]
    correct: Bool[np.ndarray, "n samples"] | Float[np.ndarray, "n samples"]
    strict: Bool[np.ndarray, "n samples"] | Float[np.ndarray, "n samples"]
    thinking: Int[np.ndarray, "n samples"]
    total: Int[np.ndarray, "n samples"]
    forced_tokens: Int[np.ndarray, "n samples"]
    answered: Int[np.ndarray, "n samples"]
    forced: Bool[np.ndarray, "n samples"]
    finished: Bool[np.ndarray, "n samples"]
    timed_out: Bool[np.ndarray, "n samples"]
    answers: list[list[str | None]]
    paths: dict[str, int]

    @property
    def samples(self) -> int:
        """Answers per problem."""
        return self.correct.shape[1]


def graded(samples: Sequence[Sample], setting: EvalSetting) -> Graded:
    """Collects the samples of a setting, given problem by problem."""
    heads = samples[:: setting.samples]

    def table(values: Sequence[Any], kind: type) -> np.ndarray:
        return np.array(values, kind).reshape(len(heads), setting.samples)

    answers = [sample.extracted for sample in samples]
    kind = bool if all(isinstance(sample.correct, bool) for sample in samples) else float
    return Graded(
        budget=setting.budget,
        ids=[sample.id for sample in heads],
        levels=np.array([sample.level for sample in heads], np.int64),
        subjects=[sample.subject for sample in heads],
        correct=table([sample.correct for sample in samples], kind),
        strict=table([sample.strict for sample in samples], kind),
        thinking=table([sample.thinking_tokens for sample in samples], np.int64),
        total=table([sample.total_tokens for sample in samples], np.int64),
        forced_tokens=table([sample.forced_tokens for sample in samples], np.int64),
        answered=table([sample.answer_tokens for sample in samples], np.int64),
        finished=table([sample.finished for sample in samples], bool),
        forced=table([sample.closed_by == "budget" for sample in samples], bool),
        timed_out=table([sample.timed_out for sample in samples], bool),
        answers=[answers[i : i + setting.samples] for i in range(0, len(answers), setting.samples)],
        paths=dict(sorted(collections.Counter(sample.path for sample in samples).items())),
    )


def number(value: Any) -> float:
    """A number for a report: the same on every run of the same samples."""
    return round(float(value), _DIGITS)


def interval(ends: Float[np.ndarray, "2"]) -> list[float]:
    """Two of them."""
    return [number(end) for end in ends]
