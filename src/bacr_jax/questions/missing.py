"""Handles evaluation sets that are missing at the path in the config."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from bacr_jax.config import DataConfig, EvalConfig
from bacr_jax.config.derived import mixture
from bacr_jax.config.training_checks import selection_problems
from bacr_jax.errors import UserError
from bacr_jax.questions.math_sets import LAYOUTS, TABLES, how_to_get
from bacr_jax.questions.tables import SetNotFound, find


def why_missing(spec: str, data: DataConfig) -> SetNotFound | None:
    """Returns the error for an evaluation set whose files are missing.

    Args:
      spec: the set, NAME[:PATH].
      data: data settings of the run.

    Returns:
      The error. None if the files of the set exist, even if they are malformed, or if the set is
      not read from files.

    Raises:
      UserError: the path can't be the path of a set.
    """
    name, _, path = spec.partition(":")
    if not path or name not in (*LAYOUTS, *TABLES):
        return None
    try:
        find(path, base=data.dir, where=spec)
    except SetNotFound as error:
        return error
    return None


def without_missing(
    data: DataConfig,
    evaluation: EvalConfig,
    begun: DataConfig | None = None,
    run: Path | None = None,
) -> tuple[DataConfig, tuple[str, ...]]:
    """Removes missing sets from data.eval if data.eval_missing=skip.

    A resumed run evaluates the same sets as before. Sets that were missing when the run began are
    left out, even if they exist now.

    Args:
      data: data settings of the run.
      evaluation: evaluation settings of the run.
      begun: data settings with which a resumed run began, or None for a new run.
      run: folder of a resumed run, for messages.

    Returns:
      The data settings without the missing sets, and a log line about each of these sets.

    Raises:
      UserError: no set is left, a resumed run lacks a set with which it began, or the set that
        chooses the best checkpoint is missing.
    """
    if data.eval_missing == "refuse":
        return data, ()
    requested = data.eval
    missing = {}
    for spec in requested:
        error = why_missing(spec, data)
        if error is not None:
            missing[spec] = error
    # Sets that exist now but were missing when the resumed run began. They are left out.
    late = list[str]()
    if begun is not None and set(begun.eval) <= set(requested):
        for spec, error in missing.items():
            if spec in begun.eval:
                raise UserError(
                    f"data.eval: {spec} was evaluated when the run in {run} began, but is missing "
                    f"now ({error.what}); restore it{_advice(spec, data)}"
                )
        late = [spec for spec in requested if spec not in missing and spec not in begun.eval]
    left_out = [*missing, *late]
    remaining = tuple(spec for spec in requested if spec not in left_out)
    if not remaining:
        first, *others = requested
        more = ", ..." if others else ""
        raise UserError(
            f"data.eval: none of its sets exists ({missing[first].what}{more}); set data.dir to "
            f"the folder that contains them{_advice(first, data, others=others)}"
        )
    remaining_data = dataclasses.replace(data, eval=remaining)
    for problem in selection_problems(evaluation, remaining_data):
        raise UserError(
            f"{problem}. These sets were left out because their files are missing: "
            f"{', '.join(left_out)}"
        )
    lines = []
    for spec, error in missing.items():
        lines.append(f"data.eval: {spec} is left out ({error.what}){_advice(spec, data)}")
    for spec in late:
        lines.append(
            f"data.eval: {spec} was missing when the run in {run} began, so the run does not "
            f"evaluate it; run bacr evaluate --run {run} --data {spec} to evaluate it"
        )
    return remaining_data, tuple(lines)


def missing_together(data: DataConfig) -> tuple[str, tuple[str, ...]]:
    """Builds a single error message about all missing sets that a run needs.

    Returns:
      (message, names of the missing sets). Both are empty if fewer than two sets are missing,
      because the error of a single set is clearer.
    """
    trained = [spec for _, spec in mixture(data.train)]
    missing = [spec for spec in trained if why_missing(spec, data)]
    missing_eval = [spec for spec in data.eval if why_missing(spec, data)]
    # With data.eval_missing=skip, a run needs only one of its evaluation sets.
    if data.eval_missing == "refuse" or len(missing_eval) == len(data.eval):
        missing += missing_eval
    missing = list(dict.fromkeys(missing))
    if len(missing) < 2:
        return "", ()
    first, *others = missing
    advice = _advice(first, data, others=others).replace(" gets it", " gets them")
    line = (
        f"data.dir={data.dir}: {len(missing)} sets of data.train and data.eval do not exist "
        f"({', '.join(missing)}); set it to the folder that contains them{advice}"
    )
    return line, tuple(missing)


def missing_set_lines(data: DataConfig, evaluation: EvalConfig) -> tuple[str, ...]:
    """Returns the log lines about missing evaluation sets that a new run prints.

    Raises:
      UserError: a set is missing and data.eval_missing=refuse, or `without_missing` raises it.
    """
    if data.eval_missing == "refuse":
        for spec in data.eval:
            missing = why_missing(spec, data)
            if missing is not None:
                raise UserError(f"{missing}{_advice(spec, data)}")
    _, lines = without_missing(data, evaluation)
    return lines


def _advice(spec: str, data: DataConfig, others: Sequence[str] = ()) -> str:
    """Returns the end of an error message: a semicolon and the command that downloads the sets.

    The result is empty if the command can download none of the sets.

    Args:
      spec: a missing set.
      others: other missing sets.
    """
    command = ""
    for name in (spec, *others):
        command_for_set = how_to_get(name, data.dir)
        if command_for_set and not command:
            command = command_for_set
        elif command_for_set:
            command += f" {name.partition(':')[0]}"
    return f"; {command} gets it" if command else ""
