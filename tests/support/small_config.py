"""Loads the config that the small training runs of tests share."""

from pathlib import Path

from bacr_jax.config import io as config_io

SMALL = Path(__file__).with_name("small.yaml")


def small_config(folder, changes, *overrides, over=()):
    """Returns the config of `small.yaml` with changes.

    Args:
      folder: folder in which the file `changes.yaml` is written.
      changes: YAML text that overrides `small.yaml`.
      overrides: overrides such as `train.steps=2`, which are applied last.
      over: paths of config files that override `changes`.
    """
    path = folder / "changes.yaml"
    path.write_text(changes)
    return config_io.load([SMALL, path, *over], list(overrides))
