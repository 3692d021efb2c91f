"""Reads the budget rules of an exported folder: the section `thinking` of its config.json.

Used by `calls` and by the vLLM plugin.
"""

import json
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The largest budget, because lengths are 32-bit numbers on the device.
LARGEST = 2**31 - 1


def read_budget(budget: Any, levels: Mapping[str, int], most: int = LARGEST) -> int | None:
    """Returns a budget as a number of thinking tokens.

    Args:
      budget: a whole number, the name of a level, None or "none".
      levels: the named budgets.
      most: the largest budget.

    Returns:
      The number of tokens, or None for no budget.

    Raises:
      ValueError: `budget` is something else, or more than `most`.
    """
    if budget is None:
        return None
    tokens: Any = budget
    if isinstance(budget, str):
        if budget == "none":
            return None
        tokens = levels.get(budget)
    # True is an integer in Python.
    is_whole = isinstance(tokens, numbers.Integral) and not isinstance(tokens, bool)
    if not is_whole or not 0 <= tokens <= most:
        level_names = f", or a level ({', '.join(levels)})" if levels else ""
        raise ValueError(
            f"budget: found {budget!r:.80}; write a whole number from 0 to {most}, "
            f"none{level_names}"
        )
    return int(tokens)


def numbers_in(text: str) -> list[int]:
    """Expands a list of numbers and ranges: `3 7-9` is 3, 7, 8 and 9."""
    expanded: list[int] = []
    for part in text.split():
        low, _, high = part.partition("-")
        last = int(high or low)
        expanded += range(int(low), last + 1)
    return expanded


@dataclass(frozen=True)
class StopString:
    """A stop string as an automaton over tokens.

    Attributes:
      text: the string; empty if nothing stops.
      anywhere: the next state by token, from any state. A token that is missing leads to state 0.
      inside: the next states by state and token; they take precedence over `anywhere`.
      seen: the state after the whole string.
    """

    text: str
    anywhere: Mapping[int, int]
    inside: Mapping[int, Mapping[int, int]]
    seen: int

    def after(self, state: int, token: int) -> int:
        """Returns the state that follows a state and a token."""
        jumps = self.inside.get(state, {})
        if token in jumps:
            return jumps[token]
        return self.anywhere.get(token, 0)


def _stop_string(section: Mapping[str, Any]) -> StopString:
    """Reads a stop string, whose jumps are lists of source state or null, target state, ids."""
    anywhere: dict[int, int] = {}
    inside: dict[int, dict[int, int]] = {}
    for source, target, ids in section["jumps"]:
        jumps = anywhere if source is None else inside.setdefault(source, {})
        jumps.update(dict.fromkeys(numbers_in(ids), target))
    return StopString(section["string"], anywhere, inside, section["states"] - 1)


@dataclass(frozen=True)
class BudgetRules:
    """Ids and lengths that end thinking and answer, and the ids forced between them.

    Attributes:
      think_close: stop string of the thinking.
      answer_close: stop string of the answer.
      ends: ids that end the turn.
      line_breaks: ids at which thinking may be cut in the grace window.
      closing: ids forced after thinking that was cut or left open.
      natural: ids forced after thinking that ended with its tag.
      never: ids that are never sampled.
      cap: largest number of thinking tokens without a budget.
      grace: tokens for which a cut waits for a line break.
      answer_tokens: largest number of answer tokens.
      vocab_size: number of ids.
    """

    think_close: StopString
    answer_close: StopString
    ends: frozenset[int]
    line_breaks: frozenset[int]
    closing: tuple[int, ...]
    natural: tuple[int, ...]
    never: frozenset[int]
    cap: int
    grace: int
    answer_tokens: int
    vocab_size: int = LARGEST

    def limit(self, budget: int | None) -> int:
        """Returns the largest number of thinking tokens, without the grace window.

        Args:
          budget: the budget in tokens, or None.
        """
        return self.cap if budget is None else budget

    def longest(self, budget: int | None) -> int:
        """Returns the largest number of tokens of a response."""
        grace = self.grace if self.limit(budget) else 0
        forced = max(len(self.closing), len(self.natural))
        return self.limit(budget) + grace + forced + self.answer_tokens


def read_rules(thinking: Mapping[str, Any], vocab_size: int = LARGEST) -> BudgetRules:
    """Reads the rules from the section `thinking` of a config.

    Raises:
      KeyError: the section lacks an entry.
    """
    return BudgetRules(
        think_close=_stop_string(thinking["think_close"]),
        answer_close=_stop_string(thinking["answer_close"]),
        ends=frozenset(thinking["end_ids"]),
        line_breaks=frozenset(numbers_in(thinking.get("line_breaks") or "")),
        closing=tuple(thinking["closing_ids"]),
        natural=tuple(thinking["answer_ids"]),
        never=frozenset(numbers_in(thinking["never_sampled"])),
        cap=thinking["cap"],
        grace=thinking["grace"],
        answer_tokens=thinking["answer_tokens"],
        vocab_size=vocab_size,
    )


def read_folder(folder: Path | str) -> tuple[BudgetRules, dict[str, int]]:
    """Reads the rules and the named budgets of an exported folder.

    Raises:
      ValueError: the folder was not exported by this project, or its config is damaged.
    """
    try:
        config = json.loads((Path(folder) / "config.json").read_text())
        rules = read_rules(config["thinking"], config["vocab_size"])
        return rules, dict(config.get("budget_levels") or {})
    except OSError as error:
        raise ValueError(f"{folder}: can't read its config.json ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(
            f"{folder}: its config.json has no valid section 'thinking'; write a folder of "
            "bacr export"
        ) from None
