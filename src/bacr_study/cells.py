"""A cell: what one finished run of a study found, as a file of its own.

`cells/ID.json` of a study's folder. Verdicts are kept per problem, because a test of two arms pairs
their problems; everything else are means.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from bacr_jax import documents
from bacr_jax.documents import write_atomically
from bacr_jax.errors import UserError
from bacr_study.info import StudyInfo, Value, Variant, cell_id

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


@dataclass(frozen=True)
class Cell:
    """One finished run, evaluated.

    Attributes:
      study_size: size of the study it was run for.
      departures: where the run departs from its method's publication.
      steps: of training; 0: not trained.
      wall_seconds: of training; a shared warm-up counts in the run that made it.
      sets: by set, decoding and budget: accuracy, mean tokens, shares, `levels`, and `correct`,
        a digit per problem (base 36) that says how many of its samples are right, or a list of
        shares.
      samples: per problem, by decoding.
      problems_digest: of the problems' ids, by set.
      levels_of: a digit per problem, by set.
      curve: records of `step`, `tokens`, `seconds`, `reward`, `thinking` and `accuracy`.
      schedule: records of `step`, `tokens` and `groups`; empty without a curriculum.
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

    @property
    def variant(self) -> Variant:
        """Arm and value."""
        return Variant(self.arm, self.value)

    def entry(self, name: str, mode: str, budget: str) -> dict[str, Any] | None:
        """The numbers of a set, decoding and budget; None: not evaluated."""
        return self.sets.get(name, {}).get(mode, {}).get(budget)

    def rates(self, name: str, mode: str, budget: str) -> Float[np.ndarray, "n"] | None:
        """Share of each problem's samples that are right; None: not kept."""
        entry = self.entry(name, mode, budget)
        if entry is None or not entry.get("correct"):
            return None
        return _rates(entry["correct"], self.samples[mode])

    def levels(self, name: str) -> Int[np.ndarray, "n"] | None:
        """Level of each problem; None: not kept."""
        digits = self.levels_of.get(name)
        return np.array([int(c, _BASE) for c in digits]) if digits else None


def _rates(correct: str | list[float], samples: int) -> Float[np.ndarray, "n"]:
    if isinstance(correct, str):
        return np.array([int(digit, _BASE) for digit in correct], np.float64) / samples
    return np.array(correct, np.float64)


def ids_digest(ids: Sequence[str]) -> str:
    """What `problems_digest` says of problems with these ids, in this order."""
    return hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()[:12]


def correct_digits(correct: Int[np.ndarray, "n"]) -> str:
    """How many samples of each problem are right, a digit each.

    UserError: a count that no digit can say.
    """
    if correct.size and int(correct.max()) >= _BASE:
        raise UserError(
            f"samples: found {int(correct.max())} right samples of a problem; a study keeps up to "
            f"{_BASE - 1}"
        )
    return "".join(np.base_repr(int(count), _BASE).lower() for count in correct)


def write_cell(folder: Path, cell: Cell) -> Path:
    """Writes a cell into a study's folder, in one step.

    UserError: the cell contradicts itself, or the file can't be written.
    """
    path = folder / "cells" / f"{cell.id}.json"
    _check(cell, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(vars(cell), allow_nan=False) + "\n")
    return path


def read_cell(path: Path) -> Cell:
    """Reads one cell; UserError: the file is damaged, lacks a field, or contradicts itself."""
    again = "remove it and run the study again"
    try:
        record = documents.read_object(path)
    except ValueError as error:
        raise UserError(f"{path}: is damaged ({error}); {again}") from None
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror})") from None
    fields = {f.name: f for f in dataclasses.fields(Cell)}
    for name, f in fields.items():
        if name not in record and f.default_factory is dataclasses.MISSING:
            raise UserError(f"{path}: lacks the field {name!r}; {again}")
    for name in sorted(record.keys() - fields):
        raise UserError(f"{path}: has the unknown field {name!r}; {again}")
    try:
        cell = Cell(**record)
        _check(cell, path)
    except UserError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError):
        raise UserError(f"{path}: has a field of another form; {again}") from None
    return cell


