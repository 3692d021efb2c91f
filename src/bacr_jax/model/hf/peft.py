"""Adapters in PEFT's layout: adapter_config.json and adapter_model.safetensors.

A budget module stands beside them, in files that PEFT does not look at: budget.safetensors, and
budget_module.json, which says how it is used.
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
from bacr_jax.model.hf.names import PLACES, Entry
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.types import Params

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
MODULE_FILE = "budget_module.json"
# Folder of the weights that adapters were trained on, where they are no released model's.
BASE_FOLDER = "base"
# Folders in the cache of the Hugging Face hub.
_CACHED = re.compile(r"/models--((?:(?!--)[^/])+)--([^/]+)/snapshots/([0-9a-f]{40})/?$")
# Kinds of LoRA that compute something else, with the values that switch them off.
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
    # Ways to begin that leave the base as it is; PiSSA and OLoRA take their part out of it.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
    "alora_invocation_tokens": (None,),
    "use_qalora": (False, None),
}


def entries(config: Qwen2Config, settings: AdapterConfig) -> list[Entry]:
    """Tensors of an adapter: lora_A is [r, in], lora_B [out, r], the transposes of A and B here."""
    assert settings.rank is not None
    found = []
    for layer in range(config.num_layers):
        for name, (fan_in, fan_out) in config.matrices.items():
            if name not in settings.targets:
                continue
            prefix = f"base_model.model.model.layers.{layer}.{PLACES[name]}."
            for part, shape in (("A", (settings.rank, fan_in)), ("B", (fan_out, settings.rank))):
                path = ("adapter", f"{name}_{part.lower()}")
                full = f"{prefix}lora_{part}.weight"
                found.append(Entry(full, shape, path, layer, transposed=True))
    return found


def _base_names(base: Path | None) -> dict[str, str | None]:
    """Returns how adapter_config.json names a base: on the hub if it is from there, or its path."""
    if base is None:
        return {"base_model_name_or_path": None}
    path = str(base.absolute())
    if cached := _CACHED.search(path):
        owner, name, revision = cached.groups()
        return {"base_model_name_or_path": f"{owner}/{name}", "revision": revision}
    return {"base_model_name_or_path": path}


def _adapter_config(settings: AdapterConfig, base: Path | None) -> dict[str, Any]:
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
    """Writes a folder that PEFT loads onto the base; returns the names of its files.

    Args:
      base: the folder that the adapters were trained on, which adapter_config.json names.
      write_base: writes that folder first, as `BASE_FOLDER` of `out`.
    """
    archives.check_free(out)
    own = [stored(params, entry, "F32") for entry in entries(config, settings)]
    with archives.complete_or_absent(out) as folder:
        if write_base is not None:
            write_base(folder / BASE_FOLDER)
            base = out / BASE_FOLDER
        archives.write_file(folder / WEIGHTS_FILE, own)
        _write_json(folder / CONFIG_FILE, _adapter_config(settings, base))
        if module is not None:
            beside = names.budget_module(config, module.conditioning)
            tensors = [stored(params, entry, "F32") for entry in beside]
            archives.write_file(folder / BUDGET_FILE, tensors)
            described = {"budget_module": hf_config.describe_module(module)}
            _write_json(folder / MODULE_FILE, described)
        write_manifest(folder)
    return sorted(path.name for path in out.iterdir())


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _is_target(name: str, said: Any, config: Qwen2Config) -> bool:
    """Whether PEFT would adapt a matrix in every layer, by what target_modules says."""
    if said == "all-linear":
        return True
    modules = [f"model.layers.{i}.{PLACES[name]}" for i in range(config.num_layers)]
    if isinstance(said, str):
        try:
            return all(re.fullmatch(said, module) for module in modules)
        except re.error:
            return False
    ends = tuple(f".{one}" for one in said) if isinstance(said, list) else ()
    return all(module.endswith(ends) for module in modules)


def check_adapter(folder: str | Path, config: Qwen2Config, settings: AdapterConfig) -> Archive:
    """What `load_adapter` would refuse, without reading a value."""
    folder = Path(folder)
    path = folder / CONFIG_FILE
    raw = hf_config.read_json(path)
    for key, plain in _PLAIN.items():
        if raw.get(key, plain[0]) not in plain:
            raise UserError(
                f"{path}: {key} is {shown(raw[key])}, which is not supported; only "
                f"{shown(plain[0])} is"
            )
    own = {"r": ("adapter.rank", settings.rank), "lora_alpha": ("adapter.alpha", settings.alpha)}
    for key, (name, wanted) in own.items():
        if raw.get(key) != wanted:
            raise UserError(
                f"{path}: {key} is {shown(raw.get(key))}, but {name}={wanted:g}; write "
                f"{name}={raw.get(key)}"
            )
    said = raw.get("target_modules")
    targets = [name for name in config.matrices if _is_target(name, said, config)]
    if set(targets) != set(settings.targets):
        raise UserError(
            f"{path}: target_modules is {shown(said)}, but adapter.targets={[*settings.targets]}; "
            f"write adapter.targets={targets}"
        )
    if (folder / BUDGET_FILE).exists() and not (folder / MODULE_FILE).exists():
        raise UserError(
            f"{folder}: holds {BUDGET_FILE} without {MODULE_FILE}, which says how it is used; copy "
            f"or export the folder again, or take {BUDGET_FILE} away to begin with a fresh module"
        )
    archive = archives.read_headers([folder / WEIGHTS_FILE])
    archives.check_tensors(archive, entries(config, settings), folder)
    return archive


def load_adapter(folder: str | Path, config: Qwen2Config, settings: AdapterConfig) -> Params:
    """Adapters of a folder in PEFT's layout, fp32, on the host: `adapter` and `adapter_scale`."""
    archives.check_files(folder)
    archive = check_adapter(folder, config, settings)
    assert settings.rank is not None
    stacks: dict[str, list[np.ndarray]] = {}
    for entry in entries(config, settings):
        stacks.setdefault(entry.path[-1], []).append(read_tensor(archive, entry.name).T)
    return {
        "adapter": {name: np.stack(layers) for name, layers in stacks.items()},
        "adapter_scale": np.float32(settings.alpha / settings.rank),
    }


def load_module(
    folder: str | Path, config: Qwen2Config, wanted: BudgetModule | None
) -> Params | None:
    """The budget module beside adapters, on the host; None without one, or if none is wanted."""
    path = Path(folder) / MODULE_FILE
    if wanted is None or not path.is_file():
        return None
    found = hf_config.parse_module(hf_config.read_json(path), path)
    theirs, ours = hf_config.describe_module(found), hf_config.describe_module(wanted)
    for key, value in ours.items():
        if theirs[key] != value:
            name = "budget.max" if key == "b_max" else f"conditioning.{key}"
            raise UserError(
                f"{path}: {key} is {shown(theirs[key])}, but the run has {shown(value)}; write "
                f"{name}={theirs[key]}"
            )
    own = names.budget_module(config, wanted.conditioning)
    archive = archives.read_headers([Path(folder) / BUDGET_FILE])
    archives.check_tensors(archive, own, Path(folder))
    return {entry.path[-1]: read_tensor(archive, entry.name) for entry in own}
