"""The config that small runs of tests share."""

from pathlib import Path

from bacr_jax.config import io as config_io

SMALL = Path(__file__).with_name("small.yaml")


def small_config(folder, changes, *overrides, over=()):
    """Its settings with a text of YAML over them, then other files, then overrides."""
    path = folder / "changes.yaml"
    path.write_text(changes)
    return config_io.load([SMALL, path, *over], list(overrides))
