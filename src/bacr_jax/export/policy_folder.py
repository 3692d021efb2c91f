"""Parameters become a Hugging Face folder."""

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

# A tensor of a folder, and the type in which it lies there: F32, BF16 or F16.
Typed = tuple[names.Entry, str]

TORCH_NAME = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
STORED = {name: stored for stored, name in TORCH_NAME.items()}
MODELING_FILE = f"{hf_config.MODELING}.py"
GENERATION_FILE = "budget_generation.py"
# Where transformers looks for a `generate` that belongs to a folder of a class of its own.
CUSTOM_GENERATE = "custom_generate/generate.py"


@dataclass(frozen=True)
class BudgetInput:
    """How a budget reaches a policy, for config.json.

    Attributes:
      module: how the budget module is used; there if and only if the parameters have one.
      words: sentence that tells the budget; None: none does.
    """

    module: hf_config.BudgetModule | None = None
    words: str | None = None
    levels: Mapping[str, int] | None = None


@dataclass(frozen=True)
class Explained:
    """What makes a folder say by itself how it is asked.

    Attributes:
      thinking: section `thinking` of config.json.
      chat_template: renders the policy's prompt.
      generation: content of generation_config.json.
      card: text of README.md.
      held: code beside the weights of a plain Qwen2 model that holds budgets in transformers.
    """

    thinking: dict[str, Any]
    chat_template: str
    generation: dict[str, Any]
    card: str
    held: bool = True


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
    """Writes a folder that transformers loads; returns the names of its files.

    docs/serving.md says what each file is. The folder appears under its name only when it is
    complete.

    Args:
      out: a folder that does not exist yet.
      source: folder the model came from; its config.json is kept where it still holds, and
        tokenizer files and generation settings travel along.
      tokenizer: another folder with tokenizer files, or a transformers tokenizer; None: the
        source's files.
      dtype: of the weights: float32, bfloat16 or float16.
      explained: how the policy is asked; None: the folder says nothing of it.
    """
    out, source = Path(out), None if source is None else Path(source)
    budget = budget or BudgetInput()
    module = budget.module
    check_free(out)
    if (module is None) != ("budget" not in params):
        raise UserError("export: a budget module and its description must be given together")
    words = source if tokenizer is None else None
    if isinstance(tokenizer, str | Path):
        words, tokenizer = Path(tokenizer), None
    if words is not None:
        vocabulary.check_links(words, vocabulary.TOKENIZER)
        vocabulary.check_fits(words, config.vocab_size)
    if source is not None:
        vocabulary.check_links(source, ("config.json", *vocabulary.GENERATION))
    if dtype not in STORED:
        raise UserError(f"dtype: found {dtype!r}; write one of {', '.join(STORED)}")
    stored = STORED[dtype]
    described = _describe(config, stored, budget, source, tokenizer)
    if explained is not None:
        described[hf_config.THINKING] = explained.thinking
    with complete_or_absent(out) as folder:
        _write_weights(folder, params, layout(config, stored, module), max_shard_bytes)
        (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n")
        for home, files in ((source, vocabulary.GENERATION), (words, vocabulary.TOKENIZER)):
            if home is not None:
                vocabulary.copy_companions(home, folder, files)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        code = {}
        if module is not None:
            code = {MODELING_FILE: MODELING_FILE, GENERATION_FILE: GENERATION_FILE}
        elif explained is not None and explained.held:
            code = {GENERATION_FILE: CUSTOM_GENERATE}
        for own, name in code.items():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(Path(__file__).with_name(own), folder / name)
        if explained is not None:
            vocabulary.write_chat_template(folder, explained.chat_template)
            generation = json.dumps(explained.generation, indent=2) + "\n"
            (folder / "generation_config.json").write_text(generation)
            (folder / "README.md").write_text(explained.card, encoding="utf-8")
            write_manifest(folder)
    return sorted(path.name for path in out.iterdir())


def _describe(
    config: Qwen2Config, stored: str, budget: BudgetInput, source: Path | None, tokenizer: Any
) -> dict[str, Any]:
    """What config.json says; with a transformers tokenizer also its special ids."""
    old = None
    if source is not None and (source / "config.json").exists():
        old = hf_config.read_json(source / "config.json")
    described = hf_config.to_json(
        config,
        dtype=TORCH_NAME[stored],
        module=budget.module,
        source=old,
        budget_words=budget.words,
    )
    if tokenizer is not None:
        # What `generate` stops at and pads with.
        special = ("bos_token_id", "eos_token_id", "pad_token_id")
        described |= {key: getattr(tokenizer, key) for key in special}
    if budget.levels:
        described[hf_config.LEVELS] = dict(budget.levels)
    return described


def layout(config: Qwen2Config, dtype: str, module: hf_config.BudgetModule | None) -> list[Typed]:
    """Tensors of a folder, each with its type: those of the plain model, then a budget module's."""
    plain = [(entry, dtype) for entry in names.backbone(config)]
    if module is None:
        return plain
    return plain + [(entry, "F32") for entry in names.budget_module(config, module.conditioning)]


def _write_weights(folder: Path, params: Params, typed: list[Typed], max_shard_bytes: int) -> None:
    tensors = [archives.stored(params, entry, dtype) for entry, dtype in typed]
    own = [tensor for tensor in tensors if tensor.name.startswith("budget.")]
    plain = tensors[: len(tensors) - len(own)]
    shards = archives.into_shards(plain, max_bytes=max_shard_bytes)
    if not own and len(shards) == 1:
        archives.write_file(folder / archives.SINGLE, shards[0])
        return
    # A single model.safetensors would hide budget.safetensors from transformers, an index does not.
    count = len(shards)
    files = {f"model-{i + 1:05d}-of-{count:05d}.safetensors": s for i, s in enumerate(shards)}
    if own:
        files[BUDGET_FILE] = own
    for name, shard in files.items():
        archives.write_file(folder / name, shard)
    index = {
        "metadata": {"total_size": sum(t.num_bytes for shard in files.values() for t in shard)},
        "weight_map": {t.name: name for name, shard in files.items() for t in shard},
    }
    (folder / archives.INDEX).write_text(json.dumps(index, indent=2) + "\n")
