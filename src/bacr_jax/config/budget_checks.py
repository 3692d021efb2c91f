"""Validates the settings of budgets, truncation points (cuts) and the budget curriculum.

`checks` calls this module.
"""

import math
import re
from collections.abc import Iterator, Sequence

from bacr_jax.config.derived import drawn
from bacr_jax.config.method_settings import BudgetConfig
from bacr_jax.config.settings import MethodSettings
from bacr_jax.config.values import written

_QWEN2_5 = [f"qwen2.5-{size}" for size in ("0.5b", "1.5b", "3b", "7b", "14b", "32b", "72b")]
_QWEN3 = [f"qwen3-{size}" for size in ("0.6b", "1.7b", "4b", "8b", "14b", "32b")]
_R1 = [f"deepseek-r1-distill-qwen-{size}" for size in ("1.5b", "7b")]
# Maps each value of `model.preset` to the maximum number of positions of the released model
# (`max_position_embeddings` in its config.json). model/sizes.py defines the layer sizes.
PRESETS = {
    **dict.fromkeys(_QWEN2_5, 32768),
    **dict.fromkeys(_QWEN3, 40960),
    **dict.fromkeys([*_R1, "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b"], 131072),
    "smollm2-135m": 8192,
}
# Allowed names of budgets in `budget.levels`.
_LEVEL = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def budget_problems(settings: MethodSettings, vocab: str | None) -> Iterator[str]:
    """Yields an error message for each conflict between settings that concern budgets.

    These settings are the budgets, truncation points (cuts), maximum lengths and the curriculum.

    Args:
      settings: sections of the config that concern budgets.
      vocab: name of the built-in tokenizer, or None.
    """
    budget = settings.budget
    cuts = settings.cuts
    model = settings.model
    budgets = settings.evaluated
    if budget.min > budget.max:
        yield (
            f"budget.min={budget.min} is above budget.max={budget.max}; set it to at most "
            f"{budget.max}"
        )
    if budget.prior == "choices":
        yield from _choices(budget, settings.budget_choices, budgets)
    yield from level_problems(budget)
    if budget.shuffle_input and settings.conditioning.budget_input == "none":
        yield (
            "budget.shuffle_input=true shuffles the budgets that the policy receives as input, "
            "but the policy receives none; set conditioning.budget_input=embedding, or "
            "budget.shuffle_input=false"
        )
    yield from _stages(budget)
    if budget.grace and vocab:
        yield (
            f"budget.grace={budget.grace} extends the thinking to the next line break, but the "
            f"tokens of {vocab} contain no line break; set budget.grace=0"
        )
    if cuts.count > budget.min:
        yield (
            f"cuts.count={cuts.count}: a trace of budget.min={budget.min} tokens can't have that "
            f"many distinct truncation points; set it to at most {budget.min}, or increase "
            "budget.min"
        )
    if isinstance(cuts.weights, tuple):
        total = math.fsum(cuts.weights)
        if len(cuts.weights) != cuts.count:
            yield (
                f"cuts.weights has {len(cuts.weights)} weights, but cuts.count={cuts.count}; list "
                "one weight per cut (truncation point)"
            )
        elif abs(total - 1.0) > 1e-4:
            yield f"cuts.weights: the weights sum to {total:g}; use weights that sum to 1"
    if not budgets:
        yield f"eval.budgets: the list is empty; use budgets such as [{budget.max}]"
    elif list(budgets) != sorted(set(budgets)):
        yield (
            f"eval.budgets: found {written(budgets)}; list every budget once, in increasing "
            f"order: {written(tuple(sorted(set(budgets))))}"
        )
    answers = settings.rollout.answer_tokens
    longest = (
        settings.data.max_prompt_tokens + max(budget.max, *budgets, 1) + budget.grace + answers
    )
    most_positions = PRESETS.get(model.preset, longest)
    if longest > most_positions:
        yield (
            f"budget.max={budget.max}, eval.budgets={written(budgets)}: with "
            f"data.max_prompt_tokens={settings.data.max_prompt_tokens} and "
            f"rollout.answer_tokens={answers}, a prompt with its response may have {longest} "
            f"tokens, but {model.preset} supports at most {most_positions}; use smaller budgets "
            "or fewer tokens"
        )
    locations = settings.curriculum.mu0
    groups = settings.data.num_groups
    if isinstance(locations, tuple) and len(locations) != groups:
        yield (
            f"curriculum.mu0 has {len(locations)} values, but data.num_groups={groups}; use one "
            "number, or one per difficulty group"
        )


