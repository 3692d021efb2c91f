"""What a method's publication prescribes, and where a config departs from it."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bacr_jax.config import Config
from bacr_jax.config.values import written

if TYPE_CHECKING:
    from bacr_jax.methods.method import Method


@dataclass(frozen=True)
class Published:
    """A setting that a publication prescribes.

    Attributes:
      value: of the config key.
      source: where it is said; or whose choice it is, where the publication says nothing.
      defining: with another value it is another method; such a config is refused.
    """

    value: Any
    source: str
    defining: bool = False


def given_by(config: Config, key: str) -> Any:
    """The value of a dotted key."""
    return functools.reduce(getattr, key.split("."), config)


def departures(config: Config, method: "Method") -> list[str]:
    """Settings that are not the publication's, as `KEY=VALUE (published: VALUE)`.

    Args:
      config: of a run.
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
