"""Builds tables of paired differences between the runs of a comparison.

The differences are computed from the answers to each problem, which `bacr evaluate` stores, but
training does not. Runs without such an evaluation, or with an evaluation of other problems, get a
note instead.
"""

from collections.abc import Sequence
from pathlib import Path

from bacr_jax.errors import UserError
from bacr_jax.evaluation import folder
from bacr_jax.evaluation.comparison import Results, check_comparable, compare, reported
from bacr_jax.evaluation.samples import graded_sets
from bacr_jax.report import evaluation
from bacr_jax.report.run_data import RunData
from bacr_jax.report.table import Table, set_titles


def paired_differences(runs: Sequence[RunData]) -> tuple[list[Table], list[str]]:
    """Compares each run with the first run, problem by problem.

    Returns:
      A tuple of the tables (one for each set and run), and a note for each run that can't be
      compared.
    """
    tables = list[Table]()
    notes = list[str]()
    first = runs[0]
    try:
        reference = folder.find_evaluation(first.paths.path)
        reference_samples = _reported_samples(reference)
    except UserError as error:
        return [], [_note(first, str(error))]
    for run in runs[1:]:
        try:
            tables += _compared_with(reference, reference_samples, first.label, run)
        except UserError as error:
            notes.append(_note(run, str(error)))
    return tables, notes


def _reported_samples(path: Path) -> Results:
    """Reads the samples of a finished evaluation at the requested budgets, as arrays."""
    samples_by_set = folder.read_samples(path)
    return reported(graded_sets(samples_by_set), folder.read_settings(path)["decoding"])


def _compared_with(
    reference: Path, reference_samples: Results, label: str, run: RunData
) -> list[Table]:
    """Returns the tables of differences between a run and an evaluation.

    Args:
      reference: folder of the evaluation with which the run is compared.
      reference_samples: graded samples of this evaluation at the requested budgets.
      label: label of the run to which `reference` belongs.

    Raises:
      UserError: if the run has no evaluation of the same problems.
    """
    path = folder.find_evaluation(run.paths.path, folder.settings_name_of(reference))
    samples = _reported_samples(path)
    check_comparable(folder.read_settings(path), folder.read_settings(reference), str(reference))
    differences = compare(samples, reference_samples)
    titles = set_titles(differences)
    return [
        evaluation.difference(f"{titles[name]}: {run.label}", label, of_set)
        for name, of_set in differences.items()
    ]


def _note(run: RunData, reason: str) -> str:
    """Returns a note that the run cannot be compared, with the command that makes it possible.

    Args:
      run: the run.
      reason: error message that explains why the run cannot be compared.
    """
    reason = reason.removeprefix("--compare ")
    return (
        f"No paired differences for {run.label}, because they need the answers to each problem: "
        f"bacr evaluate --run {run.paths.path}, for each of the runs ({reason})"
    )
