"""Compares a config with the settings prescribed by its method's publication."""

import functools
from collections.abc import Mapping
from typing import Any

from bacr_jax.config.settings import MethodSettings
from bacr_jax.config.values import written
from bacr_jax.methods.method import Method, Published

_NONE_HAS = "no publication has such a setting"
# Settings of this library that change the training of any method. If the publication of a method
# has such a setting, the method's own list contains its value. The presets of published methods set
# `optimizer.max_update_kl` and `loss.importance_cap`, because many shipped configs have other
# values. `loss.old_logprobs` is missing, because the publications do not specify how the
# probabilities of the policy that sampled are computed.
COMMON = {
    "optimizer.max_update_kl": Published(None, "no publication limits the KL of an update"),
    "train.undo_closed_answers": Published(None, "no publication undoes updates"),
    "train.undo_filled_budgets": Published(None, "no publication undoes updates"),
    "loss.dual_clip": Published(None, _NONE_HAS),
    "loss.importance_cap": Published(None, _NONE_HAS),
    "loss.sequence_cap": Published(None, _NONE_HAS),
    "loss.sequence_mask": Published(None, _NONE_HAS),
    "loss.overlong_filter": Published(False, _NONE_HAS),
    "distill.coef": Published(0.0, "no publication has a teacher"),
    "budget.stages": Published((), "one largest budget"),
    "budget.grace": Published(0, "traces are truncated at their budget"),
    "budget.shuffle_input": Published(False, "a control experiment of this library"),
}


def with_common(published: Mapping[str, Published]) -> dict[str, Published]:
    """Adds the settings in `COMMON` that a method's own list does not contain."""
    missing = {key: setting for key, setting in COMMON.items() if key not in published}
    return {**published, **missing}


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
