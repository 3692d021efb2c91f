"""Whether a study that was run again says what it said before, from two results.json."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy.special import stdtr, stdtrit

from bacr_jax.errors import UserError
from bacr_jax.runs.files import write_atomically
from bacr_jax.study.info import MEAN, StudyInfo, Task, Variant, study_of
from bacr_jax.study.items import (
    Results,
    accuracy_item,
    budget_heading,
    estimate_of,
    p_text,
    row_name,
    signed,
)
from bacr_jax.study.statistics import Estimate, holm
from bacr_jax.study.typeset import Item, Shown, StudyTable

_LEVEL = 0.05


@dataclass(frozen=True)
class Pair:
    """One accuracy of the study's main table, before and now.

    Attributes:
      task: of the study.
      variant: arm and value.
      budget: key of results.json.
      before: over the seeds of then.
      now: over the seeds of now.
    """

    task: Task
    variant: Variant
    budget: str
    before: Estimate
    now: Estimate

    @property
    def difference(self) -> float:
        """Now less before."""
        return self.now.mean - self.before.mean

    @property
    def within(self) -> bool:
        """Whether the mean of now lies in the 95 % interval of then, ends included."""
        low, high = self.before.low, self.before.high
        if low is None or high is None:
            return self.difference == 0
        return low <= self.now.mean <= high


def squared_error(estimate: Estimate) -> float:
    """s^2 / S of a mean over S seeds, read off its 95 % t interval; one seed: not a number."""
    if estimate.low is None or estimate.high is None:
        return math.nan
    half = (estimate.high - estimate.low) / 2
    return float(half / stdtrit(estimate.seeds - 1, 0.975)) ** 2


def welch(first: Estimate, second: Estimate) -> float:
    """Two-sided p of equal means of two samples of unequal variance (Welch 1947).

    With e = s^2 / S of each sample and their means m:

        t = (m_1 - m_2) / sqrt(e_1 + e_2)
        df = (e_1 + e_2)^2 / (e_1^2 / (S_1 - 1) + e_2^2 / (S_2 - 1))

    Args:
      first: a mean over seeds.
      second: another, of other runs.

    Returns:
      p; not a number where one of them has one seed. Samples without any spread have 1 if their
      means are equal, and 0 if not.
    """
    errors = squared_error(first), squared_error(second)
    total = sum(errors)
    difference = abs(first.mean - second.mean)
    if math.isnan(total):
        return math.nan
    if total == 0:
        return 1.0 if difference == 0 else 0.0
    parts = (e**2 / (estimate.seeds - 1) for e, estimate in zip(errors, (first, second)))
    df = total**2 / sum(parts)
    return min(2 * float(stdtr(df, -difference / math.sqrt(total))), 1.0)


def pairs(before: Results, now: Results) -> list[Pair]:
    """Every accuracy that both have, at each budget and on average over them.

    Args:
      before: results.json of the earlier runs.
      now: of the later ones.

    Raises:
      UserError: they have nothing in common.
    """
    then, study = study_of(before["study"]), study_of(now["study"])
    found = list(_pairs(before, now, then, study))
    if not found:
        raise UserError(f"--against: no accuracy of study {study.name} is in both results.json")
    return found


def _pairs(before: Results, now: Results, then: StudyInfo, study: StudyInfo) -> Iterator[Pair]:
    earlier = {task.id: task for task in then.tasks}
    arms = {arm.id for arm in then.arms}
    for task in study.tasks:
        for variant in study.variants():
            if task.id not in earlier or variant.arm not in arms:
                continue
            for budget in (*map(str, task.budgets), MEAN):
                old = estimate_of(before, then, earlier[task.id], task.main, variant, budget)
                new = estimate_of(now, study, task, task.main, variant, budget)
                if old is not None and new is not None:
                    both = (Estimate(**entry["accuracy"]) for entry in (old, new))
                    yield Pair(task, variant, budget, *both)


def summary(found: Sequence[Pair]) -> str:
    """Some lines: how many means lie in the earlier intervals, and how many differ."""
    within = sum(pair.within for pair in found)
    apart = [pair for pair, p in zip(found, _adjusted(found)) if p < _LEVEL]
    furthest = max(found, key=lambda pair: abs(pair.difference))
    lines = [
        f"{within} of {len(found)} means lie in the 95 % intervals of before (other seeds alone "
        f"would leave {100 * expected_share(found):.0f} % there, since the new mean varies, too)",
        f"{len(apart)} of {len(found)} differ (Welch's test, Holm p < .05)",
        f"furthest apart: {_place(furthest)}, {signed(100 * furthest.difference)} points",
    ]
    lines += [f"differs: {_place(p)}, {signed(100 * p.difference)} points" for p in apart]
    return "\n".join(lines)


def expected_share(found: Sequence[Pair]) -> float:
    """The share of means within the earlier intervals if only chance differs: P(|T| < t / sqrt(2)).

    The new mean varies as the old one does, so that their difference over the old error is sqrt(2)
    times a t variable of S - 1 degrees of freedom. Pairs of one seed are left out.
    """
    degrees = [pair.before.seeds - 1 for pair in found if pair.before.seeds > 1]
    shares = [1 - 2 * float(stdtr(df, -stdtrit(df, 0.975) / math.sqrt(2))) for df in degrees]
    return sum(shares) / len(shares) if shares else math.nan


def _adjusted(found: Sequence[Pair]) -> list[float]:
    """Holm's p of each pair; 1 where none can be told."""
    values = [welch(pair.before, pair.now) for pair in found]
    return holm([1.0 if math.isnan(p) else p for p in values])


