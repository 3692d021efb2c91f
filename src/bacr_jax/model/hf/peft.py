"""Reads and writes adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

A budget module is stored in the same folder, in files that PEFT ignores: budget.safetensors
contains the tensors and budget_module.json contains the settings.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bacr_client.fingerprint import write_manifest
from bacr_jax.config import AdapterConfig
from bacr_jax.config.values import shown
from bacr_jax.errors import UserError
from bacr_jax.model.hf import archive as archives
from bacr_jax.model.hf import hf_config, names
from bacr_jax.model.hf.archive import BUDGET_FILE, Archive, read_tensor, stored
from bacr_jax.model.hf.hf_config import BudgetModule
from bacr_jax.model.hf.hub import cached_name
from bacr_jax.model.hf.names import PLACES, Entry
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.types import Params

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MODULE_FILE = "budget_module.json"
# Subfolder with the base weights. It is only written if they are not the weights of a released
# model.
BASE_FOLDER = "base"
# Keys that select variants of LoRA, with the values for plain LoRA. The first value is the default.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_rslora": (False, None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": (None,),
    "lora_bias": (False, None),
    "exclude_modules": (None, []),
    # Initializations that leave the base model unchanged. PiSSA and OLoRA modify it.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
    "alora_invocation_tokens": (None,),
    "use_qalora": (False, None),
}


def entries(config: Qwen2Config, settings: AdapterConfig) -> list[Entry]:
    """Lists the tensors of adapters, ordered by layer and matrix.

    PEFT's lora_A [r, in] and lora_B [out, r] are the transposes of A [in, r] and B [r, out]
    in `model.adapters`.
    """
    rank = settings.rank
    assert rank is not None
    listed = []
    for layer in range(config.num_layers):
        for name, (fan_in, fan_out) in config.matrices.items():
            if name not in settings.targets:
                continue
            prefix = f"base_model.model.model.layers.{layer}.{PLACES[name]}."
            for part, shape in (("A", (rank, fan_in)), ("B", (fan_out, rank))):
                listed.append(
                    Entry(
                        name=f"{prefix}lora_{part}.weight",
                        shape=shape,
                        path=("adapter", f"{name}_{part.lower()}"),
                        layer=layer,
                        transposed=True,
                    )
                )
    return listed


def _base_names(base: Path | None) -> dict[str, str | None]:
    """Returns the keys of adapter_config.json that identify the base model.

    A folder in the Hub cache is identified by repository and revision, any other folder by its
    path.
    """
    if base is None:
        return {"base_model_name_or_path": None}
    cached = cached_name(base)
    if cached is not None:
        name, revision = cached
        return {"base_model_name_or_path": name, "revision": revision}
    return {"base_model_name_or_path": str(base.absolute())}


def _adapter_config(settings: AdapterConfig, base: Path | None) -> dict[str, Any]:
    """Builds the content of adapter_config.json."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        **_base_names(base),
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": 0.0,
        "target_modules": [f"{name}_proj" for name in settings.targets],
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }


def save_adapter(
    out: Path,
    params: Params,
    *,
    config: Qwen2Config,
    settings: AdapterConfig,
    module: BudgetModule | None = None,
    base: Path | None = None,
    write_base: Callable[[Path], object] | None = None,
) -> list[str]:
    """Writes adapters to a folder that PEFT can load onto the base model.

    Args:
      out: path of the new folder.
      params: parameters with adapters. They must also contain a budget module if `module` is
        specified.
      module: settings of the budget module, or None to write no budget module.
      base: folder of the base model, which adapter_config.json refers to.
      write_base: function that writes the base model into the subfolder `BASE_FOLDER` of `out`. If
        specified, adapter_config.json refers to this subfolder instead of `base`.

    Returns:
      The sorted names of the folder's files.

    Raises:
      UserError: If `out` already exists or cannot be written.
    """
    archives.check_free(out)
    adapters = [stored(params, entry, "F32") for entry in entries(config, settings)]
    with archives.complete_or_absent(out) as folder:
        if write_base is not None:
            write_base(folder / BASE_FOLDER)
            base = out / BASE_FOLDER
        archives.write_file(folder / WEIGHTS_FILE, adapters)
        _write_json(folder / CONFIG_FILE, _adapter_config(settings, base))
        if module is not None:
            module_entries = names.budget_module(config, module.conditioning)
            tensors = [stored(params, entry, "F32") for entry in module_entries]
            archives.write_file(folder / BUDGET_FILE, tensors)
            described = {"budget_module": hf_config.describe_module(module)}
            _write_json(folder / MODULE_FILE, described)
        write_manifest(folder)
    return sorted(path.name for path in out.iterdir())


