"""Finds the method preset that a config follows, by comparing its values.

A preset is a config in configs/methods with the settings of one method. A config follows a preset
if it has the preset's method and most of its values, even if the preset's file was not passed with
--config. Runs, reports and model cards show the name of the preset.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bacr_jax.config import io as config_io
from bacr_jax.config.shipped import OVERLAYS, names, root
from bacr_jax.config.values import written

# Maximum fraction of a preset's keys that may differ, because the name would otherwise mislead.
_MOST_CHANGED = 0.25


@dataclass(frozen=True)
class Preset:
    """The preset that a config follows.

    Attributes:
      name: name of the preset, such as `bacr-robust`.
      changes: settings that differ from the preset, as `KEY=VALUE (bacr-robust: VALUE)`.
    """

    name: str
    changes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Returns the name and the number of changes, such as `bacr-robust with 2 changes`."""
        count = len(self.changes)
        if not count:
            return self.name
        return f"{self.name} with {count} change{'s' if count > 1 else ''}"


def preset_of(values: Mapping[str, Any]) -> Preset | None:
    """Returns the preset that a config follows, or None if it follows none.

    If it follows several presets, the result is the preset with the fewest differences. Among
    presets with equally many differences, the result is the preset that sets the most keys.

    Args:
      values: values of the config, keyed by dotted name.
    """
    best: Preset | None = None
    best_rank = (0, 0)
    for name, settings in _presets().items():
        if settings.get("method") != values["method"]:
            continue
        changes = [
            f"{key}={written(values[key])} ({name}: {written(value)})"
            for key, value in settings.items()
            if values[key] != value
        ]
        if len(changes) > _MOST_CHANGED * len(settings):
            continue
        rank = (len(changes), -len(settings))
        if best is None or rank < best_rank:
            best = Preset(name, tuple(changes))
            best_rank = rank
    return best


def method_text(preset: Preset | None, title: str) -> str:
    """Returns the preset's name and the method's title, such as `bacr-robust (BACR)`.

    Args:
      preset: preset that the run's config follows (`preset_of`), or None.
      title: title of the method. Only the title is returned if the config follows no preset.
    """
    return title if preset is None else f"{preset.text} ({title})"


@functools.cache
def _presets() -> Mapping[str, Mapping[str, Any]]:
    """Returns the settings of each preset, by its name."""
    return {
        Path(name).name: config_io.read_settings(root() / f"{name}.yaml")
        for name in names((OVERLAYS,))
    }
