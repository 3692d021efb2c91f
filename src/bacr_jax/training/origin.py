"""Computes fingerprints of a run's initial weights, and compares them when the run is resumed.

A run with a KL penalty or with adapters reads its initial weights again when it is resumed, because
its checkpoints contain neither the reference policy nor the frozen base weights. `loop.Trainer`
calls `check_origin` to detect that their files were changed in the meantime. Weights that are drawn
at random have no fingerprint, because their rounding depends on the number of devices.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bacr_jax.config.settings import PolicySettings
from bacr_jax.errors import UserError
from bacr_jax.model.hf import peft
from bacr_jax.model.hf.hf_config import read_budget_module
from bacr_jax.runs.digest import fingerprint
from bacr_jax.types import Params

# Keys of the fingerprints of the trained weights and of the frozen base weights in the metadata of
# checkpoints.
_START = "start_fingerprint"
_BASE = "base_fingerprint"


def recorded_origin(meta: Mapping[str, Any]) -> dict[str, str]:
    """Returns the fingerprints in the metadata of a checkpoint, by key."""
    return {key: meta[key] for key in (_START, _BASE) if meta.get(key)}


def check_origin(
    settings: PolicySettings,
    trained: Params,
    frozen: Params,
    recorded: Mapping[str, str],
    source: Path | str,
) -> dict[str, str]:
    """Returns the fingerprints of the initial weights, by key, after a comparison.

    Args:
      settings: settings of the run's policy.
      trained: initial values of the trained weights.
      frozen: base weights under adapters. Empty without adapters.
      recorded: fingerprints of the checkpoint that is being resumed. Empty for a new run.
      source: place of the weights, for the error message.

    Raises:
      UserError: if the weights differ from the initial weights of the run that is being resumed.
    """
    parts = {_START: weights_from_files(settings, trained), _BASE: frozen}
    origin = {key: fingerprint(part) for key, part in parts.items() if part}
    changed = [key for key in origin if recorded.get(key, origin[key]) != origin[key]]
    if changed:
        raise UserError(
            f"{source}: these weights were changed since the start of the run, which still needs "
            "the original ones; restore them, or use another output.dir"
        )
    return origin


def weights_from_files(settings: PolicySettings, params: Params) -> Params:
    """Returns the initial weights that are read from files, without those drawn at random.

    The model is read from the folder of the warm-up or from model.path, the adapters from
    adapter.path, and the budget module from model.path (without a warm-up) or from adapter.path.
    """
    model_folder = None if settings.has_warmup else settings.model.path
    adapter_folder = settings.adapter.path
    has_module = model_folder is not None and read_budget_module(model_folder) is not None
    if adapter_folder is not None and (Path(adapter_folder) / peft.MODULE_FILE).is_file():
        has_module = True
    is_read = dict.fromkeys(params, settings.has_warmup or model_folder is not None)
    is_read["adapter"] = adapter_folder is not None
    is_read["budget"] = has_module
    return {name: leaf for name, leaf in params.items() if is_read[name]}