def budget_warnings(budget: BudgetConfig, evaluated: Sequence[int]) -> Iterator[str]:
    """Yields a warning for each budget that `budget.prior=choices` never samples.

    Such a budget is valid, for example to evaluate longer thinking than was trained, so it is not
    an error. The budget 0 is never trained, and causes no warning.

    Args:
      budget: section `budget` of the config.
      evaluated: `eval.budgets`.
    """
    trained = drawn(budget, evaluated)
    if budget.prior != "choices" or not trained:
        return
    # If the user lists the trained budgets, the evaluated budgets do not affect training.
    untrained = [] if budget.choices else [b for b in evaluated if b and b not in trained]
    if untrained:
        new_range = []
        if min(untrained) < budget.min:
            new_range.append(f"budget.min={min(untrained)}")
        if max(untrained) > budget.max:
            new_range.append(f"budget.max={max(untrained)}")
        yield (
            f"eval.budgets={written(tuple(evaluated))}: no trace is trained at "
            f"{', '.join(map(str, untrained))}, because only budgets from "
            f"budget.min={budget.min} to budget.max={budget.max} are trained; set "
            f"{' '.join(new_range)} to train at all of them"
        )
    if max(trained) < budget.max and max(evaluated) <= budget.max:
        key = "budget.choices" if budget.choices else "eval.budgets"
        longer = written((*trained, budget.max) if budget.choices else (*evaluated, budget.max))
        yield (
            f"budget.max={budget.max}: the largest trained budget is {max(trained)}, because "
            f"budget.prior=choices samples from {key}; set {key}={longer} to train at "
            f"{budget.max}, or budget.max={max(trained)}"
        )


def level_problems(budget: BudgetConfig) -> Iterator[str]:
    """Yields an error message for each invalid name in `budget.levels`.

    `budget.levels` maps names such as `low` to budgets in tokens. A name must start with a letter
    and must not be `none`, so that it can't be confused with a number or with the word for no
    budget.
    """
    for name in budget.levels:
        if not _LEVEL.fullmatch(name) or name == "none":
            yield (
                f"budget.levels: {name!r} is not a valid name of a budget; use a letter followed "
                "by letters, digits, - and _, but not `none`"
            )


def _stages(budget: BudgetConfig) -> Iterator[str]:
    """Yields an error message if a stage of `budget.stages` has only budgets below `budget.min`."""
    for fraction in budget.stages:
        limit = round(fraction * budget.max)
        if limit < budget.min:
            yield (
                f"budget.stages={written(budget.stages)}: {written(fraction)} of "
                f"budget.max={budget.max} is {limit} tokens, which is below "
                f"budget.min={budget.min}; use fractions of at least "
                f"{math.ceil(1e3 * budget.min / budget.max) / 1e3:g}"
            )
            return


def _choices(
    budget: BudgetConfig, choices: tuple[int, ...], evaluated: Sequence[int]
) -> Iterator[str]:
    """Yields an error message if the list of budgets for `budget.prior=choices` is invalid.

    The budgets must be between `budget.min` and `budget.max`, unique and in increasing order.
    """
    rising = tuple(sorted(set(choices)))
    within = tuple(b for b in rising if budget.min <= b <= budget.max)
    # In both cases there is no budget to choose from, and another check reports the cause.
    if budget.min > budget.max or not (budget.choices or evaluated):
        return
    if not rising:
        yield (
            "budget.choices: the list is empty, which means the eval.budgets between budget.min "
            "and budget.max, but none lies between them; use budgets such as "
            f"[{written(budget.min)}, {written(budget.max)}]"
        )
    elif within != rising:
        outside = next(b for b in rising if b not in within)
        yield (
            f"budget.choices: {outside} is not between budget.min={budget.min} and "
            f"budget.max={budget.max}; use {written(within or (budget.min, budget.max))}, or "
            "change the range"
        )
    elif choices != rising:
        yield (
            f"budget.choices: found {written(choices)}; list every budget once, in increasing "
            f"order: {written(rising)}"
        )
