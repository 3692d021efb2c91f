"""Defines the settings, problems and answer records of an evaluation.

An evaluation is a list of settings, each a decoding mode and a budget. The rows of a setting (one
trace each) are ordered by problem and then by sample. Rows are sampled in batches whose composition
is fixed in advance. Therefore an evaluation that was interrupted and continued has the same results
as an uninterrupted one.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from bacr_jax.config import EvalConfig
from bacr_jax.config.derived import samples_of
from bacr_jax.prompts.task_data import TaskData
from bacr_jax.types import CLOSED_BY_BUDGET, CLOSED_BY_EOS, CLOSED_BY_TAG, NO_BUDGET, Poll

GREEDY, SAMPLED = "greedy", "sampled"
# Key in the results for an evaluation without a budget.
UNLIMITED = "none"
CLOSE_NAMES = {CLOSED_BY_BUDGET: "budget", CLOSED_BY_TAG: "tag", CLOSED_BY_EOS: "end of turn"}

# Set, decoding mode, budget, truncation point, problem id and index of a sample.
SampleKey = tuple[str, str, int, int | None, str, int]


@dataclass(frozen=True)
class EvalSetting:
    """A decoding mode, a budget and a truncation point.

    Results are averaged over the answers of one setting.

    Attributes:
      mode: `GREEDY` or `SAMPLED`.
      budget: thinking budget in tokens that the policy receives, or NO_BUDGET.
      samples: number of answers per problem.
      cut: number of thinking tokens after which the thinking is truncated to force an answer. None
        if the thinking ends naturally or at the budget. Settings that share their traces differ
        only in the cut. Their thinking is limited by the largest cut instead of the budget.
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
      id: id of the problem.
      mode: see `EvalSetting`.
      budget: see `EvalSetting`.
      cut: truncation point (see `EvalSetting`).
      sample: index of the answer, from 0 to samples - 1.
      level: difficulty level of the problem from 1 to 5, or 0 if unknown.
      subject: subject of the problem, or "" if unknown.
      text: text after the prompt: thinking, forced suffix and answer. If the thinking was truncated
        before the end of the trace, the text contains only the suffix and the answer, because the
        sample of the full trace contains the thinking.
      extracted: answer extracted by the grader, or None if the grader found no answer.
      gold: reference answer.
      correct: lenient verdict, or score.
      strict: strict verdict, as used in rewards, or the same score.
      path: grading rule that determined the verdict.
      timed_out: True if the grader timed out.
      thinking_tokens: number of sampled thinking tokens, without the closing tag.
      forced_tokens: number of tokens inserted between the thinking and the answer.
      answer_tokens: number of sampled answer tokens, including the closing tag.
      total_tokens: number of tokens after the prompt: the sum of the three counts above and the
        closing tag of the thinking.
      closed_by: reason why the thinking ended, one of `CLOSE_NAMES`. It is "budget" if the end was
        forced.
      finished: True if the answer ended with a closing tag or an end token.
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
        """Returns the key that identifies the sample in its evaluation."""
        return self.set, self.mode, self.budget, self.cut, self.id, self.sample


def subset(problems: int, size: int | None, seed: int) -> Int[np.ndarray, "n"]:
    """Returns the sorted indices of the problems to evaluate.

    Args:
      problems: number of problems in the set.
      size: number of problems to select at random, or None to select all.
      seed: random seed of the selection.
    """
    if size is None or size >= problems:
        return np.arange(problems)
    return np.sort(np.random.default_rng([seed, 7]).choice(problems, size, replace=False))


def evaluated_budgets(config: EvalConfig) -> list[int]:
    """Returns the budgets to evaluate. NO_BUDGET is last if `config.no_budget` is set."""
    return [*config.budgets, *([NO_BUDGET] if config.no_budget else [])]


