"""Writes the parameters of a policy as a Hugging Face folder.

`from_run.export` calls it for checkpoints. This module does not read runs.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bacr_client.fingerprint import write_manifest
from bacr_jax.errors import UserError
from bacr_jax.model.hf import archive as archives
from bacr_jax.model.hf import hf_config, names, vocabulary
from bacr_jax.model.hf.archive import BUDGET_FILE, check_free, complete_or_absent
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.types import Params

# A tensor of a folder and its dtype in the file: F32, BF16 or F16.
Typed = tuple[names.Entry, str]

TORCH_NAME = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
STORED = {name: stored for stored, name in TORCH_NAME.items()}
MODELING_FILE = f"{hf_config.MODELING}.py"
GENERATION_FILE = "budget_generation.py"
# Path at which transformers looks for a replacement of `generate`.
CUSTOM_GENERATE = "custom_generate/generate.py"


@dataclass(frozen=True)
class BudgetInput:
    """Describes how a policy receives a budget. config.json stores this description.

    Attributes:
      module: settings of the budget module, or None if and only if the parameters contain none.
      words: sentence with the budget in prompts, or None if prompts do not contain the budget.
      levels: named budgets, in tokens.
    """

    module: hf_config.BudgetModule | None = None
    words: str | None = None
    levels: Mapping[str, int] | None = None


@dataclass(frozen=True)
class Explained:
    """Files that describe how to use a policy, which are written into its folder.

    Attributes:
      thinking: section `thinking` of config.json.
      chat_template: chat template of the policy's prompt.
      generation: content of generation_config.json.
      readme: text of README.md.
      enforces_budget: True to add the code that enforces budgets in transformers, even if the model
        has no budget module.
    """

    thinking: dict[str, Any]
    chat_template: str
    generation: dict[str, Any]
    readme: str
    enforces_budget: bool = True


def save_policy(
    out: str | Path,
    params: Params,
    *,
    config: Qwen2Config,
    budget: BudgetInput | None = None,
    source: str | Path | None = None,
    tokenizer: Any = None,
    dtype: str = "float32",
    max_shard_bytes: int = 5_000_000_000,
    explained: Explained | None = None,
) -> list[str]:
    """Writes a folder that transformers can load. docs/serving.md describes its files.

    The folder appears under its final name only when it is complete.

    Args:
      out: output folder, which must not exist.
      params: parameters of the policy.
      config: shape of the model.
      budget: how the policy receives a budget, or None if it receives none.
      source: folder of the original model. The entries of its config.json that still apply, its
        tokenizer files and its generation config are copied. None for a model without such a
        folder.
      tokenizer: folder with tokenizer files, or a transformers tokenizer. None copies the tokenizer
        files of `source`.
      dtype: dtype of the weights: float32, bfloat16 or float16.
      max_shard_bytes: maximum size of a weight file in bytes.
      explained: files that describe the policy, or None to write none.

    Returns:
      Names of the written files.

    Raises:
      UserError: the folder exists, or an input is invalid.
    """
    out = Path(out)
    source = None if source is None else Path(source)
    budget = budget or BudgetInput()
    module = budget.module
    check_free(out)
    if (module is None) != ("budget" not in params):
        raise UserError(
            "export: `params` has weights of a budget module and `budget` has no description of "
            "it, or the other way round; pass both or neither"
        )
    tokenizer_folder = source if tokenizer is None else None
    if isinstance(tokenizer, str | Path):
        tokenizer_folder = Path(tokenizer)
        tokenizer = None
    if tokenizer_folder is not None:
        vocabulary.check_links(tokenizer_folder, vocabulary.TOKENIZER)
        vocabulary.check_fits(tokenizer_folder, config.vocab_size)
    if source is not None:
        vocabulary.check_links(source, ("config.json", *vocabulary.GENERATION))
    if dtype not in STORED:
        raise UserError(
            f"dtype: weights can't be stored as {dtype!r}; use one of {', '.join(STORED)}"
        )
    stored_type = STORED[dtype]
    config_json = _config_json(config, stored_type, budget, source, tokenizer)
    if explained is not None:
        config_json[hf_config.THINKING] = explained.thinking
    with complete_or_absent(out) as folder:
        _write_weights(folder, params, layout(config, stored_type, module), max_shard_bytes)
        (folder / "config.json").write_text(json.dumps(config_json, indent=2) + "\n")
        if source is not None:
            vocabulary.copy_companions(source, folder, vocabulary.GENERATION)
        if tokenizer_folder is not None:
            vocabulary.copy_companions(tokenizer_folder, folder, vocabulary.TOKENIZER)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        if module is not None:
            _copy_code(folder, {MODELING_FILE: MODELING_FILE, GENERATION_FILE: GENERATION_FILE})
        elif explained is not None and explained.enforces_budget:
            _copy_code(folder, {GENERATION_FILE: CUSTOM_GENERATE})
        if explained is not None:
            _write_descriptions(folder, explained)
    return sorted(path.name for path in out.iterdir())


def _copy_code(folder: Path, names: Mapping[str, str]) -> None:
    """Copies source files of this package into a folder. `names` maps them to the new names."""
    for module, name in names.items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(Path(__file__).with_name(module), folder / name)


def _write_descriptions(folder: Path, explained: Explained) -> None:
    """Writes the chat template, generation config, model card, and manifest of all files."""
    vocabulary.write_chat_template(folder, explained.chat_template)
    generation = json.dumps(explained.generation, indent=2) + "\n"
    (folder / "generation_config.json").write_text(generation)
    (folder / "README.md").write_text(explained.readme, encoding="utf-8")
    write_manifest(folder)


def _config_json(
    config: Qwen2Config, stored_type: str, budget: BudgetInput, source: Path | None, tokenizer: Any
) -> dict[str, Any]:
    """Returns the content of config.json, including the special token ids of the tokenizer."""
    source_config = None
    if source is not None and (source / "config.json").exists():
        source_config = hf_config.read_json(source / "config.json")
    content = hf_config.to_json(
        config,
        dtype=TORCH_NAME[stored_type],
        module=budget.module,
        source=source_config,
        budget_words=budget.words,
    )
    if tokenizer is not None:
        # transformers' `generate` stops at these ids and uses them for padding.
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            content[key] = getattr(tokenizer, key)
    if budget.levels:
        content[hf_config.LEVELS] = dict(budget.levels)
    return content


def layout(config: Qwen2Config, dtype: str, module: hf_config.BudgetModule | None) -> list[Typed]:
    """Lists the tensors of a folder and their dtypes: plain model first, then budget module."""
    plain = [(entry, dtype) for entry in names.backbone(config)]
    if module is None:
        return plain
    return plain + [(entry, "F32") for entry in names.budget_module(config, module.conditioning)]


def _write_weights(folder: Path, params: Params, typed: list[Typed], max_shard_bytes: int) -> None:
    """Writes tensors to safetensors files, with an index if there are several files."""
    tensors = [archives.stored(params, entry, dtype) for entry, dtype in typed]
    module = [tensor for tensor in tensors if tensor.name.startswith("budget.")]
    plain = tensors[: len(tensors) - len(module)]
    shards = archives.into_shards(plain, max_bytes=max_shard_bytes)
    if not module and len(shards) == 1:
        archives.write_file(folder / archives.SINGLE, shards[0])
        return
    # Write an index even for a single model file, because transformers would otherwise ignore
    # budget.safetensors next to model.safetensors.
    files = {}
    for number, shard in enumerate(shards, 1):
        files[f"model-{number:05d}-of-{len(shards):05d}.safetensors"] = shard
    if module:
        files[BUDGET_FILE] = module
    total_size = 0
    weight_map = {}
    for name, shard in files.items():
        archives.write_file(folder / name, shard)
        for tensor in shard:
            total_size += tensor.num_bytes
            weight_map[tensor.name] = name
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (folder / archives.INDEX).write_text(json.dumps(index, indent=2) + "\n")
