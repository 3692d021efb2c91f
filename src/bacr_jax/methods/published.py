"""Where a config departs from what its method's publication prescribes (`Method.published`)."""

import functools
from collections.abc import Mapping
from typing import Any

from bacr_jax.config import Config
from bacr_jax.config.values import written
from bacr_jax.methods.method import Method, Published


def given_by(config: Config, key: str) -> Any:
    """The value of a dotted key."""
    return functools.reduce(getattr, key.split("."), config)


def departures(config: Config, method: Method) -> list[str]:
    """Settings that are not the publication's, as `KEY=VALUE (published: VALUE)`.

    Args:
      method: made from it. One that publishes nothing departs from nothing.
    """
    return [
        f"{key}={written(given_by(config, key))} (published: {written(setting.value)})"
        for key, setting in method.published.items()
        if given_by(config, key) != setting.value
    ]


def redefinitions(config: Config, published: Mapping[str, Published]) -> list[str]:
    """One line for each setting under which the method would be another one."""
    return [
        f"{key}={written(given_by(config, key))}: method={config.method} is defined with "
        f"{written(setting.value)}; write {key}={written(setting.value)} "
        f"(configs/methods/{config.method}.yaml has it)"
        for key, setting in published.items()
        if setting.defining and given_by(config, key) != setting.value
    ]


def unverified(method: Method) -> list[str]:
    """Returns the keys whose values were not compared with the publication."""
    return [key for key, setting in method.published.items() if not setting.verified]
