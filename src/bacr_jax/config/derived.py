"""Values that follow from several keys: budgets, the checkpoint that counts, adapters' matrices."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

from bacr_client.rules import LARGEST as LARGEST
from bacr_jax.config.cli import whole_number
from bacr_jax.config.schema import Config, DataConfig, EvalConfig
from bacr_jax.config.values import shown, written
from bacr_jax.errors import UserError

# A set of a mixture with its weight: 2*gym:gcd.
_WEIGHED = re.compile(r"(\d+(?:\.\d+)?)\*(.+)")


def mixture(spec: str | Sequence[str]) -> list[tuple[float, str]]:
    """Weight and name of each set of data.train, or of another set; one that says none weighs 1."""
    found = []
    for name in [spec] if isinstance(spec, str) else spec:
        match = _WEIGHED.fullmatch(name)
        found.append((float(match[1]), match[2].strip()) if match else (1.0, name))
    return found


def warmup_config(config: Config) -> Config:
    """Returns the config of a run's warm-up: `warmup.seed`, if it is set, is its seed."""
    seed = config.seed if config.warmup.seed is None else config.warmup.seed
    warmup = dataclasses.replace(config.warmup, seed=None)
    return dataclasses.replace(config, seed=seed, warmup=warmup)


def own_tokens(data: DataConfig) -> str | None:
    """The tokenizer of a model made from scratch, ledger or characters; None: a folder's."""
    if data.train == "ledger":
        return "ledger"
    return "characters" if data.prompt_format == "characters" else None


# The name of correctness among the rewards of reward.weights.
CORRECT = "correct"


def reward_shares(config: Config) -> dict[str, float]:
    """What training credits of each reward, in all 1; correctness alone: empty.

    By what reward.weights calls them: CORRECT, and FILE.py:function.
    """
    weights = config.reward.weights
    total = sum(weights.values())
    return {} if len(weights) < 2 else {name: x / total for name, x in weights.items()}


def function_name(spec: str) -> str:
    """What a reward is called in metrics: its function, without the file."""
    return spec.rpartition(":")[2]


# A budget that the policy is not told; it then thinks up to budget.cap tokens.
NONE = "none"
# Names of budgets.
_LEVEL = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def read_budgets(text: str, *, option: str, levels: Mapping[str, int]) -> list[int | None]:
    """The budgets of a list such as `low,0,none,1024`, in its order; None stands for `none`.

    `option` is where they stand, for the refusal (a UserError); `levels` are `budget.levels`.
    """
    found: list[int | None] = []
    for word in map(str.strip, text.split(",")):
        number = None if word == NONE else levels.get(word, whole_number(word, most=LARGEST))
        if number is None and word != NONE:
            known = ", ".join(levels)
            level = f"a level ({known})" if levels else "a level that budget.levels names"
            raise UserError(
                f"{option} {shown(text, quote=False)}: found {shown(word)}; write whole numbers "
                f"such as 512,1024, {NONE}, or {level}"
            )
        found.append(number)
    return found


def cap(config: Config) -> int:
    """Most thinking tokens of a row that is told no budget."""
    return config.budget.max if config.budget.cap is None else config.budget.cap


def drawn(config: Config) -> tuple[int, ...]:
    """What budget.prior=choices draws from: budget.choices, or what is evaluated within its range.

    A list of its own is given as it is, good or not.
    """
    budget = config.budget
    asked = tuple(b for b in config.eval.budgets if budget.min <= b <= budget.max)
    return budget.choices or asked


def prior_range(config: Config) -> tuple[int, int]:
    """The least and the largest budget that budget.prior draws."""
    budget, choices = config.budget, drawn(config)
    if budget.prior == "choices" and choices:
        return min(choices), max(choices)
    return budget.max if budget.prior == "fixed" else budget.min, budget.max


def largest_evaluated(config: Config) -> int:
    """Most thinking tokens that an evaluation allows, a grace window aside."""
    without = [cap(config)] if config.eval.no_budget else []
    return max([*config.eval.budgets, *without], default=config.budget.max)


def level_problems(config: Config) -> Iterator[str]:
    """Names of budgets that can not be told from numbers, or from no budget."""
    for name in config.budget.levels:
        if not _LEVEL.fullmatch(name) or name == "none":
            yield (
                f"budget.levels: found the name {name!r}; write a letter, then letters, digits, "
                "- and _, and not none"
            )


# Held-out training questions, as a set beside those of data.eval.
HOLDOUT = "train_holdout"


def _named(config: Config) -> list[str]:
    """Sets of data.eval that eval.select names: by the whole entry, or what is before its colon."""
    name = config.eval.select
    whole = [spec for spec in config.data.eval if spec == name]
    return whole or [spec for spec in config.data.eval if spec.partition(":")[0] == name]


def selection_set(config: Config) -> str | None:
    """The set that best.json is chosen on, as evaluations call it.

    None where held-out questions would choose but only the last checkpoint is evaluated: there is
    nothing to choose from.
    """
    if config.eval.select == HOLDOUT:
        return None if config.eval.every is None else HOLDOUT
    return _named(config)[0]


def selection_problems(config: Config) -> Iterator[str]:
    """What is wrong with eval.select and eval.holdout."""
    select, named = config.eval.select, _named(config)
    if select == HOLDOUT:
        if config.eval.every is not None and not config.eval.holdout:
            yield (
                f"eval.holdout=0: leaves eval.select={HOLDOUT} no question to select on; write 1 "
                "or more, or a set of data.eval in eval.select"
            )
    elif len(named) != 1:
        found = "none" if not named else "several"
        yield (
            f"eval.select: found {select!r}, which names {found} of data.eval; write {HOLDOUT}"
            + "".join(f" or {spec}" for spec in config.data.eval)
        )


def samples_of(config: EvalConfig, spec: str) -> int:
    """Sampled answers per problem of a set of data.eval, named as in eval.select."""
    samples = config.samples
    if isinstance(samples, int):
        return samples
    return samples[spec if spec in samples else spec.partition(":")[0]]


def samples_problems(config: Config) -> Iterator[str]:
    """Sets of data.eval for which eval.samples says no number."""
    samples = config.eval.samples
    if isinstance(samples, int):
        return
    for spec in config.data.eval:
        name = spec.partition(":")[0]
        if spec not in samples and name not in samples:
            found = f"eval.samples={written(samples)}: has no number for {spec}, a set of data.eval"
            yield f"{found}; write {name}: 4 too, or one number for all sets"


def param_dtype(config: Config) -> str:
    """Type that the model's weights are kept in; what is trained beside a frozen base is fp32."""
    own = config.model.param_dtype
    if own is not None:
        return own
    return "float32" if config.adapter.rank is None else config.model.compute_dtype


def adapter_problems(config: Config) -> Iterator[str]:
    """What is wrong with adapter.* and model.param_dtype."""
    adapter, model = config.adapter, config.model
    if adapter.rank is None:
        if adapter.path is not None:
            yield "adapter.path: found a folder, but adapter.rank=null; write its adapters' rank"
        if model.param_dtype == "bfloat16":
            yield (
                "model.param_dtype=bfloat16: trained weights would lose most of their updates to "
                "rounding; write float32, or adapter.rank=32 to train adapters on a frozen base"
            )
        return
    if not adapter.targets or len(set(adapter.targets)) < len(adapter.targets):
        yield "adapter.targets: write each matrix once, such as [q, v]"
