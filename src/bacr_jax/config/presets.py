"""Finds the method preset that a config follows, by comparing its values.

A preset is a shipped overlay in configs/methods. A config follows a preset if it has the preset's
method and most of its values, whether or not the preset's file was passed with --config. Runs,
reports and model cards name the preset.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bacr_jax.config import io as config_io
from bacr_jax.config.shipped import OVERLAYS, names, root
from bacr_jax.config.values import written

# Maximum share of a preset's keys that may differ. Beyond it, the preset's name would mislead.
_MOST_CHANGED = 0.25


@dataclass(frozen=True)
class Preset:
    """The preset that a config follows.

    Attributes:
      name: name of the preset, such as `bacr-robust`.
      changes: settings of the config that differ from it, as `KEY=VALUE (bacr-robust: VALUE)`.
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
    """Returns the preset that a config follows; None if it follows none.

    Of several presets, the one with the fewest differences is returned, and of these the one that
    sets the most keys.

    Args:
      values: values of the config, by dotted key.
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
      title: title of the method. It is returned alone if the config follows no preset.
    """
    return title if preset is None else f"{preset.text} ({title})"


@functools.cache
def _presets() -> Mapping[str, Mapping[str, Any]]:
    """Returns the settings of each preset, by its name."""
    return {
        Path(name).name: config_io.read_settings(root() / f"{name}.yaml")
        for name in names((OVERLAYS,))
    }
