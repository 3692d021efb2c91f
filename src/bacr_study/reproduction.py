"""Whether a study that was run again says what it said before, from two results.json."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy.special import nctdtrinc, stdtr, stdtrit

from bacr_jax.documents import parse_json, read_file, read_object
from bacr_jax.errors import UserError
from bacr_jax.report.table import NONE, Item, Shown, Table, budget_name
from bacr_study.archive import read_compressed
from bacr_study.items import Results, accuracy_item, estimate_of, p_item, row_name, signed
from bacr_study.spec import MEAN, Study, Task, Variant
from bacr_study.statistics import OVER_SEEDS, Estimate, holm, two_sided
from bacr_study.tables import write_table

_LEVEL = 0.05
# Of a test that is to notice a difference.
_POWER = 0.8


@dataclass(frozen=True)
class Pair:
    """One accuracy of the study's main table, before and now."""

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

    def __str__(self) -> str:
        """Where it stands, and how far apart the two are."""
        place = f"{self.task.id}, {self.variant.key}, {budget_name(self.budget)}"
        return f"{place}, {signed(100 * self.difference)} points"


def welch(first: Estimate, second: Estimate) -> float:
    """Two-sided p of equal means of two samples of unequal variance (Welch 1947).

    With e = s^2 / S of each sample and their means m:

        t = (m_1 - m_2) / sqrt(e_1 + e_2)
        df = (e_1 + e_2)^2 / (e_1^2 / (S_1 - 1) + e_2^2 / (S_2 - 1))

    Not a number where one of them has one seed. Samples without any spread have 1 if their means
    are equal, and 0 if not.
    """
    return two_sided(first.mean - second.mean, *_error(first, second))


def _error(first: Estimate, second: Estimate) -> tuple[float, float]:
    """Standard error of the difference of two means, and Welch's degrees of freedom.

    From their 95 % t intervals; not numbers where one has one seed. Seeds that do not vary have one
    over problems instead.
    """
    errors = []
    for one in (first, second):
        if one.seeds < 2 or one.low is None or one.high is None:
            return math.nan, math.nan
        half = (one.high - one.low) / 2 if one.basis == OVER_SEEDS else 0.0
        errors.append(float(half / stdtrit(one.seeds - 1, 0.975)) ** 2)
    total = sum(errors)
    if total == 0:
        return 0.0, math.nan
    parts = (e**2 / (one.seeds - 1) for e, one in zip(errors, (first, second)))
    return math.sqrt(total), total**2 / sum(parts)


def detectable(first: Estimate, second: Estimate, *, level: float = _LEVEL) -> float:
    """The least true difference of two means that `welch` finds with 80 % power.

    With the error and the df of `welch`, and T' a noncentral t variable, it is the d with

        P(T'(df, d / error) > t_{1 - level / 2, df}) = .8

    Exact for samples of one variance and as many seeds each, if that variance is the one found; the
    other tail adds less than 1e-5. It is 0 for samples without any spread, and not a number where
    one of them has one seed.
    """
    error, df = _error(first, second)
    if error == 0:
        return 0.0
    return error * float(nctdtrinc(df, 1 - _POWER, stdtrit(df, 1 - level / 2)))


def pairs(before: Results, now: Results, study: Study) -> list[Pair]:
    """Every accuracy that both have, at each budget and on average over them."""
    found = list[Pair]()
    for task in study.tasks:
        for variant in study.variants():
            for budget in (*map(str, task.budgets), MEAN):
                old = estimate_of(before, task, task.main, variant, budget)
                new = estimate_of(now, task, task.main, variant, budget)
                if old is not None and new is not None:
                    both = (Estimate(**entry) for entry in (old, new))
                    found.append(Pair(task, variant, budget, *both))
    if not found:
        raise UserError(f"--against: no accuracy of study {study.name} is in both results.json")
    return found


def _tests(found: Sequence[Pair]) -> list[tuple[float, float, float, float]]:
    """Of each pair: p and Holm's p, and `detectable` by one test and by the strictest of Holm's.

    Holm's is 1 where none can be told.
    """
    values = [welch(pair.before, pair.now) for pair in found]
    adjusted = holm([1.0 if math.isnan(p) else p for p in values])
    least = (
        [detectable(one.before, one.now, level=level) for one in found]
        for level in (_LEVEL, _LEVEL / len(found))
    )
    return list(zip(values, adjusted, *least))


