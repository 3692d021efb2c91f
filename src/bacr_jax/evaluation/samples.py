"""Defines the settings and problems of an evaluation, and its record of each answer.

An evaluation is a list of settings (a decoding and a budget). The rows of a setting, problem by
problem and sample by sample, are drawn in batches whose composition is fixed beforehand. Therefore
an evaluation that was interrupted and continued has the same results as an uninterrupted one.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from bacr_jax.config import EvalConfig
from bacr_jax.config.derived import samples_of
from bacr_jax.prompts.environment import Environment
from bacr_jax.types import CLOSED_BY_BUDGET, CLOSED_BY_EOS, CLOSED_BY_TAG, NO_BUDGET, Poll

GREEDY, SAMPLED = "greedy", "sampled"
# Name of the budget of an evaluation without one, in results.
UNLIMITED = "none"
CLOSE_NAMES = {CLOSED_BY_BUDGET: "budget", CLOSED_BY_TAG: "tag", CLOSED_BY_EOS: "end of turn"}

# Set, mode, budget, cut, problem and number of a sample.
SampleKey = tuple[str, str, int, int | None, str, int]


@dataclass(frozen=True)
class EvalSetting:
    """A decoding and a budget, whose answers are averaged together.

    Attributes:
      mode: `GREEDY` or `SAMPLED`.
      budget: thinking tokens that the policy receives; NO_BUDGET for none.
      samples: answers per problem.
      cut: thinking tokens after which the answer of a trace is forced early; None if the thinking
        ends by itself or at the budget.
    """

    mode: str
    budget: int
    samples: int
    cut: int | None = None


@dataclass(frozen=True)
class Sample:
    """One answer to one problem, with its verdicts.

    Attributes:
      set: name of the evaluation set.
      id: the problem's id.
      mode, budget, cut: see `EvalSetting`.
      sample: number of the answer, 0 .. samples - 1.
      level: difficulty of the problem, 1 .. 5; 0 if unknown.
      text: everything after the prompt: thinking, forced suffix, answer. For an early cut it lacks
        the thinking, which is stored with the complete trace.
      extracted: the answer that the grader read; None if there is none.
      gold: reference answer.
      correct: lenient verdict, or score.
      strict: strict verdict, which rewards use, or the same score.
      path: grading rule that decided the verdict.
      thinking_tokens: sampled thinking, without a closing tag.
      forced_tokens: tokens put between thinking and answer.
      answer_tokens: sampled answer with its closing tag.
      total_tokens: everything after the prompt: the sum of the three, and the thinking's closing
        tag.
      closed_by: cause of the end of thinking, one of `CLOSE_NAMES`; "budget" if it was forced.
      finished: True if the answer was closed.
    """

    set: str
    id: str
    mode: str
    budget: int
    cut: int | None
    sample: int
    level: int
    subject: str
    text: str
    extracted: str | None
    gold: str
    correct: bool | float
    strict: bool | float
    path: str
    timed_out: bool
    thinking_tokens: int
    forced_tokens: int
    answer_tokens: int
    total_tokens: int
    closed_by: str
    finished: bool

    @property
    def key(self) -> SampleKey:
        """Returns what distinguishes the sample from all others of its evaluation."""
        return self.set, self.mode, self.budget, self.cut, self.id, self.sample


def subset(problems: int, size: int | None, seed: int) -> Int[np.ndarray, "n"]:
    """Returns rising indices of the problems to evaluate: all, or a random subset fixed by seed."""
    if size is None or size >= problems:
        return np.arange(problems)
    return np.sort(np.random.default_rng([seed, 7]).choice(problems, size, replace=False))


def evaluated_budgets(config: EvalConfig) -> list[int]:
    """Returns the budgets to evaluate; NO_BUDGET is last if config.no_budget is set."""
    return [*config.budgets, *([NO_BUDGET] if config.no_budget else [])]


def eval_settings(config: EvalConfig, spec: str = "", *, greedy: bool = True) -> list[EvalSetting]:
    """Returns settings in the order of evaluation: greedy before sampled, budgets rising.

    Args:
      spec: the set of data.eval, which decides the number of samples if `config.samples` has
        several.
      greedy: False leaves out the greedy settings.
    """
    budgets = evaluated_budgets(config)
    samples = samples_of(config, spec)
    settings = []
    if greedy:
        settings += [EvalSetting(GREEDY, budget, 1) for budget in budgets]
    if samples:
        settings += [EvalSetting(SAMPLED, budget, samples) for budget in budgets]
    return settings


def budget_key(budget: int) -> str:
    """Returns a budget's key in results: its number, or `UNLIMITED`."""
    return UNLIMITED if budget == NO_BUDGET else str(budget)


