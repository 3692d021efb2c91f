"""The section `thinking` of an exported folder's config.json, for whoever holds its budgets."""

import json
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The largest number that is a budget: lengths are 32-bit numbers on the device.
LARGEST = 2**31 - 1


def read_budget(budget: Any, levels: Mapping[str, int], most: int = LARGEST) -> int | None:
    """Thinking tokens of a whole number, the name of a level, None or "none"; None: no budget.

    ValueError: something else, or more than `most`.
    """
    if budget is None or (isinstance(budget, str) and budget == "none"):
        return None
    found: Any = levels.get(budget) if isinstance(budget, str) else budget
    # True is a number for Python.
    whole = isinstance(found, numbers.Integral) and not isinstance(found, bool)
    if not whole or not 0 <= found <= most:
        known = f", or a level ({', '.join(levels)})" if levels else ""
        raise ValueError(
            f"budget: found {budget!r:.80}; write a whole number from 0 to {most}, none{known}"
        )
    return int(found)


def numbers_in(text: str) -> list[int]:
    """The numbers of `3 7-9`: 3, 7, 8 and 9."""
    ends = [part.partition("-") for part in text.split()]
    return [n for low, _, high in ends for n in range(int(low), int(high or low) + 1)]


@dataclass(frozen=True)
class StopString:
    """A string that ends something, and its table over tokens.

    Attributes:
      text: the string; empty: it never comes.
      anywhere: state after a token, from any state; state 0 after tokens that it lacks.
      inside: the same from one state, which overrides `anywhere`.
      seen: the state that means that the string was seen.
    """

    text: str
    anywhere: Mapping[int, int]
    inside: Mapping[int, Mapping[int, int]]
    seen: int

    def after(self, state: int, token: int) -> int:
        """The state after a token."""
        return self.inside.get(state, {}).get(token, self.anywhere.get(token, 0))


def _stop_string(section: Mapping[str, Any]) -> StopString:
    anywhere: dict[int, int] = {}
    inside: dict[int, dict[int, int]] = {}
    for source, target, ids in section["jumps"]:
        jumps = anywhere if source is None else inside.setdefault(source, {})
        jumps.update(dict.fromkeys(numbers_in(ids), target))
    return StopString(section["string"], anywhere, inside, section["states"] - 1)


@dataclass(frozen=True)
class Rules:
    """How thinking and answer end, and what is forced between them.

    Attributes:
      line_breaks: ids at which a cut inside the grace window may fall.
      closing: ids forced after thinking that was cut or left open.
      natural: ids forced after thinking that closed itself.
      cap: most thinking tokens of a row without a budget.
      grace: tokens for which a cut waits for a line break.
      vocab_size: ids are below it.
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
        """Most thinking tokens under a budget, or without one; the grace window comes on top."""
        return self.cap if budget is None else budget

    def longest(self, budget: int | None) -> int:
        """Most tokens that come after a prompt."""
        grace = self.grace if self.limit(budget) else 0
        forced = max(len(self.closing), len(self.natural))
        return self.limit(budget) + grace + forced + self.answer_tokens


def read_rules(thinking: Mapping[str, Any], vocab_size: int = LARGEST) -> Rules:
    """The rules that a section `thinking` holds; KeyError: one of them is missing."""
    return Rules(
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


def read_folder(folder: Path | str) -> tuple[Rules, dict[str, int]]:
    """Rules and named budgets of an exported folder; ValueError: it is none of ours, or damaged."""
    try:
        config = json.loads((Path(folder) / "config.json").read_text())
        rules = read_rules(config["thinking"], config["vocab_size"])
        return rules, dict(config.get("budget_levels") or {})
    except OSError as error:
        raise ValueError(f"{folder}: can't read its config.json ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(
            f"{folder}: its config.json does not say how thinking is held; write a folder of "
            "bacr export"
        ) from None
