"""Stores the results of finished runs as cells, and compares the cells of a study.

A cell contains the results of one run and is stored as `cells/ID.json` in the study's folder. It
records how many samples of each problem are correct, because comparisons of two methods are paired
by problem. All other numbers are means.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from bacr_jax.errors import UserError
from bacr_jax.evaluation.intervals import rate_intervals
from bacr_jax.evaluation.samples import GREEDY, SAMPLED
from bacr_jax.files import read_object, write_atomically
from bacr_study.spec import MEAN, Study, Value, Variant, cell_id, cell_path
from bacr_study.statistics import OVER_PROBLEMS, Estimate, crossed_test, mean_interval

# Each count of correct samples is stored as one base-36 digit, which allows up to 35 samples.
_BASE = 36
# Maximum absolute difference between a cell's accuracy and the mean over its per-problem results.
_AGREE = 1e-4
# Numbers stored for every evaluation set, decoding mode and budget.
NUMBERS = (
    "accuracy",
    "mean_thinking_tokens",
    "mean_total_tokens",
    "forced_share",
    "no_answer_share",
)
# Numbers stored once per run, for the whole training.
COSTS = (
    "steps",
    "generated_tokens",
    "wall_seconds",
)
# Numbers stored for each difficulty group of a curriculum, and the training metrics they come from.
OF_GROUP = {
    "pass_rate": "curriculum/pass_rate",
    "mu": "curriculum/mu",
    "mean_budget": "budget/median",
    "weight": "curriculum/weight",
}


@dataclass(frozen=True)
class Cell:
    """The stored results of one run of a study, which trained and evaluated a policy.

    Attributes:
      id: the cell's id, see `spec.cell_id`.
      study_size: size of the study that the run belongs to (`Study.size`).
      task: id of the task.
      arm: id of the arm.
      seed: seed of the run.
      value: the swept value; None if the arm has no sweep.
      provenance: commit, package versions, machine and date.
      config_sha: digest of the run's settings.
      departures: settings that differ from the ones in the method's publication.
      steps: number of training steps; 0 for an untrained policy.
      generated_tokens: number of tokens generated during training.
      wall_seconds: wall-clock training time in seconds. The time of a shared warm-up is counted in
        the run that performed it.
      sets: results by evaluation set, decoding mode and budget: the values of `NUMBERS`, and
        `correct`, a string with one base-36 digit per problem, its number of correct samples. Newer
        cells also have `closed_rate`, the fraction of answers with a closing tag or an end token.
      samples: number of samples per problem, by decoding mode.
      problems_digest: digest of the problem ids, by evaluation set.
      levels_of: difficulty levels by evaluation set, as a string with one digit per problem.
      curve: training curve as a list of records with `step`, `tokens`, `seconds`, `reward` and
        `accuracy`. Newer cells also have `closed_answers`, `forced_share` and `entropy`.
      schedule: curriculum as a list of records with `step` and `groups`; empty without a
        curriculum.
      evaluation: the evaluation settings returned by `PlannedRun.asked`. Empty in older cells, and
        without the settings of votes in cells of earlier versions.
      truncated: like `sets`, but by set, decoding mode, budget as input and truncation point.
        Several input budgets form a swap table, and one input budget forms a dense curve. Empty if
        neither was evaluated.
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
    truncated: dict[str, dict[str, dict[str, dict[str, dict[str, Any]]]]] = field(
        default_factory=dict
    )

    def entry(self, name: str, mode: str, budget: str) -> dict[str, Any] | None:
        """Returns the results for a set, decoding mode and budget; None if not evaluated."""
        by_mode = self.sets.get(name, {})
        by_budget = by_mode.get(mode, {})
        return by_budget.get(budget)

    def rates(self, name: str, mode: str, budget: str) -> Float[np.ndarray, "n"] | None:
        """Returns the fraction of correct samples for each problem; None if not stored."""
        entry = self.entry(name, mode, budget)
        if entry is None or not entry.get("correct"):
            return None
        return self.rates_of(entry["correct"], mode)

    def rates_of(self, digits: str, mode: str) -> Float[np.ndarray, "n"]:
        """Converts an entry's `correct` string to the fraction of correct samples per problem."""
        counts = [int(digit, _BASE) for digit in digits]
        return np.array(counts, np.float64) / self.samples[mode]

    def levels(self, name: str) -> Int[np.ndarray, "n"] | None:
        """Returns the difficulty level of each problem in a set; None if not stored."""
        digits = self.levels_of.get(name)
        if not digits:
            return None
        return np.array([int(digit, _BASE) for digit in digits])


def ids_digest(ids: Sequence[str]) -> str:
    """Returns the digest of a list of problem ids, which `Cell.problems_digest` stores.

    The digest depends on the order of the ids.
    """
    text = json.dumps(list(ids))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def correct_digits(correct: Int[np.ndarray, "n"]) -> str:
    """Encodes the number of correct samples of each problem as one base-36 digit."""
    digits = [np.base_repr(int(count), _BASE) for count in correct]
    return "".join(digits).lower()


