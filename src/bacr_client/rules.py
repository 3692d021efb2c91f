"""Parses the budget rules of an exported model folder.

The rules are in the section `thinking` of the folder's config.json. Used by `calls` and by the vLLM
plugin.
"""

import json
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Maximum budget in tokens. Lengths are 32-bit integers on the device.
LARGEST = 2**31 - 1


def read_budget(budget: Any, levels: Mapping[str, int], most: int = LARGEST) -> int | None:
    """Converts a budget to a number of thinking tokens.

    Args:
      budget: an integer, the name of a budget level such as "low", or None or "none" for no budget.
      levels: dict from the name of a budget level to its number of tokens.
      most: maximum budget in tokens.

    Returns:
      The number of tokens, or None for no budget.

    Raises:
      ValueError: if `budget` has any other value, is negative, or is larger than `most`.
    """
    if budget is None:
        return None
    tokens: Any = budget
    if isinstance(budget, str):
        if budget == "none":
            return None
        tokens = levels.get(budget)
    # Exclude bool, which is a subclass of int.
    is_whole = isinstance(tokens, numbers.Integral) and not isinstance(tokens, bool)
    if not is_whole or not 0 <= tokens <= most:
        level_names = f", or a level ({', '.join(levels)})" if levels else ""
        raise ValueError(
            f"budget: expected a whole number from 0 to {most}, none{level_names}, but found "
            f"{budget!r:.80}"
        )
    return int(tokens)


def numbers_in(text: str) -> list[int]:
    """Expands a string of numbers and inclusive ranges, so that "3 7-9" becomes [3, 7, 8, 9]."""
    expanded: list[int] = []
    for part in text.split():
        low, _, high = part.partition("-")
        last = int(high or low)
        expanded += range(int(low), last + 1)
    return expanded


@dataclass(frozen=True)
class StopString:
    """A stop string, represented as a finite automaton over token ids.

    The automaton starts in state 0 and detects the stop string regardless of how it is tokenized.

    Attributes:
      text: the stop string, or "" if the segment has no stop string.
      anywhere: maps a token to the next state, from any state. Tokens that are missing lead to
        state 0.
      inside: maps a state and a token to the next state. Takes precedence over `anywhere`.
      seen: the accepting state, which is reached after the whole stop string.
    """

    text: str
    anywhere: Mapping[int, int]
    inside: Mapping[int, Mapping[int, int]]
    seen: int

    def after(self, state: int, token: int) -> int:
        """Returns the next state after reading a token in the given state."""
        jumps = self.inside.get(state, {})
        if token in jumps:
            return jumps[token]
        return self.anywhere.get(token, 0)


def _stop_string(section: Mapping[str, Any]) -> StopString:
    """Parses a stop string from the config.

    Args:
      section: a dict with the keys "string", "states" (number of states) and "jumps". Each jump is
        a list of the source state (None for any state), the target state, and the token ids in the
        format of `numbers_in`.
    """
    anywhere: dict[int, int] = {}
    inside: dict[int, dict[int, int]] = {}
    for source, target, ids in section["jumps"]:
        jumps = anywhere if source is None else inside.setdefault(source, {})
        jumps.update(dict.fromkeys(numbers_in(ids), target))
    return StopString(section["string"], anywhere, inside, section["states"] - 1)


@dataclass(frozen=True)
class BudgetRules:
    """Rules that determine where the thinking and the answer of a response end.

    Attributes:
      think_close: stop string of the thinking.
      answer_close: stop string of the answer.
      ends: ids of the end-of-turn tokens.
      line_breaks: ids of the tokens with a line break, after which the thinking may be truncated
        within the grace window.
      closing: token ids inserted after the thinking if it did not end with its closing tag.
      natural: token ids inserted after the thinking if it ended with its closing tag.
      never: ids of tokens that are never sampled.
      cap: maximum number of thinking tokens if no budget is set.
      grace: length of the grace window: the maximum number of tokens by which the thinking may
        exceed its limit to reach the next line break.
      answer_tokens: maximum number of answer tokens.
      vocab_size: number of token ids.
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
        """Returns the maximum number of thinking tokens, excluding the grace window.

        Args:
          budget: thinking budget in tokens, or None for no budget.
        """
        return self.cap if budget is None else budget

    def longest(self, budget: int | None) -> int:
        """Returns the maximum number of tokens in a response, including inserted tokens.

        Args:
          budget: thinking budget in tokens, or None for no budget.
        """
        grace = self.grace if self.limit(budget) else 0
        forced = max(len(self.closing), len(self.natural))
        return self.limit(budget) + grace + forced + self.answer_tokens


def read_rules(thinking: Mapping[str, Any], vocab_size: int = LARGEST) -> BudgetRules:
    """Parses the rules from the section `thinking` of a config.

    Args:
      thinking: the section.
      vocab_size: number of token ids.

    Raises:
      KeyError: if a required key is missing.
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
    """Reads the config of an exported folder.

    Returns:
      A pair of the budget rules and a dict from the name of a budget level to its number of tokens.

    Raises:
      ValueError: if the folder was not exported by this project, or its config is malformed.
    """
    try:
        config = json.loads((Path(folder) / "config.json").read_text())
        rules = read_rules(config["thinking"], config["vocab_size"])
        return rules, dict(config.get("budget_levels") or {})
    except OSError as error:
        raise ValueError(
            f"{folder}: the file config.json can't be read ({error.strerror}); use a folder that "
            "bacr export wrote"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(
            f"{folder}: the file config.json has no valid section 'thinking', which describes how "
            "budgets are enforced; use a folder that bacr export wrote"
        ) from None
