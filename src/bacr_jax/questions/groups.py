"""Computes difficulty groups, 0 (easiest) to K - 1, from difficulty levels or solve rates.

A question whose solve rate was not measured has the group `NO_GROUP`, and can't be trained on.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from bacr_jax.config import DataConfig
from bacr_jax.config.checks import NUM_LEVELS
from bacr_jax.config.values import shown, written
from bacr_jax.errors import UserError
from bacr_jax.questions import tables

# Group of a question whose solve rate was not measured.
NO_GROUP = -1


def groups_from_levels(levels: Int[np.ndarray, "n"], *, num_groups: int) -> Int[np.ndarray, "n"]:
    """Computes difficulty groups from difficulty levels.

        group = floor((level - 1) K / 5)

    For K = 4, as in the paper's appendix, the groups are levels 1 and 2, level 3, level 4, and
    level 5.

    Args:
      levels: level of each question, 1 to 5. Any other number means that the level is unknown.
        These questions are assigned to the hardest group.
      num_groups: number of groups K, 1 to 5.

    Returns:
      Group of each question in [0, K), int32.
    """
    levels = np.asarray(levels)
    is_known = (levels >= 1) & (levels <= NUM_LEVELS)
    known_groups = (levels - 1) * num_groups // NUM_LEVELS
    groups = np.where(is_known, known_groups, num_groups - 1)
    return groups.astype(np.int32)


def check_levels(levels: Int[np.ndarray, "n"], data: DataConfig) -> None:
    """Checks that a training set has difficulty levels if its difficulty groups depend on them.

    Args:
      levels: level of each question, 0 if unknown.

    Raises:
      UserError: the config requires several groups by level, but all levels are unknown.
    """
    if data.groups == "level" and data.num_groups > 1 and not np.any(levels):
        raise UserError(
            "data.groups=level groups the questions by their difficulty level, but the questions "
            f"of {written(data.train)} have no levels; set data.num_groups=1 for a single group, "
            "or data.groups=solve_rate with data.labels"
        )


def groups_from_solve_rate(
    rate: Float[np.ndarray, "n"], *, num_groups: int
) -> Int[np.ndarray, "n"]:
    """Computes difficulty groups from measured solve rates.

    The thresholds are the multiples of 1/K. For K = 4 they are .25, .5 and .75 (paper appendix),
    and rates above .75 are in group 0.

    Args:
      rate: share of correct samples of each question, in [0, 1], or NaN if it was not measured.
      num_groups: number of groups K.

    Returns:
      Group of each question in [0, K), or `NO_GROUP`, int32.
    """
    thresholds = np.arange(1, num_groups) / num_groups
    num_below = np.searchsorted(thresholds, rate, side="left")
    groups = np.where(np.isnan(rate), NO_GROUP, num_groups - 1 - num_below)
    return groups.astype(np.int32)


def read_solve_rates(
    path: str | Path, ids: Sequence[str], other_ids: Sequence[str] | None = None
) -> Float[np.ndarray, "n"]:
    """Reads measured solve rates from a table of labels (docs/data.md).

    Args:
      path: file of the table.
      ids: ids of the questions.
      other_ids: another id of each question, which is used if `ids` has no label. None if the
        questions have only one id.

    Returns:
      Solve rate of each question, in the order of `ids`. NaN if a question has no label.

    Raises:
      UserError: the table is malformed, or an id has several labels.
    """
    where = f"data.labels={path}"
    rows = tables.read_rows(str(path), base="", split="train", any_split=True, where=where)
    rates: dict[str, float] = {}
    for number, row in enumerate(rows, start=1):
        name, rate = _parse_label(f"{where} row {number}", row)
        if name in rates:
            raise UserError(
                f"{where} row {number}: the question id {name!r} already has a label in an "
                "earlier row; remove one of the two rows"
            )
        rates[name] = rate
    return np.array(
        [
            rates.get(name, rates.get(other_name, np.nan))
            for name, other_name in zip(ids, other_ids or ids, strict=True)
        ]
    )


def _parse_label(where: str, label: tables.Record) -> tuple[str, float]:
    """Returns the question id and the solve rate in a row of the table of labels."""
    if not {"id", "avg", "samples"} <= label.keys():
        raise UserError(
            f'{where}: a label must have the fields {{"id": "...", "avg": 0.25, '
            f'"samples": 8}}, but this one has {", ".join(label) or "no field"}; create the '
            "labels with bacr evaluate --label-difficulty"
        )
    rate = label["avg"]
    is_number = isinstance(rate, int | float) and not isinstance(rate, bool)
    if not is_number or not 0 <= rate <= 1:
        raise UserError(
            f"{where}: found avg={shown(rate)}; `avg` must be the share of correct samples, from "
            "0 to 1"
        )
    samples = label["samples"]
    if type(samples) is not int or samples < 1:
        raise UserError(
            f"{where}: found samples={shown(samples)}; `samples` must be the number of samples, 1 "
            "or more"
        )
    return str(label["id"]), float(rate)