def _write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes an indented JSON file."""
    path.write_text(json.dumps(content, indent=2) + "\n")


def _is_target(name: str, target_modules: Any, config: Qwen2Config) -> bool:
    """True if PEFT adapts the matrix called `name` in every layer.

    Args:
      target_modules: value from adapter_config.json: "all-linear", a regular expression for module
        paths, or a list of suffixes of module paths.
    """
    if target_modules == "all-linear":
        return True
    layers = range(config.num_layers)
    modules = [f"model.layers.{layer}.{PLACES[name]}" for layer in layers]
    if isinstance(target_modules, str):
        try:
            return all(re.fullmatch(target_modules, module) for module in modules)
        except re.error:
            return False
    if not isinstance(target_modules, list):
        return False
    suffixes = tuple(f".{target}" for target in target_modules)
    return all(module.endswith(suffixes) for module in modules)


def check_adapter(folder: str | Path, config: Qwen2Config, settings: AdapterConfig) -> Archive:
    """Performs the checks of `load_adapter` without reading the values of tensors.

    Returns:
      The headers of the adapters' tensors.

    Raises:
      UserError: If the adapters are an unsupported variant of LoRA, or are incompatible with the
        settings or the model.
    """
    folder = Path(folder)
    path = folder / CONFIG_FILE
    raw = hf_config.read_json(path)
    for key, accepted in _PLAIN.items():
        if raw.get(key, accepted[0]) not in accepted:
            raise UserError(
                f"{path}: `{key}` is {shown(raw[key])}, but only {shown(accepted[0])} is "
                "supported; use adapters of plain LoRA"
            )
    _check_settings(raw, config, settings, path)
    if (folder / BUDGET_FILE).exists() and not (folder / MODULE_FILE).exists():
        raise UserError(
            f"{folder} contains the weights of a budget module ({BUDGET_FILE}), but not its "
            f"settings ({MODULE_FILE}); copy or export the folder again, or remove {BUDGET_FILE} "
            "to start with a new budget module"
        )
    archive = archives.read_headers([folder / WEIGHTS_FILE])
    archives.check_tensors(archive, entries(config, settings), folder)
    return archive


def _check_settings(
    raw: dict[str, Any], config: Qwen2Config, settings: AdapterConfig, path: Path
) -> None:
    """Raises a UserError if the rank, alpha or targets of an adapter differ from the settings.

    Args:
      raw: parsed adapter_config.json.
      path: path of the file, for error messages.
    """
    ours = {"r": ("adapter.rank", settings.rank), "lora_alpha": ("adapter.alpha", settings.alpha)}
    for key, (name, value) in ours.items():
        if raw.get(key) != value:
            raise UserError(
                f"{path}: `{key}` is {shown(raw.get(key))}, but the config has {name}={value:g}; "
                f"set {name}={raw.get(key)}"
            )
    target_modules = raw.get("target_modules")
    targets = [name for name in config.matrices if _is_target(name, target_modules, config)]
    if set(targets) != set(settings.targets):
        raise UserError(
            f"{path}: `target_modules` is {shown(target_modules)}, but the config has "
            f"adapter.targets={[*settings.targets]}; set adapter.targets={targets}"
        )


def load_adapter(folder: str | Path, config: Qwen2Config, settings: AdapterConfig) -> Params:
    """Loads adapters from a folder in PEFT's format.

    Returns:
      `adapter` and `adapter_scale` as fp32 arrays on the host.

    Raises:
      UserError: If `check_adapter` raises it, or a file differs from the folder's manifest.
    """
    archives.check_files(folder)
    archive = check_adapter(folder, config, settings)
    assert settings.rank is not None
    layers: dict[str, list[np.ndarray]] = {}
    for entry in entries(config, settings):
        leaf = entry.path[-1]
        layers.setdefault(leaf, []).append(read_tensor(archive, entry.name).T)
    return {
        "adapter": {leaf: np.stack(matrices) for leaf, matrices in layers.items()},
        "adapter_scale": np.float32(settings.alpha / settings.rank),
    }


def load_module(
    folder: str | Path, config: Qwen2Config, wanted: BudgetModule | None
) -> Params | None:
    """Loads the budget module from a folder with adapters.

    Args:
      wanted: settings of the run's budget module, or None to skip loading.

    Returns:
      The parameters on the host, or None if the folder has no budget module or `wanted` is None.

    Raises:
      UserError: If the folder's settings of the budget module differ from the run's settings.
    """
    path = Path(folder) / MODULE_FILE
    if wanted is None or not path.is_file():
        return None
    module = hf_config.parse_module(hf_config.read_json(path), path)
    theirs = hf_config.describe_module(module)
    ours = hf_config.describe_module(wanted)
    for key, value in ours.items():
        if theirs[key] != value:
            name = "budget.max" if key == "b_max" else f"conditioning.{key}"
            raise UserError(
                f"{path}: `{key}` is {shown(theirs[key])}, but the run has {shown(value)}; set "
                f"{name}={theirs[key]}"
            )
    module_entries = names.budget_module(config, wanted.conditioning)
    archive = archives.read_headers([Path(folder) / BUDGET_FILE])
    archives.check_tensors(archive, module_entries, Path(folder))
    return {entry.path[-1]: read_tensor(archive, entry.name) for entry in module_entries}
