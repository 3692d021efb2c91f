"""Handles evaluation sets that are missing at the path in the config."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from bacr_jax.config import Config, DataConfig
from bacr_jax.config.resolve import mixture, selection_problems
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
    config: Config, begun: Config | None = None, run: Path | None = None
) -> tuple[Config, tuple[str, ...]]:
    """Removes missing sets from data.eval if data.eval_missing=skip.

    A resumed run evaluates the sets with which it began. Sets that were missing then are left out,
    even if they exist by now.

    Args:
      config: config of the run.
      begun: config with which a resumed run began; None for a new run.
      run: folder of a resumed run, for messages.

    Returns:
      The config, and a line about every set that is left out.

    Raises:
      UserError: no set is left, a resumed run lacks a set with which it began, or the set that
        chooses the best checkpoint is missing.
    """
    if config.data.eval_missing == "refuse":
        return config, ()
    requested = config.data.eval
    missing = {}
    for spec in requested:
        error = why_missing(spec, config.data)
        if error is not None:
            missing[spec] = error
    # Sets that were missing when the resumed run began. They are left out although they exist now.
    late = list[str]()
    if begun is not None and set(begun.data.eval) <= set(requested):
        for spec, error in missing.items():
            if spec in begun.data.eval:
                raise UserError(
                    f"data.eval: {spec} was evaluated when the run in {run} began and is gone "
                    f"({error.what}); put it back{_advice(spec, config)}"
                )
        late = [spec for spec in requested if spec not in missing and spec not in begun.data.eval]
    left_out = [*missing, *late]
    remaining = tuple(spec for spec in requested if spec not in left_out)
    if not remaining:
        first, *others = requested
        more = ", ..." if others else ""
        raise UserError(
            f"data.eval: all of its sets are missing ({missing[first].what}{more}); write another "
            f"data.dir{_advice(first, config, others=others)}"
        )
    data = dataclasses.replace(config.data, eval=remaining)
    remaining_config = dataclasses.replace(config, data=data)
    for problem in selection_problems(remaining_config):
        raise UserError(f"{problem}; left out, because missing: {', '.join(left_out)}")
    lines = []
    for spec, error in missing.items():
        lines.append(f"data.eval: {spec} is left out ({error.what}){_advice(spec, config)}")
    for spec in late:
        lines.append(
            f"data.eval: {spec} was missing when the run in {run} began, so the run does not "
            f"evaluate it; write bacr evaluate --run {run} --data {spec} to evaluate it"
        )
    return remaining_config, tuple(lines)


def missing_together(config: Config) -> tuple[str, tuple[str, ...]]:
    """Describes in one line several sets that a run needs and that do not exist.

    Returns:
      A tuple of the error message and the names of the missing sets. The message is empty if fewer
      than two sets are missing, because the error of one set is clearer.
    """
    trained = [spec for _, spec in mixture(config.data.train)]
    missing = [spec for spec in trained if why_missing(spec, config.data)]
    missing_eval = [spec for spec in config.data.eval if why_missing(spec, config.data)]
    # With data.eval_missing=skip, a run needs only one of its evaluation sets.
    if config.data.eval_missing == "refuse" or len(missing_eval) == len(config.data.eval):
        missing += missing_eval
    missing = list(dict.fromkeys(missing))
    if len(missing) < 2:
        return "", ()
    first, *others = missing
    advice = _advice(first, config, others=others).replace(" gets it", " gets them")
    line = (
        f"data.dir={config.data.dir}: {len(missing)} sets of data.train and data.eval do not exist "
        f"({', '.join(missing)}); write the folder that contains them{advice}"
    )
    return line, tuple(missing)


def missing_set_lines(config: Config) -> tuple[str, ...]:
    """Returns the log lines about missing evaluation sets that a new run with this config prints.

    Raises:
      UserError: a set is missing and data.eval_missing=refuse, or `without_missing` raises it.
    """
    if config.data.eval_missing == "refuse":
        for spec in config.data.eval:
            missing = why_missing(spec, config.data)
            if missing is not None:
                raise UserError(f"{missing}{_advice(spec, config)}")
    _, lines = without_missing(config)
    return lines


def _advice(spec: str, config: Config, others: Sequence[str] = ()) -> str:
    """Returns the end of an error message: the command that downloads the sets.

    Args:
      spec: a set.
      others: other sets, which the command includes if it can download them.

    Returns:
      The advice, after a semicolon. Empty if the command can download none of the sets.
    """
    command = ""
    for name in (spec, *others):
        command_for_set = how_to_get(name, config.data.dir)
        if command_for_set and not command:
            command = command_for_set
        elif command_for_set:
            command += f" {name.partition(':')[0]}"
    return f"; {command} gets it" if command else ""
