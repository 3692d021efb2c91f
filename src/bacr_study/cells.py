"""Reads and writes cells, the numbers of finished runs, and compares them in a grid.

A study's folder has one file `cells/ID.json` for each cell. A cell keeps verdicts per problem,
because a test of two arms pairs their problems; all other numbers are means.
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

# Base of the digits that store counts per problem: up to 35 samples.
_BASE = 36
# Largest difference between a cell's accuracy and the mean of its verdicts.
_AGREE = 1e-4
# Numbers of every set, decoding and budget.
NUMBERS = (
    "accuracy",
    "mean_thinking_tokens",
    "mean_total_tokens",
    "forced_share",
    "no_answer_share",
)
# Numbers of the whole training.
COSTS = (
    "steps",
    "generated_tokens",
    "wall_seconds",
)
# Numbers of each difficulty group in a curriculum's records, and the metrics that they come from.
OF_GROUP = {
    "pass_rate": "curriculum/pass_rate",
    "mu": "curriculum/mu",
    "mean_budget": "budget/median",
    "weight": "curriculum/weight",
}


@dataclass(frozen=True)
class Cell:
    """The numbers of one finished and evaluated run.

    Attributes:
      departures: settings that differ from those of the method's publication.
      steps: training steps; 0: not trained.
      wall_seconds: seconds of training. A shared warm-up counts in the run that made it.
      sets: by evaluation set, decoding and budget: accuracy, mean tokens, shares, and `correct`,
        which has a digit (base 36) for each problem: the number of its right samples.
      samples: samples per problem, by decoding.
      problems_digest: digest of the problems' ids, by evaluation set.
      levels_of: a digit for each problem, its level, by evaluation set.
      curve: records of `step`, `tokens`, `seconds`, `reward` and `accuracy`, and from training
        `closed_answers`, `forced_share` and `entropy` (missing in older cells).
      schedule: records of `step` and `groups`; empty without a curriculum.
      evaluation: `Study.asked`; empty in older cells.
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
        """Returns the numbers of a set, decoding and budget; None if not evaluated."""
        by_mode = self.sets.get(name, {})
        by_budget = by_mode.get(mode, {})
        return by_budget.get(budget)

    def rates(self, name: str, mode: str, budget: str) -> Float[np.ndarray, "n"] | None:
        """Returns the share of right samples of each problem; None if not stored."""
        entry = self.entry(name, mode, budget)
        if entry is None or not entry.get("correct"):
            return None
        counts = [int(digit, _BASE) for digit in entry["correct"]]
        return np.array(counts, np.float64) / self.samples[mode]

    def levels(self, name: str) -> Int[np.ndarray, "n"] | None:
        """Returns the level of each problem of a set; None if not stored."""
        digits = self.levels_of.get(name)
        if not digits:
            return None
        return np.array([int(digit, _BASE) for digit in digits])


def ids_digest(ids: Sequence[str]) -> str:
    """Returns a digest of problem ids in their order, as `problems_digest` stores it."""
    text = json.dumps(list(ids))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def correct_digits(correct: Int[np.ndarray, "n"]) -> str:
    """Returns the number of right samples of each problem as one digit (base 36) each."""
    digits = [np.base_repr(int(count), _BASE) for count in correct]
    return "".join(digits).lower()


def write_cell(folder: Path, cell: Cell) -> Path:
    """Writes a cell into a study's folder; returns the path.

    Raises:
      UserError: if the file cannot be written.
    """
    path = cell_path(folder, cell.id)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(vars(cell), allow_nan=False)
    write_atomically(path, text + "\n")
    return path


def read_cell(path: Path) -> Cell:
    """Reads one cell.

    Raises:
      UserError: if the file is damaged, lacks a field or contradicts itself.
    """
    advice = "remove it and run the study again"
    try:
        cell = Cell(**read_object(path))
        contradiction = next(_contradictions(cell, path), None)
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror})") from None
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise UserError(f"{path}: is damaged, or no cell ({error}); {advice}") from None
    if contradiction is not None:
        raise UserError(f"{path}: {contradiction}; {advice}")
    return cell


