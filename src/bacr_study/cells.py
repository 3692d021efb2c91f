"""Cells: what each finished run of a study found, a file each; and the grid of all of them.

`cells/ID.json` of a study's folder. Verdicts are kept per problem, because a test of two arms pairs
their problems; everything else are means.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from bacr_jax.documents import read_object, write_atomically
from bacr_jax.errors import UserError
from bacr_jax.evaluation.intervals import rate_intervals
from bacr_jax.evaluation.samples import GREEDY, SAMPLED
from bacr_study.spec import MEAN, Study, Value, Variant, cell_id, cell_path
from bacr_study.statistics import OVER_PROBLEMS, Estimate, crossed_test, mean_interval

# Digits of counts per problem: up to 35 samples.
_BASE = 36
_AGREE = 1e-4
# What is kept of every set, decoding and budget.
NUMBERS = (
    "accuracy",
    "mean_thinking_tokens",
    "mean_total_tokens",
    "forced_share",
    "no_answer_share",
)
# And of training as a whole.
COSTS = ("steps", "generated_tokens", "wall_seconds")
# What a curriculum's records hold of each difficulty group, and what metrics call it.
OF_GROUP = {
    "pass_rate": "curriculum/pass_rate",
    "mu": "curriculum/mu",
    "mean_budget": "budget/median",
    "weight": "curriculum/weight",
}


@dataclass(frozen=True)
class Cell:
    """One finished run, evaluated.

    Attributes:
      departures: where the run departs from its method's publication.
      steps: of training; 0: not trained.
      wall_seconds: of training; a shared warm-up counts in the run that made it.
      sets: by set, decoding and budget: accuracy, mean tokens, shares, and `correct`,
        a digit per problem (base 36) that says how many of its samples are right.
      samples: per problem, by decoding.
      problems_digest: of the problems' ids, by set.
      levels_of: a digit per problem, by set.
      curve: records of `step`, `tokens`, `seconds`, `reward` and `accuracy`, and from training
        `closed_answers`, `forced_share` and `entropy` (missing in older cells).
      schedule: records of `step` and `groups`; empty without a curriculum.
      evaluation: `Study.asked`; empty in cells made before it was kept.
    """

    id: str
    study_size: str
    task: str
    arm: str
    seed: int
    value: Value | None
    provenance: dict[str, Any]
    config_sha: str
    departures: list[str]
    steps: int
    generated_tokens: int
    wall_seconds: float
    sets: dict[str, dict[str, dict[str, dict[str, Any]]]]
    samples: dict[str, int]
    problems_digest: dict[str, str]
    levels_of: dict[str, str]
    curve: list[dict[str, Any]] = field(default_factory=list)
    schedule: list[dict[str, Any]] = field(default_factory=list)
    evaluation: dict[str, Any] = field(default_factory=dict)

    def entry(self, name: str, mode: str, budget: str) -> dict[str, Any] | None:
        """The numbers of a set, decoding and budget; None: not evaluated."""
        return self.sets.get(name, {}).get(mode, {}).get(budget)

    def rates(self, name: str, mode: str, budget: str) -> Float[np.ndarray, "n"] | None:
        """Share of each problem's samples that are right; None: not kept."""
        entry = self.entry(name, mode, budget)
        if entry is None or not entry.get("correct"):
            return None
        counts = [int(digit, _BASE) for digit in entry["correct"]]
        return np.array(counts, np.float64) / self.samples[mode]

    def levels(self, name: str) -> Int[np.ndarray, "n"] | None:
        """Level of each problem; None: not kept."""
        digits = self.levels_of.get(name)
        return np.array([int(c, _BASE) for c in digits]) if digits else None


def ids_digest(ids: Sequence[str]) -> str:
    """What `problems_digest` says of problems with these ids, in this order."""
    return hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()[:12]


def correct_digits(correct: Int[np.ndarray, "n"]) -> str:
    """How many samples of each problem are right, a digit each."""
    return "".join(np.base_repr(int(count), _BASE).lower() for count in correct)


def write_cell(folder: Path, cell: Cell) -> Path:
    """Writes a cell into a study's folder, in one step; UserError: it can't be written."""
    path = cell_path(folder, cell.id)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(vars(cell), allow_nan=False) + "\n")
    return path


