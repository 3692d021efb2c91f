"""Two policies on the same problems: differences, paired problem by problem."""

from collections.abc import Mapping
from typing import Any

from bacr_jax.errors import UserError
from bacr_jax.evaluation.intervals import bootstrap_intervals, difference_intervals, stack_scores
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
        if mine[name]["questions"] != theirs["sets"][name]["questions"]:
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
    verdicts = lambda of: stack_scores([of.correct.mean(1), of.strict.mean(1)])
    mine, theirs = verdicts(one), verdicts(other)
    used = lambda of: stack_scores([of.thinking.mean(1), of.total.mean(1)])
    tokens = used(one) - used(other)
    return {
        "accuracy": number(one.correct.mean()),
        "other_accuracy": number(other.correct.mean()),
        **measured(_VERDICTS, mine - theirs, difference_intervals(mine, theirs)),
        **measured(_TOKENS, tokens, bootstrap_intervals(tokens)),
    }


def _anytime(one: Mapping[int, Graded], other: Mapping[int, Graded]) -> dict[str, Any]:
    budgets = sorted(budget for budget in one if budget > 0)
    rates = lambda graded: stack_scores([graded[budget].correct.mean(1) for budget in budgets])
    weights = anytime_weights(budgets).T
    mine, theirs = rates(one) @ weights, rates(other) @ weights
    ends = difference_intervals(mine, theirs)
    return {**measured(_OVER_BUDGETS, mine - theirs, ends), "budgets": budgets}


def _whole_traces(results: Mapping[EvalSetting, Graded]) -> dict[tuple[str, int], Graded]:
    """Samples whose traces were not cut early, by decoding and budget."""
    return {(s.mode, s.budget): graded for s, graded in results.items() if s.cut is None}


def compare(one: Results, other: Results) -> dict[str, Any]:
    """Differences one - other, with 95 % intervals of the paired bootstrap over problems.

    Sets and settings that only one has are left out, and so are traces that were cut early.

    Returns:
      By set: by_budget (by mode and budget), and anytime by mode over the common budgets.
    """
    differences: dict[str, Any] = {}
    for name in one:
        if name not in other:
            continue
        mine, theirs = _whole_traces(one[name]), _whole_traces(other[name])
        shared = [key for key in mine if key in theirs]
        by_budget: dict[str, dict[str, Any]] = {}
        for mode, budget in shared:
            a, b = mine[mode, budget], theirs[mode, budget]
            if a.ids != b.ids:
                raise UserError(f"{name}: the two evaluations are of other problems")
            by_budget.setdefault(mode, {})[budget_key(budget)] = _entry(a, b)
        over = {
            mode: _anytime(
                {b: mine[m, b] for m, b in shared if m == mode},
                {b: theirs[m, b] for m, b in shared if m == mode},
            )
            for mode in by_budget
            if any(m == mode and b > 0 for m, b in shared)
        }
        if by_budget:
            differences[name] = {"by_budget": by_budget, "anytime": over}
    return differences
