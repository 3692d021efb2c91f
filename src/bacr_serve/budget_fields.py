"""Parses the fields of a request that set its thinking budget.

OpenAI-compatible clients use different fields for the budget. All of them are supported, and
contradictory fields are rejected. `fields` calls this module.
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
      body: JSON body of the request. A null field counts as missing.
      levels: dict from the name of each budget level to its tokens (config key `budget.levels`).
      default: budget of a request without a budget field, or None for no budget.
      most: maximum budget in tokens.

    Raises:
      RequestError: if a field is invalid, or if two fields set different budgets.
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
    """Parses the object in the field `reasoning`.

    Returns:
      A dict from the full name of a field, such as "reasoning.effort", to its budget.
    """
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
    """Parses a budget: a number of tokens, the name of a level, or "none" for no budget."""
    # Some clients write whole numbers in JSON as 512.0.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    try:
        return read_budget(value, levels, most)
    except ValueError as error:
        raise invalid(name, str(error).removeprefix("budget: ")) from None


def _effort(name: str, value: Any, levels: Mapping[str, int], most: int) -> int | None:
    """Parses a reasoning effort: the name of a level, or OpenAI's "none" for a budget of 0."""
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