def read_cell(path: Path) -> Cell:
    """Reads one cell; UserError: the file is damaged, lacks a field, or contradicts itself."""
    again = "remove it and run the study again"
    try:
        cell = Cell(**read_object(path))
        wrong = next(_contradictions(cell, path), None)
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror})") from None
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise UserError(f"{path}: is damaged, or no cell ({error}); {again}") from None
    if wrong is not None:
        raise UserError(f"{path}: {wrong}; {again}")
    return cell


def evaluated(cell: Cell, now: Mapping[str, Any]) -> dict[str, Any]:
    """How a cell was evaluated, in words of `now`; of an older one what its numbers tell of it."""
    if cell.evaluation or GREEDY not in cell.samples:
        # A vote's samples are another's.
        return cell.evaluation
    entries = [item for of in cell.sets.values() for by in of.values() for item in by.items()]
    problems = max((len(entry.get("correct") or "") for _, entry in entries), default=0)
    # A set may be smaller than the size.
    size = {"size": problems} if problems > (now["size"] or problems) else {}
    budgets = sorted({int(budget) for budget, _ in entries})
    return {"budgets": budgets, "samples": cell.samples.get(SAMPLED, 0), **size}


def _contradictions(cell: Cell, path: Path) -> Iterator[str]:
    """What would give wrong numbers without a word."""
    expected = cell_id(cell.task, Variant(cell.arm, cell.value), cell.seed)
    if cell.id != expected or path.stem != expected:
        yield f"found id {cell.id!r} of task, arm, value and seed {expected!r}"
    for name, modes in cell.sets.items():
        if name not in cell.problems_digest:
            yield f"problems_digest: found none of {name}"
        for mode, budgets in modes.items():
            for budget in budgets:
                for wrong in _of_entry(cell, name, mode, budget):
                    yield f"sets.{name}.{mode}.{budget}.{wrong}"


def _of_entry(cell: Cell, name: str, mode: str, budget: str) -> Iterator[str]:
    entry, levels = cell.sets[name][mode][budget], cell.levels(name)
    rates = cell.rates(name, mode, budget)
    for key in NUMBERS:
        value = entry.get(key)
        if not isinstance(value, int | float) or not np.isfinite(value):
            yield f"{key}: found {value!r}, which is no number"
    accuracy = entry["accuracy"]
    if not 0.0 <= accuracy <= 1.0:
        yield f"accuracy: found {accuracy}, which is no share"
    if rates is None:
        return
    if rates.max() > 1.0:
        yield "correct: found more right samples of a problem than there are"
    if levels is not None and len(levels) != len(rates):
        yield f"correct: found {len(rates)} problems, and {len(levels)} in levels_of"
    if abs(float(rates.mean()) - accuracy) > _AGREE:
        yield f"correct: found a mean of {rates.mean():.4f}, and accuracy {accuracy:.4f}"


def read_cells(folder: Path, study: Study) -> dict[str, Cell]:
    """The cells of a study that are in its folder, by id; those of other studies are left alone.

    UserError: cells that must not be compared: of several sizes of the study, or other problems.
    """
    paths = {id_: cell_path(folder, id_) for id_ in study.cell_ids()}
    cells = {id_: read_cell(path) for id_, path in paths.items() if path.exists()}
    if not cells:
        raise UserError(f"{folder / 'cells'}: found no finished run of study {study.name}")
    known: dict[tuple[str, str], Cell] = {}
    for cell in cells.values():
        if cell.study_size != study.size:
            raise UserError(
                f"{folder / 'cells'}: found {cell.id} of size {cell.study_size!r} in a study of "
                f"size {study.size!r}; give every size a folder of its own"
            )
        for name in cell.sets:
            first = known.setdefault((cell.task, name), cell)
            # Cells of a task must have the same problems, level by level.
            problems, others = (
                (one.problems_digest[name], one.levels_of.get(name)) for one in (cell, first)
            )
            if problems != others:
                raise UserError(
                    f"{folder / 'cells'}: {cell.id} has other problems of {name} than {first.id}; "
                    "run one of them again with the same data"
                )
    return cells


@dataclass(frozen=True)
class Setting:
    """What is measured, of whichever arm.

    Attributes:
      budget: key of a budget, or `MEAN`.
      level: only problems of this level; None: all.
      mode: decoding; tables and figures show that by default.
    """

    task: str
    set: str
    budget: str
    level: int | None = None
    mode: str = SAMPLED