def write_cell(folder: Path, cell: Cell) -> Path:
    """Writes the results of a run (a cell) into a study's folder and returns the path of the file.

    Raises:
      UserError: if the file cannot be written.
    """
    path = cell_path(folder, cell.id)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(vars(cell), allow_nan=False)
    write_atomically(path, text + "\n")
    return path


def read_cell(path: Path) -> Cell:
    """Reads the stored results of a run (a cell) and checks them for consistency.

    Raises:
      UserError: if the file is damaged, lacks a field or contains inconsistent values.
    """
    advice = "delete the file and run the study again"
    try:
        cell = Cell(**read_object(path))
        contradiction = next(_contradictions(cell, path), None)
    except OSError as error:
        raise UserError(
            f"{path}: the results of this run can't be read ({error.strerror}); change the "
            f"permissions of the file, or {advice}"
        ) from None
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise UserError(
            f"{path}: the file does not contain the results of a run ({error}); {advice}"
        ) from None
    if contradiction is not None:
        raise UserError(f"{path}: {contradiction}; {advice}")
    return cell


def evaluated(cell: Cell, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the evaluation settings with which the stored results of a run were measured.

    Results of earlier versions do not contain these settings. For them, the budgets, the number of
    samples and the number of problems are inferred from the results.

    Args:
      cell: the cell.
      wanted: the evaluation settings that the study uses now (`PlannedRun.asked`). For an older
        cell, `size` is only returned if the cell has more problems than `wanted["size"]`, because a
        data set may be smaller than the requested size.
    """
    # A vote uses the samples of another arm, so its settings cannot be inferred from its numbers.
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
    """Yields a message for each inconsistency in the stored results of a run (a cell).

    Inconsistent results are rejected because they would lead to wrong conclusions.
    """
    variant = Variant(cell.arm, cell.value)
    expected = cell_id(cell.task, variant, cell.seed)
    if cell.id != expected or path.stem != expected:
        yield (
            f"the id is {cell.id!r}, but the fields task, arm, value and seed give the id "
            f"{expected!r}"
        )
    for name, by_mode in cell.sets.items():
        if name not in cell.problems_digest:
            yield f"problems_digest: the digest of {name} is missing"
        for mode, by_budget in by_mode.items():
            for budget in by_budget:
                for problem in _entry_contradictions(cell, name, mode, budget):
                    yield f"sets.{name}.{mode}.{budget}.{problem}"


def _entry_contradictions(cell: Cell, name: str, mode: str, budget: str) -> Iterator[str]:
    """Yields a message for each inconsistency in the numbers of a set, decoding mode and budget."""
    entry = cell.sets[name][mode][budget]
    levels = cell.levels(name)
    rates = cell.rates(name, mode, budget)
    for key in NUMBERS:
        value = entry.get(key)
        if not isinstance(value, int | float) or not np.isfinite(value):
            yield f"{key}: found {value!r}, which is not a number"
    accuracy = entry["accuracy"]
    if not 0.0 <= accuracy <= 1.0:
        yield f"accuracy: found {accuracy}, which is not between 0 and 1"
    if rates is None:
        return
    if rates.max() > 1.0:
        yield "correct: a problem has more right samples than samples"
    if levels is not None and len(levels) != len(rates):
        yield f"correct: found {len(rates)} problems, but levels_of has {len(levels)}"
    mean = float(rates.mean())
    if abs(mean - accuracy) > _AGREE:
        yield f"correct: found a mean of {mean:.4f}, but the accuracy is {accuracy:.4f}"


def read_cells(folder: Path, study: Study) -> dict[str, Cell]:
    """Reads the stored results (cells) of all runs of a study that are finished.

    Returns:
      The cells by id. Cells in the folder that do not belong to the study are ignored.

    Raises:
      UserError: if no cell exists, or if the cells are not comparable because they come from
        different sizes of the study or were evaluated on different problems.
    """
    cells: dict[str, Cell] = {}
    for id_ in study.cell_ids():
        path = cell_path(folder, id_)
        if path.exists():
            cells[id_] = read_cell(path)
    if not cells:
        raise UserError(
            f"{folder / 'cells'}: no run of the study {study.name} is finished; run bacr study "
            "without --report first"
        )
    first_cells: dict[tuple[str, str], Cell] = {}
    for cell in cells.values():
        if cell.study_size != study.size:
            raise UserError(
                f"{folder / 'cells'}: the run {cell.id} belongs to the size {cell.study_size!r} "
                f"of the study, but the size {study.size!r} was requested; use a separate folder "
                "for every size"
            )
        for name in cell.sets:
            first = first_cells.setdefault((cell.task, name), cell)
            same_ids = cell.problems_digest[name] == first.problems_digest[name]
            same_levels = cell.levels_of.get(name) == first.levels_of.get(name)
            if not same_ids or not same_levels:
                raise UserError(
                    f"{folder / 'cells'}: the runs {cell.id} and {first.id} were evaluated on "
                    f"different problems of {name}; run one of the two again with the same data"
                )
    return cells


@dataclass(frozen=True)
class Setting:
    """The conditions of a measurement: task, evaluation set, budget, difficulty and decoding mode.

    Attributes:
      task: id of the task.
      set: name of the evaluation set.
      budget: key of a budget, or `MEAN` for the mean over the task's budgets.
      level: restricts the measurement to problems of this level; None uses all problems.
      mode: decoding mode. Tables and figures use sampled responses by default.
    """

    task: str
    set: str
    budget: str
    level: int | None = None
    mode: str = SAMPLED


@dataclass(frozen=True)
class Grid:
    """The stored results of a study's finished runs, with methods that compute means and tests.

    Attributes:
      study: the study.
      cells: the stored results of each finished run, by the id of the run.
    """

    study: Study
    cells: Mapping[str, Cell]

    def of(self, task: str, variant: Variant) -> list[Cell]:
        """Returns the stored results of a variant's runs on a task, in the order of the seeds.

        A variant is an arm (a method with its settings) at one of its swept values.
        """
        ids = [cell_id(task, variant, seed) for seed in self.study.seeds]
        return [self.cells[id_] for id_ in ids if id_ in self.cells]

    def variants(self, task: str) -> list[Variant]:
        """Returns the variants that have stored results for a task.

        A variant is an arm (a method with its settings) at one of its swept values.
        """
        return [variant for variant in self.study.variants() if self.of(task, variant)]

    def keys(self, where: Setting) -> list[str]:
        """Returns the keys of the budgets that a setting covers.

        These are all budgets of the task if `where.budget` is `MEAN`, and otherwise only this one.
        """
        if where.budget != MEAN:
            return [where.budget]
        task = self.study.task(where.task)
        return list(map(str, task.budgets))

    def entries(self, cell: Cell, where: Setting) -> list[dict[str, Any]] | None:
        """Returns a run's results at each budget of a setting; None if any of them is missing."""
        entries = []
        for key in self.keys(where):
            entry = cell.entry(where.set, where.mode, key)
            if not entry:
                return None
            entries.append(entry)
        return entries

    def rates(self, cell: Cell, where: Setting) -> Float[np.ndarray, "n"] | None:
        """Returns a run's fraction of correct samples per problem, averaged over the budgets.

        If the setting has a level, only the problems of that level are included. If no results per
        problem are stored, the mean accuracy is returned as an array with one element.

        Returns:
          An array with one value per problem. None if the setting was not evaluated, or if it has a
          level and the cell does not store results per problem.
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
        """Returns the result of `rates` for each seed. Seeds without a result are left out."""
        table = {}
        for cell in self.of(where.task, variant):
            rates = self.rates(cell, where)
            if rates is not None and rates.size:
                table[cell.seed] = rates
        return table

    def difference(self, of: Variant, less: Variant, where: Setting) -> dict[str, Any] | None:
        """Tests the difference in accuracy between two variants, paired by seed and problem.

        A variant is an arm (a method with its settings) at one of its swept values. The accuracy of
        `less` is subtracted from the accuracy of `of`. Returns the same fields as `contrast`.
        """
        return self.contrast([(of, where, 1.0), (less, where, -1.0)])

    def contrast(self, terms: Sequence[tuple[Variant, Setting, float]]) -> dict[str, Any] | None:
        """Tests a weighted sum of accuracies against 0, paired by seed and problem.

        Args:
          terms: the variant, setting and weight of each accuracy. The weights sum to 0.

        Returns:
          The fields of `statistics.Contrast`, computed over the seeds that all terms have in
          common. None if they have no seed in common, or only one seed and no results per problem.
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
                # At least one term only has its mean over problems, so means are compared.
                rows = [rates.mean(keepdims=True) for rates in rows]
            total = weight * np.stack(rows) + total
        contrast = crossed_test(total)
        return None if contrast is None else asdict(contrast)

    def estimate(self, variant: Variant, where: Setting, key: str) -> Estimate | None:
        """Returns the mean of an evaluation result over training seeds, with its 95 % interval.

        The interval is usually computed over seeds. With a single seed, or if all seeds have the
        same value, the interval of a sampled accuracy is computed over problems instead.

        Args:
          variant: an arm (a method with its settings) at one of its swept values.
          where: task, evaluation set, decoding mode and budget.
          key: name of the result, one of `NUMBERS`.

        Returns:
          The estimate, or None if no run has the result.
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
