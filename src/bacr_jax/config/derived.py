"""Computes values that depend on several config keys.

Examples are the budgets that `budget.prior` can sample, the evaluation set that selects the best
checkpoint, and the dtype of the model's weights.
"""

from collections.abc import Iterable, Mapping, Sequence

from bacr_client.rules import LARGEST as LARGEST
from bacr_jax.config.cli import whole_number
from bacr_jax.config.method_settings import BudgetConfig, RewardConfig
from bacr_jax.config.paths import split_weight
from bacr_jax.config.schema import AdapterConfig, DataConfig, EvalConfig, ModelConfig
from bacr_jax.config.values import shown
from bacr_jax.errors import UserError


def mixture(spec: str | Sequence[str]) -> list[tuple[float, str]]:
    """Parses a data set or a mixture of data sets, as in `data.train`.

    Args:
      spec: one set or a list of sets, each written as SET or WEIGHT*SET.

    Returns:
      A pair (weight, set) for each entry. The weight defaults to 1.
    """
    weighted_sets = []
    for name in [spec] if isinstance(spec, str) else spec:
        weight, bare_set = split_weight(name)
        if weight:
            weighted_sets.append((float(weight.replace("*", "")), bare_set.strip()))
        else:
            weighted_sets.append((1.0, name))
    return weighted_sets


def builtin_vocab(data: DataConfig) -> str | None:
    """Returns the name of the built-in tokenizer for the data: `ledger` or `characters`.

    Returns None if the tokenizer is loaded from a Hugging Face folder instead.
    """
    if data.train == "ledger":
        return "ledger"
    return "characters" if data.prompt_format == "characters" else None


# Name of the built-in correctness reward in `reward.weights`.
CORRECT = "correct"


def reward_shares(reward: RewardConfig) -> dict[str, float]:
    """Returns the normalized weights of the rewards, keyed by their names in `reward.weights`.

    The weights sum to 1. If there are fewer than two rewards, the result is empty, and only
    correctness is rewarded.
    """
    weights = reward.weights
    total = sum(weights.values())
    return {} if len(weights) < 2 else {name: x / total for name, x in weights.items()}


def function_name(spec: str) -> str:
    """Returns the name under which metrics report a reward: `function` for FILE.py:function."""
    return spec.rpartition(":")[2]


# Value that users write in place of a budget if the policy should receive no budget. The policy may
# then think for up to budget.cap tokens.
NONE = "none"


def read_budgets(text: str, *, option: str, levels: Mapping[str, int]) -> list[int | None]:
    """Parses a comma-separated list of budgets, such as `low,0,none,1024`.

    Args:
      text: the list. Each item is a number of tokens, a name from `levels`, or `none`.
      option: the command-line option that contains the list, for the error message.
      levels: the value of `budget.levels`, which maps names to budgets in tokens.

    Returns:
      The budgets in tokens, with None for `none`.

    Raises:
      UserError: if an item is not a budget.
    """
    budgets: list[int | None] = []
    for word in map(str.strip, text.split(",")):
        number = None if word == NONE else levels.get(word, whole_number(word, most=LARGEST))
        if number is None and word != NONE:
            level = "a level that budget.levels names"
            if levels:
                level = f"a level ({', '.join(levels)})"
            raise UserError(
                f"{option} {shown(text, quote=False)}: found {shown(word)}; use whole numbers "
                f"such as 512,1024, {NONE}, or {level}"
            )
        budgets.append(number)
    return budgets


def cap(budget: BudgetConfig) -> int:
    """Returns the maximum number of thinking tokens if the policy receives no budget."""
    return budget.max if budget.cap is None else budget.cap


def drawn(budget: BudgetConfig, evaluated: Sequence[int]) -> tuple[int, ...]:
    """Returns the budgets from which `budget.prior=choices` samples.

    These are `budget.choices`, which are not validated here. If `budget.choices` is empty, they are
    all `eval.budgets` between `budget.min` and `budget.max`.

    Args:
      budget: section `budget` of the config.
      evaluated: `eval.budgets`.
    """
    return budget.choices or tuple(b for b in evaluated if budget.min <= b <= budget.max)


def all_budgets(budget: BudgetConfig, evaluated: Sequence[int]) -> tuple[int, ...]:
    """Returns all budgets of training and evaluation in tokens, in increasing order.

    Args:
      budget: section `budget` of the config.
      evaluated: `eval.budgets`.
    """
    training_budgets: Iterable[int] = range(budget.min, budget.max + 1)
    if budget.prior == "choices":
        training_budgets = drawn(budget, evaluated)
    return tuple(sorted({*training_budgets, budget.max, *evaluated}))


def prior_range(budget: BudgetConfig, evaluated: Sequence[int]) -> tuple[int, int]:
    """Returns the smallest and the largest budget that `budget.prior` can sample.

    Args:
      budget: section `budget` of the config.
      evaluated: `eval.budgets`.
    """
    choices = drawn(budget, evaluated)
    if budget.prior == "choices" and choices:
        return min(choices), max(choices)
    return budget.max if budget.prior == "fixed" else budget.min, budget.max


def largest_evaluated(budget: BudgetConfig, evaluation: EvalConfig) -> int:
    """Returns the maximum number of thinking tokens in an evaluation, without the grace window."""
    caps = [cap(budget)] if evaluation.no_budget else []
    return max([*evaluation.budgets, *caps], default=budget.max)


# Name of the evaluation set of held-out training questions.
HOLDOUT = "train_holdout"


def matching_sets(select: str, evaluated: Sequence[str]) -> list[str]:
    """Returns the evaluation sets that match `eval.select`, exactly one if it is valid.

    Args:
      select: value of `eval.select`.
      evaluated: value of `data.eval`. An entry NAME:PATH matches if it equals `select`. If no entry
        equals `select`, all entries match whose NAME equals `select`.
    """
    exact_matches = [spec for spec in evaluated if spec == select]
    return exact_matches or [spec for spec in evaluated if spec.partition(":")[0] == select]


def selection_set(evaluation: EvalConfig, data: DataConfig) -> str | None:
    """Returns the name of the evaluation set whose accuracy selects the best checkpoint.

    The selected checkpoint is recorded in best.json. The result is None if `eval.select` names the
    held-out training questions, but only the last checkpoint is evaluated (`eval.every` is None). A
    selection is then not needed.
    """
    if evaluation.select == HOLDOUT:
        return None if evaluation.every is None else HOLDOUT
    return matching_sets(evaluation.select, data.eval)[0]


def samples_of(config: EvalConfig, spec: str) -> int:
    """Returns the number of answers to sample per problem of an evaluation set.

    Args:
      config: the settings of the evaluation.
      spec: the set as written in `data.eval`. `eval.samples` may contain either the full spec or
        only the part before the colon.
    """
    samples = config.samples
    if isinstance(samples, int):
        return samples
    return samples[spec if spec in samples else spec.partition(":")[0]]


def param_dtype(model: ModelConfig, adapter: AdapterConfig) -> str:
    """Returns the dtype of the model's weights.

    Trained weights default to float32. The frozen base of adapters defaults to
    `model.compute_dtype`, while the adapters themselves are always float32.
    """
    if model.param_dtype is not None:
        return model.param_dtype
    return "float32" if adapter.rank is None else model.compute_dtype