@dataclass(frozen=True)
class Grid:
    """The cells that there are."""

    study: Study
    cells: Mapping[str, Cell]

    def of(self, task: str, variant: Variant) -> list[Cell]:
        """The cells of a task and a variant, by seed."""
        ids = (cell_id(task, variant, seed) for seed in self.study.seeds)
        return [self.cells[id_] for id_ in ids if id_ in self.cells]

    def variants(self, task: str) -> list[Variant]:
        """Variants with at least one cell, in order."""
        return [variant for variant in self.study.variants() if self.of(task, variant)]

    def keys(self, where: Setting) -> list[str]:
        """Keys of the budgets that a setting stands for."""
        mean = where.budget == MEAN
        return list(map(str, self.study.task(where.task).budgets)) if mean else [where.budget]

    def entries(self, cell: Cell, where: Setting) -> list[dict[str, Any]] | None:
        """A cell's numbers at a budget, or at all budgets for `MEAN`; None: one is missing."""
        found = [cell.entry(where.set, where.mode, key) for key in self.keys(where)]
        return [entry for entry in found if entry is not None] if all(found) else None

    def rates(self, cell: Cell, where: Setting) -> Float[np.ndarray, "n"] | None:
        """Share of right samples of each problem, or [accuracy] where verdicts are not kept.

        Those of the setting's level alone; None: not known.
        """
        entries, levels = self.entries(cell, where), cell.levels(where.set)
        if entries is None:
            return None
        rates = [cell.rates(where.set, where.mode, key) for key in self.keys(where)]
        known = [one for one in rates if one is not None]
        if where.level is not None:
            kept = len(known) == len(rates) and levels is not None
            return np.mean(known, axis=0)[levels == where.level] if kept else None
        if len(known) < len(rates):
            return np.array([np.mean([entry["accuracy"] for entry in entries])])
        return np.mean(known, axis=0)

    def table(self, variant: Variant, where: Setting) -> dict[int, Float[np.ndarray, "n"]]:
        """`rates` by seed, of seeds that have any."""
        found = {cell.seed: self.rates(cell, where) for cell in self.of(where.task, variant)}
        return {seed: rates for seed, rates in found.items() if rates is not None and rates.size}

    def difference(self, of: Variant, less: Variant, where: Setting) -> dict[str, Any] | None:
        """`contrast` of two variants in one setting."""
        return self.contrast([(of, where, 1.0), (less, where, -1.0)])

    def contrast(self, terms: Sequence[tuple[Variant, Setting, float]]) -> dict[str, Any] | None:
        """`Contrast` of a weighted sum of accuracies on the same seeds and problems.

        It is of the seeds that all variants have; None: there are none, or too few. `terms`:
        variant, where, and weight of each accuracy; weights sum to 0.
        """
        tables = [self.table(variant, where) for variant, where, _ in terms]
        seeds = [s for s in self.study.seeds if all(s in table for table in tables)]
        if not seeds:
            return None
        alike = len({len(table[seed]) for table in tables for seed in seeds}) == 1
        of = lambda rates: rates if alike else rates.mean(keepdims=True)
        stacked = (np.stack([of(table[seed]) for seed in seeds]) for table in tables)
        weighted = (weight * rows for (*_, weight), rows in zip(terms, stacked))
        contrast = crossed_test(sum(weighted, np.zeros(())))
        return None if contrast is None else asdict(contrast)

    def estimate(self, variant: Variant, where: Setting, key: str) -> Estimate | None:
        """Mean over seeds of a number, with its interval.

        Where there is one seed, or seeds do not vary, the interval of an accuracy is that over
        problems. None: no cell has the number.
        """
        found = [self.entries(cell, where) for cell in self.of(where.task, variant)]
        values = [float(np.mean([entry[key] for entry in entries])) for entries in found if entries]
        if not values:
            return None
        estimate = mean_interval(values)
        if key != "accuracy" or np.ptp(values) > 0 or where.mode != SAMPLED:
            return estimate
        rows = list(self.table(variant, where).values())
        if not rows or rows[0].size < 2:
            return estimate
        low, high = map(float, rate_intervals(np.mean(rows, axis=0)[:, None])[0])
        return replace(estimate, low=low, high=high, basis=OVER_PROBLEMS)