def _place(pair: Pair) -> str:
    return f"{pair.task.id}, {pair.variant.key}, {budget_heading(pair.budget)}"


def table(study: StudyInfo, found: Sequence[Pair]) -> StudyTable:
    """Before and now of every accuracy.

    Args:
      study: of now, for the names of its arms.
      found: `pairs`.
    """
    rows: list[list[Item]] = []
    for pair, adjusted in zip(found, _adjusted(found)):
        p = welch(pair.before, pair.now)
        known = not math.isnan(p)
        rows.append(
            [
                row_name(study, pair.variant),
                pair.task.label,
                budget_heading(pair.budget),
                accuracy_item(vars(pair.before)),
                accuracy_item(vars(pair.now)),
                Shown(signed(100 * pair.difference), (100 * pair.difference,)),
                "yes" if pair.within else "no",
                Shown(p_text(p), (p,)) if known else "-",
                Shown(p_text(adjusted), (adjusted,)) if known else "-",
            ]
        )
    header = ["method", "task", "budget", "before", "now", "points", "within", "p", "Holm p"]
    return StudyTable(
        name="reproduction",
        title="The same study, run again",
        header=header,
        rows=rows,
        words=3,
        caption=(
            "Accuracy in %, mean ± half the 95 % t interval over seeds. Within: the mean of now "
            "lies in the interval of before. p: Welch's test over seeds, which does not pair them."
        ),
    )


def write(folder: Path, before: Results) -> tuple[list[Path], str]:
    """Compares the results.json of a study's folder with an earlier one.

    Args:
      folder: of the study, with results.json and `tables/`.
      before: the earlier one.

    Returns:
      The files written, and what they say in short.

    Raises:
      UserError: see `pairs`.
    """
    now = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    found = pairs(before, now)
    made = table(study_of(now["study"]), found)
    texts = {"md": made.markdown(), "tex": made.latex(), "csv": made.csv()}
    files = [folder / "tables" / f"{made.name}.{ending}" for ending in texts]
    for file, text in zip(files, texts.values()):
        write_atomically(file, text)
    return files, summary(found)


def read_earlier(path: Path, name: str, size: str) -> dict[str, Any]:
    """The results.json of an earlier run of a study.

    Args:
      path: where it is.
      name: of the study.
      size: of the study.

    Raises:
      UserError: there is none, or it is something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(
            f"--against {path}: can't be read ({error}); write a results.json"
        ) from None
    study = found.get("study") if isinstance(found, dict) else None
    if not isinstance(study, dict) or "means" not in found:
        raise UserError(f"--against {path}: holds no study's means; write a study's results.json")
    if (study.get("name"), study.get("size")) != (name, size):
        raise UserError(
            f"--against {path}: is of study {study.get('name')}, size {study.get('size')}; write "
            f"one of {name}, size {size}"
        )
    return dict(found)