def dense_cuts(budget: int, every: int) -> list[int]:
    """Returns the multiples of `every` below the budget, and the budget, in tokens."""
    return [*range(every, budget, every), budget]


def dense_settings(
    config: EvalConfig, spec: str = "", *, greedy: bool = True
) -> list[list[EvalSetting]]:
    """Returns the settings of the dense curve; empty if config.dense is None.

    Returns:
      For each decoding, the settings at all cuts of the same traces, whose budget is the largest.
    """
    if config.dense is None:
        return []
    largest = max(config.budgets)
    cuts = dense_cuts(largest, config.dense)
    return [
        [dataclasses.replace(setting, cut=cut) for cut in cuts]
        for setting in eval_settings(config, spec, greedy=greedy)
        if setting.budget == largest
    ]


# Decimal digits of reported numbers. Further digits depend on the order of summation.
_DIGITS = 10


@dataclass(frozen=True)
class Graded:
    """The samples of a setting as arrays, problems by samples.

    Attributes:
      budget: thinking tokens that the policy received; NO_BUDGET for none.
      correct: lenient verdicts, or scores in [0, 1] from a user's verifier.
      strict: strict verdicts, or the same scores.
      thinking: thinking tokens.
      total: thinking, forced and answer tokens.
      answered: answer tokens.
      forced: True if the budget ended the thinking.
      finished: True if the answer was closed.
      answers: extracted answers; None for no answer.
      paths: number of verdicts by the grading rule that decided them.
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
        """Returns the number of answers per problem."""
        return self.correct.shape[1]


def graded(samples: Sequence[Sample], setting: EvalSetting) -> Graded:
    """Collects the samples of a setting, which are in the order of problems."""
    heads = samples[:: setting.samples]

    def table(field: str, kind: type) -> np.ndarray:
        values = [getattr(sample, field) for sample in samples]
        return np.array(values, kind).reshape(len(heads), setting.samples)

    answers = [sample.extracted for sample in samples]
    starts = range(0, len(answers), setting.samples)
    all_verdicts = all(isinstance(sample.correct, bool) for sample in samples)
    kind = bool if all_verdicts else float
    path_counts = collections.Counter(sample.path for sample in samples)
    return Graded(
        budget=setting.budget,
        ids=[sample.id for sample in heads],
        levels=np.array([sample.level for sample in heads], np.int64),
        subjects=[sample.subject for sample in heads],
        correct=table("correct", kind),
        strict=table("strict", kind),
        thinking=table("thinking_tokens", np.int64),
        total=table("total_tokens", np.int64),
        forced_tokens=table("forced_tokens", np.int64),
        answered=table("answer_tokens", np.int64),
        finished=table("finished", bool),
        forced=table("closed_by", object) == "budget",
        timed_out=table("timed_out", bool),
        answers=[answers[start : start + setting.samples] for start in starts],
        paths=dict(sorted(path_counts.items())),
    )


def number(value: Any) -> float:
    """Rounds a number of a report, so that every run on the same samples writes the same digits."""
    return round(float(value), _DIGITS)


def interval(ends: Iterable[float]) -> list[float]:
    """Rounds the two ends of an interval for a report."""
    return [number(end) for end in ends]


def measured(
    names: Sequence[tuple[str, str]],
    scores: Float[np.ndarray, "n s"],
    ends: Float[np.ndarray, "s 2"],
) -> dict[str, Any]:
    """Returns the mean over problems and the interval of each column of scores.

    Args:
      names: for each column, the keys of its mean and of its interval.
      ends: ends of each column's interval.
    """
    entries: dict[str, Any] = {}
    for (mean_key, interval_key), value, pair in zip(names, scores.mean(0), ends, strict=True):
        entries[mean_key] = number(value)
        entries[interval_key] = interval(pair)
    return entries


# Numbers of rows (problem x samples + sample), and their settings. All settings of a part have the
# same decoding and budget; several settings differ in the cut.
Part = tuple[Int[np.ndarray, "rows"], Sequence[EvalSetting]]


@dataclass(frozen=True)
class EvalSampling:
    """Settings of sampling that all rows of an evaluation share.

    Attributes:
      environment: prompts, decoding rules and graders.
      key: PRNG key of the evaluation. A row's tokens depend on the key, its number and its budget.
      config: temperature and top-p of sampled answers, and the content of a budget tag.
      poll: called regularly; it may raise to stop.
      on_rows: called with the number of rows that were decoded since the last call.
    """

    environment: Environment
    key: jax.Array
    config: EvalConfig
    poll: Poll
    on_rows: Callable[[int], None]
