"""What an evaluation is made of: its settings, its problems, and one record per answer.

An evaluation is a list of settings (a decoding and a budget). The rows of a setting, problem by
problem and sample by sample, are drawn in batches whose composition is fixed beforehand, so that an
evaluation that was interrupted and continued gives what an uninterrupted one gives.
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
# What results call an evaluation without a budget.
UNLIMITED = "none"
CLOSE_NAMES = {CLOSED_BY_BUDGET: "budget", CLOSED_BY_TAG: "tag", CLOSED_BY_EOS: "end of turn"}

# Set, mode, budget, cut, problem and number of a sample.
SampleKey = tuple[str, str, int, int | None, str, int]


@dataclass(frozen=True)
class EvalSetting:
    """Answers that are averaged together.

    Attributes:
      cut: thinking tokens kept of traces that were told the budget; None: they end by themselves or
        at the budget.
    """

    mode: str
    budget: int
    samples: int
    cut: int | None = None


@dataclass(frozen=True)
class Sample:
    """One answer to one problem, with its verdicts.

    Attributes:
      budget: thinking tokens allowed, which the policy is told.
      sample: number of the answer, 0 .. samples - 1.
      level: of the problem, 1 .. 5; 0: unknown.
      text: everything after the prompt: thinking, forced suffix, answer; without the thinking where
        it was cut early, since the trace as a whole has it.
      correct: lenient verdict, or score.
      strict: strict verdict, the one that rewards use; the same score.
      path: what decided the verdict.
      thinking_tokens: sampled thinking, without a closing tag.
      forced_tokens: tokens put between thinking and answer.
      answer_tokens: sampled answer, its closing tag included.
      total_tokens: everything after the prompt: the three, and the closing tag of the thinking.
      closed_by: what ended the thinking, of `CLOSE_NAMES`; "budget": it was forced.
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
        """What the sample answers."""
        return self.set, self.mode, self.budget, self.cut, self.id, self.sample


def subset(problems: int, size: int | None, seed: int) -> Int[np.ndarray, "n"]:
    """Places of the problems evaluated: all, or a fixed random subset in their order."""
    if size is None or size >= problems:
        return np.arange(problems)
    return np.sort(np.random.default_rng([seed, 7]).choice(problems, size, replace=False))


def told_budgets(config: EvalConfig) -> list[int]:
    """Budgets the policy is told, one after the other; NO_BUDGET last if it is also told none."""
    return [*config.budgets, *([NO_BUDGET] if config.no_budget else [])]


def eval_settings(config: EvalConfig, spec: str = "", *, greedy: bool = True) -> list[EvalSetting]:
    """Settings in the order in which they are evaluated: greedy ones first, budgets rising.

    Args:
      spec: the set of data.eval that is asked, where `config.samples` is not one number.
    """
    budgets, samples = told_budgets(config), samples_of(config, spec)
    settings = [EvalSetting(GREEDY, budget, 1) for budget in budgets] if greedy else []
    if samples:
        settings += [EvalSetting(SAMPLED, budget, samples) for budget in budgets]
    return settings


def budget_key(budget: int) -> str:
    """What results call a budget."""
    return UNLIMITED if budget == NO_BUDGET else str(budget)


def dense_cuts(budget: int, every: int) -> list[int]:
    """Multiples of `every` below the budget, and the budget."""
    return [*range(every, budget, every), budget]


def dense_settings(
    config: EvalConfig, spec: str = "", *, greedy: bool = True
) -> list[list[EvalSetting]]:
    """Settings of the dense curve, those that one trace serves together; none without one."""
    if config.dense is None:
        return []
    largest = max(config.budgets)
    told = [s for s in eval_settings(config, spec, greedy=greedy) if s.budget == largest]
    cuts = dense_cuts(largest, config.dense)
    return [[dataclasses.replace(setting, cut=cut) for cut in cuts] for setting in told]


# Beyond these digits, sums depend on the order in which a machine takes them.
_DIGITS = 10


@dataclass(frozen=True)
class Graded:
    """The samples of a setting, problems by samples.

    Attributes:
      budget: thinking tokens that the policy was told; NO_BUDGET: none.
      correct: lenient verdicts; scores in [0, 1] where a verifier of one's own gave them.
      total: thinking, forced and answer tokens.
      forced: the budget ended the thinking.
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


def interval(ends: Iterable[float]) -> list[float]:
    """Two of them."""
    return [number(end) for end in ends]


def measured(
    names: Sequence[tuple[str, str]],
    scores: Float[np.ndarray, "n s"],
    ends: Float[np.ndarray, "s 2"],
) -> dict[str, Any]:
    """Means over problems and their intervals, by the names of both for each column of scores."""
    found: dict[str, Any] = {}
    for (mean, its_interval), value, pair in zip(names, scores.mean(0), ends, strict=True):
        found |= {mean: number(value), its_interval: interval(pair)}
    return found


# Row numbers, and what is asked of their traces: one decoding and budget; with several settings the
# traces are cut at several places.
Part = tuple[Int[np.ndarray, "rows"], Sequence[EvalSetting]]


@dataclass(frozen=True)
class Drawing:
    """How an evaluation's answers are drawn, whatever is asked.

    Attributes:
      key: of the evaluation; what a row says depends on it, its number and its budget.
      config: temperature and nucleus of sampled answers, and what a budget tag holds.
    """

    environment: Environment
    key: jax.Array
    config: EvalConfig
    poll: Poll
    on_rows: Callable[[int], None]