def _check(cell: Cell, path: Path) -> None:
    """Refuses what would give wrong numbers without a word."""
    expected = cell_id(cell.task, cell.variant, cell.seed)
    if cell.id != expected or path.name != f"{expected}.json":
        raise UserError(
            f"{path}: found id {cell.id!r} of task, arm, value and seed {expected!r}; "
            "write them alike, also in the file's name"
        )
    for name, modes in cell.sets.items():
        if name not in cell.problems_digest:
            raise UserError(f"{path}: problems_digest: found none of {name}; write its digest")
        for mode, budgets in modes.items():
            for budget, entry in budgets.items():
                _check_entry(cell, f"{path}: sets.{name}.{mode}.{budget}", name, mode, entry)


def _check_entry(cell: Cell, where: str, name: str, mode: str, entry: Mapping[str, Any]) -> None:
    for key in NUMBERS:
        value = entry.get(key)
        if not isinstance(value, int | float) or not np.isfinite(value):
            raise UserError(f"{where}.{key}: found {value!r}; write a number")
    if not 0.0 <= entry["accuracy"] <= 1.0:
        raise UserError(f"{where}.accuracy: found {entry['accuracy']}; write a share, 0 to 1")
    correct = entry.get("correct")
    if not correct:
        return
    rates, digits = _rates(correct, cell.samples[mode]), cell.levels_of.get(name)
    if rates.min() < 0.0 or rates.max() > 1.0:
        found = f"{correct if isinstance(correct, str) else 'shares'}"[:20]
        raise UserError(
            f"{where}.correct: found {found}... with {cell.samples[mode]} samples per problem; "
            "write counts up to that number"
        )
    if digits and len(digits) != len(rates):
        raise UserError(
            f"{where}.correct: found {len(rates)} problems, and {len(digits)} in levels_of; "
            "write one digit per problem in both"
        )
    if abs(float(rates.mean()) - entry["accuracy"]) > _AGREE:
        raise UserError(
            f"{where}.correct: found a mean of {rates.mean():.4f}, and accuracy "
            f"{entry['accuracy']:.4f}; write the verdicts that accuracy is the mean of, or none"
        )


@dataclass(frozen=True)
class Reading:
    """The cells of a folder.

    Attributes:
      missing: ids of cells that the study has and the folder has not.
      strangers: names of files whose cells are not of the study.
    """

    cells: dict[str, Cell]
    missing: list[str]
    strangers: list[str]


def read_cells(folder: Path, study: StudyInfo) -> Reading:
    """Reads the cells of a study.

    UserError: a damaged cell, no cell at all, or cells that must not be compared: of several
      sizes of the study, or of other problems.
    """
    expected = list(study.cell_ids())
    # A temporary file of a cell that is being written ends otherwise.
    paths = {path.stem: path for path in sorted((folder / "cells").glob("*.json"))}
    cells = {id_: read_cell(paths[id_]) for id_ in expected if id_ in paths}
    if not cells:
        raise UserError(f"{folder / 'cells'}: found no finished run of study {study.name}")
    size = study.size or next(iter(cells.values())).study_size
    for cell in cells.values():
        if cell.study_size != size:
            raise UserError(
                f"{folder / 'cells'}: found {cell.id} of size {cell.study_size!r} in a study of "
                f"size {size!r}; give every size a folder of its own"
            )
    _check_problems(cells, folder)
    strangers = sorted(paths[id_].name for id_ in paths.keys() - set(expected))
    return Reading(cells, [id_ for id_ in expected if id_ not in cells], strangers)


def _check_problems(cells: Mapping[str, Cell], folder: Path) -> None:
    """Cells of a task must have the same problems, level by level and in the same number."""
    seen: dict[tuple[str, str], tuple[Cell, int | None]] = {}
    for cell in cells.values():
        for name, modes in cell.sets.items():
            entries = [entry for budgets in modes.values() for entry in budgets.values()]
            lengths = {len(entry["correct"]) for entry in entries if entry.get("correct")}
            first, count = seen.get((cell.task, name), (cell, None))
            lengths |= set() if count is None else {count}
            same = first.problems_digest[name] == cell.problems_digest[name]
            same = same and first.levels_of.get(name) == cell.levels_of.get(name)
            if not same or len(lengths) > 1:
                raise UserError(
                    f"{folder / 'cells'}: {cell.id} has other problems of {name} than {first.id}; "
                    "run one of them again with the same data"
                )
            seen[cell.task, name] = first, next(iter(lengths), None)