def evaluated(cell: Cell, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that a cell was evaluated with, as far as they are known.

    Older cells do not store them; then budgets, samples and size follow from the numbers.

    Args:
      wanted: `Study.asked` of the cell's arm. The size is left out unless the cell has more
        problems than wanted, because a set may have fewer problems than the size.
    """
    # The cell of a vote has samples of another arm, so its numbers do not show its settings.
    if cell.evaluation or GREEDY not in cell.samples:
        return cell.evaluation
    budgets = set()
    problems = 0
    for by_mode in cell.sets.values():
        for by_budget in by_mode.values():
            for budget, entry in by_budget.items():
                budgets.add(int(budget))
                problems = max(problems, len(entry.get("correct") or ""))
    settings: dict[str, Any] = {
        "budgets": sorted(budgets),
        "samples": cell.samples.get(SAMPLED, 0),
    }
    if problems > (wanted["size"] or problems):
        settings["size"] = problems
    return settings


def _contradictions(cell: Cell, path: Path) -> Iterator[str]:
    """Yields what is inconsistent in a cell, because such a cell would give wrong numbers."""
    variant = Variant(cell.arm, cell.value)
    expected = cell_id(cell.task, variant, cell.seed)
    if cell.id != expected or path.stem != expected:
        yield f"found id {cell.id!r} of task, arm, value and seed {expected!r}"
    for name, by_mode in cell.sets.items():
        if name not in cell.problems_digest:
            yield f"problems_digest: found none of {name}"
        for mode, by_budget in by_mode.items():
            for budget in by_budget:
                for problem in _entry_contradictions(cell, name, mode, budget):
                    yield f"sets.{name}.{mode}.{budget}.{problem}"


def _entry_contradictions(cell: Cell, name: str, mode: str, budget: str) -> Iterator[str]:
    """Yields what is inconsistent in the numbers of one set, decoding and budget."""
    entry = cell.sets[name][mode][budget]
    levels = cell.levels(name)
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
    mean = float(rates.mean())
    if abs(mean - accuracy) > _AGREE:
        yield f"correct: found a mean of {mean:.4f}, and accuracy {accuracy:.4f}"


def read_cells(folder: Path, study: Study) -> dict[str, Cell]:
    """Reads the existing cells of a study, by id; cells of other studies are not read.

    Raises:
      UserError: if no cell exists, or if cells must not be compared because they are of several
        sizes of the study or of different problems.
    """
    cells: dict[str, Cell] = {}
    for id_ in study.cell_ids():
        path = cell_path(folder, id_)
        if path.exists():
            cells[id_] = read_cell(path)
    if not cells:
        raise UserError(f"{folder / 'cells'}: found no finished run of study {study.name}")
    first_cells: dict[tuple[str, str], Cell] = {}
    for cell in cells.values():
        if cell.study_size != study.size:
            raise UserError(
                f"{folder / 'cells'}: found {cell.id} of size {cell.study_size!r} in a study of "
                f"size {study.size!r}; give every size a folder of its own"
            )
        for name in cell.sets:
            first = first_cells.setdefault((cell.task, name), cell)
            same_ids = cell.problems_digest[name] == first.problems_digest[name]
            same_levels = cell.levels_of.get(name) == first.levels_of.get(name)
            if not same_ids or not same_levels:
                raise UserError(
                    f"{folder / 'cells'}: {cell.id} has other problems of {name} than {first.id}; "
                    "run one of them again with the same data"
                )
    return cells


@dataclass(frozen=True)
class Setting:
    """The conditions of a measurement, without the arm.

    Attributes:
      budget: key of a budget, or `MEAN` for the mean over the task's budgets.
      level: only problems of this level; None: all problems.
      mode: decoding. Tables and figures show sampled answers by default.
    """

    task: str
    set: str
    budget: str
    level: int | None = None
    mode: str = SAMPLED


@dataclass(frozen=True)
class Grid:
    """The existing cells of a study, with means and tests over them."""

    study: Study
    cells: Mapping[str, Cell]

    def of(self, task: str, variant: Variant) -> list[Cell]:
        """Returns the cells of a task and a variant, in the order of the seeds."""
        ids = [cell_id(task, variant, seed) for seed in self.study.seeds]
        return [self.cells[id_] for id_ in ids if id_ in self.cells]

    def variants(self, task: str) -> list[Variant]:
        """Returns the variants that have at least one cell of a task."""
        return [variant for variant in self.study.variants() if self.of(task, variant)]

    def keys(self, where: Setting) -> list[str]:
        """Returns the keys of a setting's budgets: one, or all of the task for `MEAN`."""
        if where.budget != MEAN:
            return [where.budget]
        task = self.study.task(where.task)
        return list(map(str, task.budgets))

    def entries(self, cell: Cell, where: Setting) -> list[dict[str, Any]] | None:
        """Returns a cell's numbers at each budget of a setting; None if one is missing."""
        entries = []
        for key in self.keys(where):
            entry = cell.entry(where.set, where.mode, key)
            if not entry:
                return None
            entries.append(entry)
        return entries

    def rates(self, cell: Cell, where: Setting) -> Float[np.ndarray, "n"] | None:
        """Returns the share of right samples of each problem, averaged over the budgets.

        Only problems of the setting's level are returned. Without verdicts the result is the
        accuracy as an array of one element; None if the setting has a level, or was not evaluated.
        """
        entries = self.entries(cell, where)
        if entries is None:
            return None
        levels = cell.levels(where.set)
        keys = self.keys(where)
        rates = [cell.rates(where.set, where.mode, key) for key in keys]
        stored_rates = [array for array in rates if array is not None]
        has_verdicts = len(stored_rates) == len(rates)
        if where.level is not None:
            if not has_verdicts or levels is None:
                return None
            return np.mean(stored_rates, axis=0)[levels == where.level]
        if not has_verdicts:
            accuracies = [entry["accuracy"] for entry in entries]
            return np.array([np.mean(accuracies)])
        return np.mean(stored_rates, axis=0)

    def table(self, variant: Variant, where: Setting) -> dict[int, Float[np.ndarray, "n"]]:
        """Returns `rates` by seed; seeds without rates are left out."""
        table = {}
        for cell in self.of(where.task, variant):
            rates = self.rates(cell, where)
            if rates is not None and rates.size:
                table[cell.seed] = rates
        return table

    def difference(self, of: Variant, less: Variant, where: Setting) -> dict[str, Any] | None:
        """Tests the accuracy of `of` minus the accuracy of `less`; see `contrast`."""
        return self.contrast([(of, where, 1.0), (less, where, -1.0)])

    def contrast(self, terms: Sequence[tuple[Variant, Setting, float]]) -> dict[str, Any] | None:
        """Tests a weighted sum of accuracies, paired by seed and problem, against 0.

        Args:
          terms: variant, setting and weight of each accuracy. The weights sum to 0.

        Returns:
          The fields of `statistics.Contrast` over the seeds that all terms have. None if there are
          none, or if one seed has no verdicts.
        """
        tables = [self.table(variant, where) for variant, where, _ in terms]
        seeds = [seed for seed in self.study.seeds if all(seed in table for table in tables)]
        if not seeds:
            return None
        lengths = {len(table[seed]) for table in tables for seed in seeds}
        total = np.zeros(())
        for table, (_, _, weight) in zip(tables, terms):
            rows = [table[seed] for seed in seeds]
            if len(lengths) > 1:
                # A term without verdicts has only its mean, so means are compared.
                rows = [rates.mean(keepdims=True) for rates in rows]
            total = weight * np.stack(rows) + total
        contrast = crossed_test(total)
        return None if contrast is None else asdict(contrast)

    def estimate(self, variant: Variant, where: Setting, key: str) -> Estimate | None:
        """Returns the mean of a number over seeds, with its 95 % interval.

        With one seed, or seeds that do not differ, the interval of a sampled accuracy is over
        problems.

        Args:
          key: one of `NUMBERS`.

        Returns:
          None if no cell has the number.
        """
        values = []
        for cell in self.of(where.task, variant):
            entries = self.entries(cell, where)
            if entries:
                values.append(float(np.mean([entry[key] for entry in entries])))
        if not values:
            return None
        estimate = mean_interval(values)
        seeds_differ = np.ptp(values) > 0
        if key != "accuracy" or seeds_differ or where.mode != SAMPLED:
            return estimate
        rows = list(self.table(variant, where).values())
        if not rows or rows[0].size < 2:
            return estimate
        mean_rates = np.mean(rows, axis=0)
        low, high = rate_intervals(mean_rates[:, None])[0]
        return replace(
            estimate,
            low=float(low),
            high=float(high),
            basis=OVER_PROBLEMS,
        )
