"""Compares two evaluations on the same problems by computing a difference for each problem.

`bacr evaluate --compare` uses this module. It neither reads files nor samples answers.
"""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from bacr_jax.errors import UserError
from bacr_jax.evaluation.intervals import bootstrap_intervals, difference_intervals
from bacr_jax.evaluation.metrics import anytime_weights
from bacr_jax.evaluation.samples import (
    SAMPLED,
    EvalSetting,
    Graded,
    budget_key,
    measured,
    number,
)
from bacr_jax.types import NO_BUDGET

# Graded samples by evaluation set and setting (decoding mode, budget and truncation point).
Results = Mapping[str, Mapping[EvalSetting, Graded]]
# Pairs of graded samples, one of each evaluation, by budget.
_PairsByBudget = Mapping[int, tuple[Graded, Graded]]
# Names of differences and of their confidence intervals in results.json.
_VERDICTS = (("difference", "ci95"), ("strict_difference", "strict_ci95"))
_TOKENS = (
    ("thinking_tokens_difference", "thinking_ci95"),
    ("total_tokens_difference", "total_ci95"),
)
_OVER_BUDGETS = (("mean_difference", "mean_ci95"), ("area_difference", "area_ci95"))
# Entries of evaluation.json that must be equal in two evaluations, with the options that set them.
_OPTIONS = {"answer_tokens": "rollout.answer_tokens={}", "grace": "budget.grace={}"}
_OPTIONS_OF_SAMPLES = {"temperature": "--temperature {}", "top_p": "--top-p {}"}
# Values of entries that evaluation.json omits.
_DEFAULTS = {"grace": 0}


def reported(results: Results, decoding: Mapping[str, Any]) -> dict[str, dict[EvalSetting, Graded]]:
    """Returns the samples at the requested budgets, without the smaller budgets of majority votes.

    Args:
      results: graded samples of an evaluation.
      decoding: entry `decoding` in the settings of this evaluation.
    """
    budgets = _requested_budgets(decoding)
    return {
        name: {s: graded for s, graded in by_setting.items() if s.budget in budgets}
        for name, by_setting in results.items()
    }


def _requested_budgets(decoding: Mapping[str, Any]) -> set[int]:
    """Returns the requested budgets. NO_BUDGET is included, because votes never need it."""
    return {*decoding["budgets"], NO_BUDGET}


def _reported_cells(decoding: Mapping[str, Any]) -> dict[str, list[int]]:
    """Returns the requested budgets of each decoding mode."""
    requested = _requested_budgets(decoding)
    return {
        mode: [budget for budget in budgets if budget in requested]
        for mode, budgets in decoding["cells"].items()
    }


def check_comparable(
    mine: Mapping[str, Any],
    theirs: Mapping[str, Any],
    where: str,
    *,
    option: str = "--compare",
    same_budgets: bool = True,
) -> None:
    """Checks that two evaluations share the grader, the problems and at least one setting.

    The settings that affect the answers at a given budget must also be equal.

    Args:
      mine: all settings of this evaluation (evaluation.json).
      theirs: all settings of the other evaluation.
      where: folder of the other evaluation as written by the user.
      option: command-line option of the folder, for error messages.
      same_budgets: False if a common decoding mode is sufficient, without a common budget.

    Raises:
      UserError: if the evaluations can't be compared.
    """
    grader = mine.get("grader")
    other_grader = theirs.get("grader")
    if (other_grader or {}).get("digest") != (grader or {}).get("digest"):
        raise UserError(
            f"{option} {where}: the other evaluation was graded by {_grader_name(other_grader)} "
            f"and this one by {_grader_name(grader)}, or by another version of the same file; use "
            "the same grader for both"
        )
    _check_sets(mine["sets"], theirs["sets"], f"{option} {where}")
    other_cells = _reported_cells(theirs["decoding"])
    common_modes = []
    for mode, budgets in _reported_cells(mine["decoding"]).items():
        other_budgets = other_cells.get(mode, [])
        if set(budgets) & set(other_budgets) or (other_budgets and not same_budgets):
            common_modes.append(mode)
    if not common_modes:
        cells = "; ".join(f"{mode} {budgets}" for mode, budgets in other_cells.items())
        raise UserError(
            f"{option} {where}: the other evaluation has no decoding mode and budget in common "
            f"with this one (it has {cells}); run both with the same --budgets and --samples"
        )
    _check_decoding(mine["decoding"], theirs["decoding"], common_modes, f"{option} {where}")


def _check_decoding(
    mine: Mapping[str, Any], theirs: Mapping[str, Any], common_modes: Collection[str], where: str
) -> None:
    """Raises UserError if the answers of two evaluations were decoded with different settings.

    Args:
      mine, theirs: entry `decoding` in the settings of both evaluations.
      common_modes: decoding modes that both evaluations have.
      where: option and folder of the other evaluation, for error messages.
    """
    options = dict(_OPTIONS)
    if SAMPLED in common_modes:
        options |= _OPTIONS_OF_SAMPLES
    my_options = []
    other_options = []
    for name, option in options.items():
        value = mine.get(name, _DEFAULTS.get(name))
        other_value = theirs.get(name, _DEFAULTS.get(name))
        if value == other_value:
            continue
        my_options.append(option.format(value))
        other_options.append(option.format(other_value))
    if my_options:
        raise UserError(
            f"{where}: the other evaluation was made with {' '.join(other_options)}, and this one "
            f"with {' '.join(my_options)}; run one of them again with the options of the other"
        )


