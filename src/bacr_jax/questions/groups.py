"""Difficulty groups, 0 (easy) to K - 1, from levels or from measured solve rates."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from bacr_jax.config import DataConfig
from bacr_jax.config.checks import NUM_LEVELS
from bacr_jax.config.values import shown, written
from bacr_jax.errors import UserError
from bacr_jax.questions import tables


def groups_from_levels(levels: Int[np.ndarray, "n"], *, num_groups: int) -> Int[np.ndarray, "n"]:
    """Difficulty groups 0..K-1 (int32) from levels 1..5 (paper appendix: levels 1-2, 3, 4, 5).

        group = floor((level - 1) K / 5)

    which for K = 4 is the paper's grouping. Any other level counts as unknown and goes to the
    hardest group. K is 1..5.
    """
    levels = np.asarray(levels)
    known = (levels >= 1) & (levels <= NUM_LEVELS)
    groups = np.where(known, (levels - 1) * num_groups // NUM_LEVELS, num_groups - 1)
    return groups.astype(np.int32)


def check_levels(levels: Int[np.ndarray, "n"], data: DataConfig) -> None:
    """UserError: groups by level are asked for, and no level of the training set is known (0)."""
    if data.groups == "level" and data.num_groups > 1 and not np.any(levels):
        raise UserError(
            f"data.groups=level: {written(data.train)} has no levels; write data.num_groups=1, or "
            "data.groups=solve_rate with data.labels"
        )


def groups_from_solve_rate(
    rate: Float[np.ndarray, "n"], *, num_groups: int
) -> Int[np.ndarray, "n"]:
    """Difficulty groups 0..K-1 (int32) from measured solve rates, the easiest first.

    Thresholds are the multiples of 1/K. With K = 4 they are .25, .5 and .75 (paper appendix), a
    rate above .75 being group 0.
    """
    thresholds = np.arange(1, num_groups) / num_groups
    below = np.searchsorted(thresholds, rate, side="left")
    return (num_groups - 1 - below).astype(np.int32)


def read_solve_rates(path: str | Path, ids: Sequence[str]) -> Float[np.ndarray, "n"]:
    """Measured solve rates in the order of `ids`, from a table of labels (docs/data.md)."""
    where = f"data.labels={path}"
    rows = tables.read_rows(str(path), base="", split="train", any_split=True, where=where)
    rates: dict[str, float] = {}
    for number, row in enumerate(rows, start=1):
        name, rate = _label(f"{where} row {number}", row)
        if name in rates:
            raise UserError(f"{where} row {number}: labels {name!r} again; write every id once")
        rates[name] = rate
    missing = [name for name in ids if name not in rates]
    if missing:
        raise UserError(
            f"{where}: has no label for {len(missing):,} of {len(ids):,} questions, the first is "
            f"{missing[0]!r}; label the same set again"
        )
    return np.array([rates[name] for name in ids])


def _label(where: str, label: tables.Record) -> tuple[str, float]:
    if not {"id", "avg", "samples"} <= label.keys():
        raise UserError(
            f"{where}: found {', '.join(label) or 'no field'}; write "
            '{"id": "...", "avg": 0.25, "samples": 8}'
        )
    rate, samples = label["avg"], label["samples"]
    number = isinstance(rate, int | float) and not isinstance(rate, bool)
    if not number or not 0 <= rate <= 1:
        raise UserError(
            f"{where}: found avg={shown(rate)}; write the share of correct samples, 0 to 1"
        )
    if type(samples) is not int or samples < 1:
        raise UserError(
            f"{where}: found samples={shown(samples)}; write how many were drawn, 1 or more"
        )
    return str(label["id"]), float(rate)
