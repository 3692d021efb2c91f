"""Budgets as people write them: numbers of thinking tokens, `none`, and the names of levels."""

import re
from collections.abc import Iterator, Mapping

from bacr_jax.config.cli import whole_number
from bacr_jax.config.schema import Config
from bacr_jax.config.values import shown
from bacr_jax.errors import UserError

# A budget that the policy is not told; it then thinks up to budget.cap tokens.
NONE = "none"
# Names of budgets.
_LEVEL = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
# Lengths are 32-bit numbers on the device.
LARGEST = 2**31 - 1


def read_budgets(text: str, *, option: str, levels: Mapping[str, int]) -> list[int | None]:
    """The budgets of a list such as `low,0,none,1024`, in its order; None stands for `none`.

    Args:
      text: budgets with commas between them.
      option: where they stand, for the refusal.
      levels: tokens by name (`budget.levels`).

    Raises:
      UserError: something that is no budget.
    """
    return [_read_budget(text, word.strip(), option, levels) for word in text.split(",")]


def _read_budget(text: str, word: str, option: str, levels: Mapping[str, int]) -> int | None:
    if word == NONE:
        return None
    number = levels.get(word, whole_number(word, most=LARGEST))
    if number is None:
        known = f"a level ({', '.join(levels)})" if levels else "a level that budget.levels names"
        raise UserError(
            f"{option} {shown(text, quote=False)}: found {shown(word)}; write whole numbers such "
            f"as 512,1024, {NONE}, or {known}"
        )
    return number


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