def _grader_name(grader: Mapping[str, str] | None) -> str:
    """Returns the file of a verifier, or a name for the built-in rules."""
    return grader["file"] if grader else "the built-in rules"


def _check_sets(mine: Mapping[str, Any], theirs: Mapping[str, Any], where: str) -> None:
    """Raises UserError if the evaluations share no set, or if the problems of a shared set differ.

    Args:
      mine, theirs: entry `sets` in the settings of both evaluations.
      where: option and folder of the other evaluation, for error messages.
    """
    common = [name for name in mine if name in theirs]
    if not common:
        raise UserError(
            f"{where}: the other evaluation used the data sets {', '.join(theirs)}, but this one "
            f"uses {', '.join(mine)}; run both with the same --data"
        )
    for name in common:
        if mine[name]["questions"] != theirs[name].get("questions"):
            raise UserError(
                f"{where}: the other evaluation used different problems of {name} "
                f"({theirs[name]['problems']} problems, and {mine[name]['problems']} in this "
                "evaluation); run both with the same --data, --split, --size and --seed"
            )


def compare(one: Results, other: Results) -> dict[str, Any]:
    """Computes differences `one` - `other` with 95 % confidence intervals.

    The intervals are computed by a paired bootstrap over problems. A setting is a decoding mode and
    a budget. Sets and settings that only one evaluation contains are omitted, and so are answers at
    truncation points before the budget.

    Returns:
      A dict from the name of each evaluation set to a dict with two entries. `by_budget` contains
      the differences by mode and budget. `anytime` contains, by mode, the differences of the mean
      over the common budgets and of the area under the curve.
    """
    differences: dict[str, Any] = {}
    for name in one:
        pairs_by_mode = _pairs(name, one[name], other.get(name, {}))
        if not pairs_by_mode:
            continue
        by_budget: dict[str, Any] = {}
        anytime: dict[str, Any] = {}
        for mode, pairs in pairs_by_mode.items():
            by_budget[mode] = {
                budget_key(budget): _differences(mine, theirs)
                for budget, (mine, theirs) in pairs.items()
            }
            if any(budget > 0 for budget in pairs):
                anytime[mode] = _anytime_differences(pairs)
        differences[name] = {"by_budget": by_budget, "anytime": anytime}
    return differences


def _pairs(
    name: str, one: Mapping[EvalSetting, Graded], other: Mapping[EvalSetting, Graded]
) -> dict[str, dict[int, tuple[Graded, Graded]]]:
    """Returns the samples of two evaluations of a set as pairs, by decoding mode and common budget.

    Raises:
      UserError: if the problems of a common setting differ.
    """
    by_cell = {
        (setting.mode, setting.budget): cell
        for setting, cell in other.items()
        if setting.cut is None
    }
    pairs: dict[str, dict[int, tuple[Graded, Graded]]] = {}
    for setting, mine in one.items():
        theirs = by_cell.get((setting.mode, setting.budget))
        if setting.cut is not None or theirs is None:
            continue
        if mine.ids != theirs.ids:
            raise UserError(
                f"{name}: the two evaluations used different problems of this data set; evaluate "
                "both on the same problems"
            )
        pairs.setdefault(setting.mode, {})[setting.budget] = (mine, theirs)
    return pairs


def _differences(one: Graded, other: Graded) -> dict[str, Any]:
    """Returns both accuracies, and the differences in accuracy and token counts."""
    mine = _accuracies(one)
    theirs = _accuracies(other)
    tokens = _token_counts(one) - _token_counts(other)
    return {
        "accuracy": number(one.correct.mean()),
        "other_accuracy": number(other.correct.mean()),
        **measured(_VERDICTS, mine - theirs, difference_intervals(mine, theirs)),
        **measured(_TOKENS, tokens, bootstrap_intervals(tokens)),
    }


def _accuracies(graded: Graded) -> Float[np.ndarray, "n 2"]:
    """Returns the lenient and the strict accuracy of each problem, with shape [n, 2]."""
    return np.column_stack([graded.correct.mean(1), graded.strict.mean(1)])


def _token_counts(graded: Graded) -> Float[np.ndarray, "n 2"]:
    """Returns the mean numbers of thinking tokens and of total tokens of each problem, [n, 2]."""
    return np.column_stack([graded.thinking.mean(1), graded.total.mean(1)])


def _anytime_differences(pairs: _PairsByBudget) -> dict[str, Any]:
    """Returns differences in two aggregates of the accuracy over all positive budgets.

    The aggregates are the mean and the area under the curve (`metrics.anytime_weights`).
    """
    budgets = sorted(budget for budget in pairs if budget > 0)
    my_rates = []
    their_rates = []
    for budget in budgets:
        one, other = pairs[budget]
        my_rates.append(one.correct.mean(1))
        their_rates.append(other.correct.mean(1))
    weights = anytime_weights(budgets).T
    mine = np.column_stack(my_rates) @ weights
    theirs = np.column_stack(their_rates) @ weights
    ends = difference_intervals(mine, theirs)
    return {**measured(_OVER_BUDGETS, mine - theirs, ends), "budgets": budgets}
