"""Compares a config with the settings prescribed by its method's publication."""

import functools
from collections.abc import Mapping
from typing import Any

from bacr_jax.config.settings import MethodSettings
from bacr_jax.config.values import written
from bacr_jax.methods.method import Method, Published


def given_by(settings: object, key: str) -> Any:
    """Returns the value of a dotted key in a config or in a record with the same sections."""
    return functools.reduce(getattr, key.split("."), settings)


def departures(config: MethodSettings, method: Method) -> list[str]:
    """Lists settings that differ from the publication, as `KEY=VALUE (published: VALUE)`.

    Args:
      config: config of the run.
      method: method built from the config. If it has no published settings, the list is empty.
    """
    lines = []
    for key, setting in method.published.items():
        value = given_by(config, key)
        if value != setting.value:
            lines.append(f"{key}={written(value)} (published: {written(setting.value)})")
    return lines


def redefinitions(config: MethodSettings, published: Mapping[str, Published]) -> list[str]:
    """Returns an error message for each setting that would turn the method into a different one."""
    lines = []
    for key, setting in published.items():
        value = given_by(config, key)
        if not setting.defining or value == setting.value:
            continue
        lines.append(
            f"{key}={written(value)}: the definition of method={config.method} requires "
            f"{written(setting.value)}; set {key}={written(setting.value)}, as in "
            f"configs/methods/{config.method}.yaml"
        )
    return lines


def unverified(method: Method) -> list[str]:
    """Returns the config keys whose prescribed values were not checked against the publication."""
    return [key for key, setting in method.published.items() if not setting.verified]