def eval_settings(config: EvalConfig, spec: str = "", *, greedy: bool = True) -> list[EvalSetting]:
    """Returns the settings in the order of evaluation: greedy first, then by ascending budget.

    Args:
      config: evaluation settings.
      spec: entry of `data.eval`. Needed if `config.samples` has a number of samples for each set.
      greedy: False to omit the greedy settings.
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
    """Returns the key of a budget in the results: the number, or `UNLIMITED`."""
    return UNLIMITED if budget == NO_BUDGET else str(budget)


def budgets_by_mode(settings: Iterable[EvalSetting]) -> dict[str, list[int]]:
    """Returns the budgets of each decoding mode."""
    modes: dict[str, list[int]] = {}
    for setting in settings:
        modes.setdefault(setting.mode, []).append(setting.budget)
    return modes


def dense_cuts(budget: int, every: int) -> list[int]:
    """Returns the truncation points of a dense curve: multiples of `every`, and the budget.

    All numbers are thinking tokens.
    """
    return [*range(every, budget, every), budget]


def dense_settings(
    config: EvalConfig, spec: str = "", *, greedy: bool = True
) -> list[list[EvalSetting]]:
    """Returns the settings of the dense curve, or [] if `config.cut_every` is None.

    The dense curve is the accuracy at many truncation points of the same traces.

    Returns:
      A list of settings for each decoding mode, with one setting per truncation point. The traces
      are sampled with the largest budget.
    """
    if config.cut_every is None:
        return []
    largest = max(config.budgets)
    cuts = dense_cuts(largest, config.cut_every)
    return [
        [dataclasses.replace(setting, cut=cut) for cut in cuts]
        for setting in eval_settings(config, spec, greedy=greedy)
        if setting.budget == largest
    ]


def swap_budgets(budgets: Iterable[int]) -> list[int]:
    """Returns the budgets of the swap table: all positive budgets, in ascending order.

    The swap table contains every pair of a budget that the policy receives as input and a number of
    thinking tokens after which the thinking is truncated.
    """
    return sorted(budget for budget in budgets if budget > 0)


def swap_settings(config: EvalConfig, *, greedy: bool = True) -> list[list[EvalSetting]]:
    """Returns the settings of the swap table.

    The swap table contains every pair of a budget that the policy receives as input and a
    truncation point.

    Args:
      config: evaluation settings.
      greedy: False to omit the greedy settings.

    Returns:
      A list of settings for each decoding mode and input budget, with one setting per truncation
      point. The traces are sampled up to the largest budget.
    """
    budgets = swap_budgets(config.budgets)
    return [
        [dataclasses.replace(setting, cut=cut) for cut in budgets]
        for setting in eval_settings(config, greedy=greedy)
        if setting.budget in budgets
    ]


# Number of decimal digits in reports. Further digits depend on the order of summation.
_DIGITS = 10


@dataclass(frozen=True)
class Graded:
    """The samples of a setting (decoding mode and budget), as arrays [problems, samples].

    Attributes:
      budget: thinking budget in tokens that the policy received, or NO_BUDGET.
      ids: id of each problem.
      levels: difficulty level of each problem, 0 if unknown.
      subjects: subject of each problem, "" if unknown.
      correct: lenient verdicts, or scores in [0, 1] from a user's verifier.
      strict: strict verdicts, or the same scores.
      thinking: number of thinking tokens.
      total: number of thinking, forced and answer tokens.
      forced_tokens: number of tokens inserted between the thinking and the answer.
      answered: number of sampled answer tokens.
      forced: True if the thinking was ended by the budget.
      finished: True if the answer ended with a closing tag or an end token.
      timed_out: True if the grader timed out.
      answers: extracted answers by problem, with None for a missing answer.
      paths: number of verdicts by the name of the grading rule that determined them.
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
    """Converts the samples of a setting to arrays. The samples must be ordered by problem."""
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


def graded_sets(
    samples_by_set: Mapping[str, Mapping[EvalSetting, Sequence[Sample]]],
) -> dict[str, dict[EvalSetting, Graded]]:
    """Converts the samples of each set and setting to arrays."""
    return {
        name: {setting: graded(samples, setting) for setting, samples in by_setting.items()}
        for name, by_setting in samples_by_set.items()
    }


def number(value: Any) -> float:
    """Rounds a number for a report, so that equal samples always give equal reports."""
    return round(float(value), _DIGITS)


def interval(ends: Iterable[float]) -> list[float]:
    """Rounds both bounds of an interval for a report."""
    return [number(end) for end in ends]


# Names of means and of their confidence intervals in results.json.
ACCURACY_NAMES = ("accuracy", "ci95")
TOKENS_NAMES = (("mean_thinking_tokens", "thinking_ci95"), ("mean_total_tokens", "total_ci95"))


def measured(
    names: Sequence[tuple[str, str]],
    scores: Float[np.ndarray, "n s"],
    ends: Float[np.ndarray, "s 2"],
) -> dict[str, Any]:
    """Returns the mean over problems and the interval of each column of scores.

    Args:
      names: for each column, the keys of its mean and of its interval.
      scores: scores with shape [problems, columns].
      ends: lower and upper bound of the interval of each column.
    """
    entries: dict[str, Any] = {}
    for (mean_key, interval_key), value, pair in zip(names, scores.mean(0), ends, strict=True):
        entries[mean_key] = number(value)
        entries[interval_key] = interval(pair)
    return entries


# Row numbers (problem * samples + sample), and the settings of these rows. The settings have the
# same decoding mode and budget, and differ only in the truncation point (cut).
Part = tuple[Int[np.ndarray, "rows"], Sequence[EvalSetting]]


@dataclass(frozen=True)
class EvalSampling:
    """Sampling settings that all traces of an evaluation share.

    Attributes:
      task_data: prompts, decoding rules and graders.
      key: PRNG key of the evaluation. The tokens of a trace depend on this key, its row number and
        the budget.
      config: temperature and top-p of sampled answers, and the content of the budget tag.
      poll: called regularly. It may raise an exception to stop.
      on_rows: called with the number of traces that were decoded since the last call.
    """

    task_data: TaskData
    key: jax.Array
    config: EvalConfig
    poll: Poll
    on_rows: Callable[[int], None]
