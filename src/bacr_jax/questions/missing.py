"""Handles evaluation sets that are missing at the path in the config."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from bacr_jax.config import Config, DataConfig
from bacr_jax.config.derived import selection_problems
from bacr_jax.errors import UserError
from bacr_jax.questions.math_sets import LAYOUTS, TABLES, how_to_get
from bacr_jax.questions.tables import NotThere, find


def why_missing(spec: str, data: DataConfig) -> NotThere | None:
    """Why a set NAME[:PATH] can't be had; None: it is there, whatever it holds, or is no table.

    UserError: a path that no set can have.
    """
    name, _, path = spec.partition(":")
    if name not in (*LAYOUTS, *TABLES) or not path:
        return None
    try:
        find(path, base=data.dir, where=spec)
    except NotThere as error:
        return error
    return None


def without_missing(
    config: Config, begun: Config | None = None, run: Path | None = None
) -> tuple[Config, tuple[str, ...]]:
    """The config with the sets of data.eval that are there, if data.eval_missing=skip, and lines.

    `begun`: the config of the run to go on with, which evaluates what it did then; None: a new one.
    """
    if config.data.eval_missing == "refuse":
        return config, ()
    wanted = config.data.eval
    gone = {spec: why for spec in wanted if (why := why_missing(spec, config.data)) is not None}
    late: list[str] = []
    if begun is not None and {*begun.data.eval} <= {*wanted}:
        for spec in gone:
            if spec in begun.data.eval:
                raise UserError(
                    f"data.eval: {spec} was evaluated when the run in {run} began and is gone "
                    f"({gone[spec].what}); put it back{_get(spec, config)}"
                )
        late = [spec for spec in wanted if spec not in gone and spec not in begun.data.eval]
    kept = tuple(spec for spec in wanted if spec not in gone and spec not in late)
    if not kept:
        raise UserError(
            f"data.eval: none of its sets is there ({gone[wanted[0]].what}"
            f"{', ...' if len(wanted) > 1 else ''}); write another data.dir"
            f"{_get(wanted[0], config, others=wanted[1:])}"
        )
    left = dataclasses.replace(config, data=dataclasses.replace(config.data, eval=kept))
    for fault in selection_problems(left):
        raise UserError(f"{fault}; left out, since not there: {', '.join([*gone, *late])}")
    lines = [f"data.eval: {s} is left out ({why.what}){_get(s, config)}" for s, why in gone.items()]
    lines += [
        f"data.eval: {spec} has come since the run in {run} began, which goes on without it; "
        f"evaluate --run {run} --data {spec} asks it"
        for spec in late
    ]
    return left, tuple(lines)


def lines_about_missing(config: Config) -> tuple[str, ...]:
    """Returns the lines of a new run about missing sets of data.eval, or raises its UserError."""
    if config.data.eval_missing == "refuse":
        for spec in config.data.eval:
            missing = why_missing(spec, config.data)
            if missing is not None:
                raise UserError(f"{missing}{_get(spec, config)}")
    return without_missing(config)[1]


def _get(spec: str, config: Config, others: Sequence[str] = ()) -> str:
    """The command that gets a set, and others that the same command can get; empty: none does."""
    command = how_to_get(spec, config.data.dir)
    more = [o.partition(":")[0] for o in others if how_to_get(o, config.data.dir)]
    return f"; {' '.join([command, *more])} gets it" if command else ""
