"""Two policies on the same problems: differences, paired problem by problem."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from bacr_jax.errors import UserError
from bacr_jax.evaluation.intervals import bootstrap_intervals, difference_intervals
from bacr_jax.evaluation.metrics import anytime_weights
from bacr_jax.evaluation.samples import EvalSetting, Graded, budget_key, measured, number

Results = Mapping[str, Mapping[EvalSetting, Graded]]
# What differences and their intervals are called.
_VERDICTS = ("difference", "ci95"), ("strict_difference", "strict_ci95")
_TOKENS = (
    ("thinking_tokens_difference", "thinking_ci95"),
    ("total_tokens_difference", "total_ci95"),
)
_OVER_BUDGETS = ("mean_difference", "mean_ci95"), ("area_difference", "area_ci95")


def check_comparable(
    mine: Mapping[str, Any],
    theirs: Mapping[str, Any],
    modes: Mapping[str, list[int]],
    where: str,
    *,
    grader: Mapping[str, str] | None = None,
) -> None:
    """Refuses evaluations that share no problems or no setting.

    Args:
      mine: the `sets` of this evaluation's settings.
      theirs: the settings of the other one.
    """
    other_grader = theirs.get("grader")
    if (other_grader or {}).get("digest") != (grader or {}).get("digest"):
        spelled = lambda found: found["file"] if found else "the built-in rules"
        raise UserError(
            f"--compare {where}: was graded by {spelled(other_grader)}, and this one by "
            f"{spelled(grader)}, or by another version of the file; grade both alike"
        )
    common = [name for name in mine if name in theirs["sets"]]
    if not common:
        raise UserError(
            f"--compare {where}: has the sets {', '.join(theirs['sets'])}, not "
            f"{', '.join(mine)}; evaluate both on the same --data"
        )
    for name in common:
        if mine[name]["questions"] != theirs["sets"][name].get("questions"):
            raise UserError(
                f"--compare {where}: has other problems of {name} "
                f"({theirs['sets'][name]['problems']} there, {mine[name]['problems']} here); "
                "evaluate both with the same --data, --split, --size and --seed"
            )
    other = theirs["decoding"]["cells"]
    if not any(set(budgets) & set(other.get(mode, [])) for mode, budgets in modes.items()):
        there = "; ".join(f"{mode} {budgets}" for mode, budgets in other.items())
        raise UserError(
            f"--compare {where}: has no decoding and budget in common with this one (found "
            f"{there}); evaluate both with the same --budgets and --samples"
        )


def _entry(one: Graded, other: Graded) -> dict[str, Any]:
    verdicts = lambda of: np.column_stack([of.correct.mean(1), of.strict.mean(1)])
    mine, theirs = verdicts(one), verdicts(other)
    used = lambda of: np.column_stack([of.thinking.mean(1), of.total.mean(1)])
    tokens = used(one) - used(other)
    return {
        "accuracy": number(one.correct.mean()),
        "other_accuracy": number(other.correct.mean()),
        **measured(_VERDICTS, mine - theirs, difference_intervals(mine, theirs)),
        **measured(_TOKENS, tokens, bootstrap_intervals(tokens)),
    }


def _anytime(pairs: Mapping[int, tuple[Graded, Graded]]) -> dict[str, Any]:
    budgets = sorted(budget for budget in pairs if budget > 0)
    rates = lambda of: np.column_stack([pairs[budget][of].correct.mean(1) for budget in budgets])
    mine, theirs = (rates(of) @ anytime_weights(budgets).T for of in (0, 1))
    ends = difference_intervals(mine, theirs)
    return {**measured(_OVER_BUDGETS, mine - theirs, ends), "budgets": budgets}


def compare(one: Results, other: Results) -> dict[str, Any]:
    """Differences one - other, with 95 % intervals of the paired bootstrap over problems.

    Sets and settings that only one has are left out, and so are traces that were cut early.

    Returns:
      By set: by_budget (by mode and budget), and anytime by mode over the common budgets.
    """
    differences: dict[str, Any] = {}
    for name in one:
        theirs = {(s.mode, s.budget): b for s, b in other.get(name, {}).items() if s.cut is None}
        pairs: dict[str, dict[int, tuple[Graded, Graded]]] = {}
        for setting, a in one[name].items():
            b = theirs.get((setting.mode, setting.budget))
            if setting.cut is None and b is not None:
                if a.ids != b.ids:
                    raise UserError(f"{name}: the two evaluations are of other problems")
                pairs.setdefault(setting.mode, {})[setting.budget] = a, b
        if pairs:
            differences[name] = {
                "by_budget": {
                    mode: {budget_key(budget): _entry(*both) for budget, both in of_mode.items()}
                    for mode, of_mode in pairs.items()
                },
                "anytime": {
                    mode: _anytime(of_mode)
                    for mode, of_mode in pairs.items()
                    if any(budget > 0 for budget in of_mode)
                },
            }
    return differences