def summary(found: Sequence[Pair]) -> str:
    """Some lines: how many means are within, how many differ, and what could have been seen."""
    within, tests = sum(pair.within for pair in found), _tests(found)
    apart = [pair for pair, (_, adjusted, *_) in zip(found, tests) if adjusted < _LEVEL]
    furthest = max(found, key=lambda pair: abs(pair.difference))
    lines = [
        f"{within} of {len(found)} means lie in the 95 % intervals of before (other seeds alone "
        f"would leave {100 * expected_share(found):.0f} % there, since the new mean varies, too)",
        f"{len(apart)} of {len(found)} differ (Welch's test, Holm p < .05)",
        f"furthest apart: {furthest}",
        _power_text([least for _, _, *least in tests if not math.isnan(sum(least))]),
        *(f"differs: {pair}" for pair in apart),
    ]
    return "\n".join(lines)


def _power_text(least: Sequence[Sequence[float]]) -> str:
    """How large a true difference must be to be seen."""
    if not least:
        return "least detectable difference: unknown, since one seed has no spread"
    (median, largest), (corrected, most) = (
        (_points(statistics.median(column)), _points(max(column))) for column in zip(*least)
    )
    return (
        f"least detectable difference (80 % power, over all pairs): median {median}, largest "
        f"{largest} points by one test at 5 %; median {corrected}, largest {most} at Holm's "
        "strictest level. Smaller ones may be there unseen"
    )


def _points(difference: float) -> str:
    """In points, of which there are a hundred."""
    return f"{100 * difference:.1f}" if difference <= 1 else "over 100"


def expected_share(found: Sequence[Pair]) -> float:
    """The share of means within the earlier intervals if only chance differs: P(|T| < t / sqrt(2)).

    The new mean varies as the old one does, so that their difference over the old error is sqrt(2)
    times a t variable of S - 1 degrees of freedom. Pairs of one seed are left out.
    """
    degrees = [pair.before.seeds - 1 for pair in found if pair.before.seeds > 1]
    shares = [1 - 2 * float(stdtr(df, -stdtrit(df, 0.975) / math.sqrt(2))) for df in degrees]
    return sum(shares) / len(shares) if shares else math.nan


def table(study: Study, found: Sequence[Pair]) -> Table:
    """Before and now of every accuracy."""
    rows: list[list[Item]] = []
    shown = lambda least: NONE if math.isnan(least) else Shown(_points(least), (100 * least,))
    for pair, (p, adjusted, *least) in zip(found, _tests(found)):
        known = not math.isnan(p)
        rows.append(
            [
                row_name(study, pair.variant),
                pair.task.label,
                budget_name(pair.budget),
                accuracy_item(vars(pair.before)),
                accuracy_item(vars(pair.now)),
                Shown(signed(100 * pair.difference), (100 * pair.difference,)),
                "yes" if pair.within else "no",
                p_item(p) if known else NONE,
                p_item(adjusted) if known else NONE,
                *map(shown, least),
            ]
        )
    header = ["method", "task", "budget", "before", "now", "points", "within", "p", "Holm p"]
    header += ["detectable", "detectable, Holm"]
    return Table(
        title="The same study, run again",
        header=header,
        rows=rows,
        words=3,
        caption="Accuracy in %, mean ± half the 95 % t interval over seeds. Within: the mean of "
        "now lies in the interval of before. p: Welch's test over seeds, which does not pair them. "
        "Detectable: the least true difference, in points, that this test finds with 80 % "
        "power at 5 %, and at the strictest of Holm's levels (noncentral t, for the spreads "
        "that were found).",
        name="reproduction",
    )


def write(folder: Path, before: Results, study: Study) -> tuple[list[Path], str]:
    """Compares the results.json of a study's folder with an earlier one."""
    now = read_object(folder / "results.json")
    found = pairs(before, now, study)
    return write_table(folder / "tables", table(study, found)), summary(found)


def read_earlier(path: Path, name: str, size: str) -> dict[str, Any]:
    """The results.json, or results.json.xz, of an earlier run of a study."""
    try:
        compressed = path.suffix == ".xz"
        found = parse_json(read_compressed(path) if compressed else read_file(path))
    except (OSError, ValueError) as error:
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
