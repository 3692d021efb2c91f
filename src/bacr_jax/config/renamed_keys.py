"""Config keys and values that had other names in earlier commits.

Two callers need the earlier names. A run folder that was written under them can still be read, and
the fingerprint of a config uses them, so that committed results and existing run folders keep their
fingerprints. A config that a user writes must use the current names: `reader` refuses an earlier
name and names the current one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Renamed:
    """Current name of a key, and the current names of those of its values that were renamed.

    Attributes:
      name: current dotted name of the key.
      values: maps each renamed value from its earlier to its current name.
    """

    name: str
    values: Mapping[str, str] = field(default_factory=dict)


# Maps the earlier dotted name of a key to its current name. A key of which only values were renamed
# is listed under its unchanged name.
RENAMED: Mapping[str, Renamed] = {
    "advantage.score_uniform": Renamed("advantage.same_shift_for_batch"),
    "conditioning.told": Renamed(
        "conditioning.budget_input", {"words": "prompt", "nothing": "none"}
    ),
    "conditioning.words": Renamed("conditioning.prompt_text"),
    "cuts.weights": Renamed("cuts.weights", {"own_budget": "last"}),
    "eval.dense": Renamed("eval.cut_every"),
    "length.kept": Renamed("length.keep_fraction"),
    "reward.apart": Renamed("reward.normalize_each"),
    "rollout.ahead": Renamed("rollout.async_steps"),
    "rollout.engine": Renamed("rollout.engine", {"own": "jax"}),
}
# Deleted keys with the only value under which an earlier run means the same without the key.
REMOVED: Mapping[str, Any] = {"rollout.transfer": "folder"}

_EARLIER = {renamed.name: earlier for earlier, renamed in RENAMED.items()}


def current(key: str, value: Any) -> tuple[str, Any]:
    """Translates an earlier key and its value to the current names. Other keys are unchanged.

    Args:
      key: dotted name of a key, as an earlier or the current version writes it.
      value: value of the key, as YAML parses it.
    """
    renamed = RENAMED.get(key)
    if renamed is None:
        return key, value
    is_renamed = isinstance(value, str) and value in renamed.values
    return renamed.name, renamed.values[value] if is_renamed else value


def earlier(key: str, value: Any) -> tuple[str, Any]:
    """Translates a current key and its value to the earlier names: the inverse of `current`."""
    name = _EARLIER.get(key, key)
    if name not in RENAMED or not isinstance(value, str):
        return name, value
    earlier_values = {new: old for old, new in RENAMED[name].values.items()}
    return name, earlier_values.get(value, value)
