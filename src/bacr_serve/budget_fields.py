"""Maps the fields of a request that limit the thinking to one budget in tokens.

Clients write the same wish in several ways. All of them are accepted, and contradictory fields are
refused. Pure functions, called by `fields`.
"""

from collections.abc import Mapping
from typing import Any

from bacr_client import read_budget
from bacr_serve.errors import RequestError, invalid, short

# Fields whose value is a number of tokens, the name of a level, or "none".
NUMBERS = ("budget", "thinking_budget", "thinking_token_budget")
EFFORT = "reasoning_effort"
REASONING = "reasoning"
_NO_BUDGET = "none"


def read_budget_fields(
    body: Mapping[str, Any],
    *,
    levels: Mapping[str, int],
    default: int | None,
    most: int,
) -> int | None:
    """Returns the thinking budget of a request in tokens, or None for no budget.

    Args:
      body: the request. A field that is null counts as missing.
      levels: budgets in tokens by the name of their level (`budget.levels`).
      default: budget of a request without any of the fields.
      most: largest budget.

    Raises:
      RequestError: a field is invalid, or two fields have different values.
    """
    budgets: dict[str, int | None] = {}
    for name in NUMBERS:
        if body.get(name) is not None:
            budgets[name] = _number(name, body[name], levels, most)
    if body.get(EFFORT) is not None:
        budgets[EFFORT] = _effort(EFFORT, body[EFFORT], levels, most)
    if body.get(REASONING) is not None:
        budgets |= _reasoning(body[REASONING], levels, most)
    if not budgets:
        return default
    (first, budget), *others = budgets.items()
    for name, other in others:
        if other != budget:
            message = (
                f"{first} is {_text(budget)}, but {name} is {_text(other)}; send only one of the "
                "two fields"
            )
            raise RequestError(400, message, param=name, code="contradictory_budgets")
    return budget


def _reasoning(value: Any, levels: Mapping[str, int], most: int) -> dict[str, int | None]:
    """Returns the budgets of the fields in `reasoning`, by their full names."""
    if not isinstance(value, dict):
        raise invalid(
            REASONING, f'expected an object such as {{"max_tokens": 512}}, but found {short(value)}'
        )
    budgets: dict[str, int | None] = {}
    for key, item in value.items():
        name = f"{REASONING}.{key}"
        if item is None:
            continue
        if key == "max_tokens":
            budgets[name] = _number(name, item, {}, most)
        elif key == "effort":
            budgets[name] = _effort(name, item, levels, most)
        else:
            raise invalid(name, "the field is unknown; use max_tokens or effort")
    return budgets


def _number(name: str, value: Any, levels: Mapping[str, int], most: int) -> int | None:
    """Returns a budget that is written as a number of tokens, the name of a level, or "none"."""
    # Some clients write whole numbers in JSON as 512.0.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    try:
        return read_budget(value, levels, most)
    except ValueError as error:
        raise invalid(name, str(error).removeprefix("budget: ")) from None


def _effort(name: str, value: Any, levels: Mapping[str, int], most: int) -> int | None:
    """Returns the budget of an effort. "none" is OpenAI's name for an answer without thinking."""
    if not isinstance(value, str):
        raise invalid(name, f"expected the name of a level, but found {short(value)}")
    if value in levels:
        return _number(name, value, levels, most)
    if value == _NO_BUDGET:
        return 0
    advice = (
        f"use {', '.join(levels)} or {_NO_BUDGET}"
        if levels
        else (
            f"this policy has no levels; use {_NO_BUDGET}, or set a number of tokens in the field "
            "'budget' (the config's budget.levels defines levels)"
        )
    )
    raise invalid(name, f"found {short(value)}; {advice}")


def _text(budget: int | None) -> str:
    return _NO_BUDGET if budget is None else str(budget)
