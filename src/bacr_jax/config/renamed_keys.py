"""Translates config keys and values that had other names in earlier commits.

The earlier names have two uses. Run folders that were written with earlier names can still be read.
The fingerprint of a config is computed with the earlier names, so that committed results and
existing run folders keep their fingerprints. Configs that users write must use the current names.
For an earlier name, `reader` raises an error that contains the current name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Renamed:
    """The current name of a renamed key, and the current names of its renamed values.

    Attributes:
      name: current dotted name of the key.
      values: maps each renamed value from its earlier to its current name.
    """

    name: str
    values: Mapping[str, str] = field(default_factory=dict)


# Maps the earlier dotted name of a key to its current name. If only values of a key were renamed,
# the key is listed with its unchanged name.
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
# Maps each deleted key to its only value that has the same meaning as a config without the key.
REMOVED: Mapping[str, Any] = {"rollout.transfer": "folder"}

_EARLIER = {renamed.name: earlier for earlier, renamed in RENAMED.items()}


def current(key: str, value: Any) -> tuple[str, Any]:
    """Translates an earlier key and its value to the current names. Other keys are unchanged.

    Args:
      key: dotted name of a key, either an earlier or the current name.
      value: value of the key, as YAML parses it.

    Returns:
      A tuple of the current key and the current value.
    """
    renamed = RENAMED.get(key)
    if renamed is None:
        return key, value
    is_renamed = isinstance(value, str) and value in renamed.values
    return renamed.name, renamed.values[value] if is_renamed else value


def earlier(key: str, value: Any) -> tuple[str, Any]:
    """Translates a current key and its value to the earlier names, as the inverse of `current`."""
    name = _EARLIER.get(key, key)
    if name not in RENAMED or not isinstance(value, str):
        return name, value
    earlier_values = {new: old for old, new in RENAMED[name].values.items()}
    return name, earlier_values.get(value, value)
