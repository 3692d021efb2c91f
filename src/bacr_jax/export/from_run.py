"""Exports a checkpoint of a run as a Hugging Face folder that contains its prompt and its rules.

`bacr export` calls `export`. Training calls `write_params` for the servers that sample for it.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from bacr_jax.config import Config
from bacr_jax.errors import UserError
from bacr_jax.export import policy_folder
from bacr_jax.export.model_card import Exported, model_card
from bacr_jax.export.template import chat_template
from bacr_jax.model import adapters
from bacr_jax.model.hf import archive, hf_config, names, peft
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.prompts.encoding import eos_ids
from bacr_jax.prompts.thinking_section import describe
from bacr_jax.prompts.tokenizers import load_tokenizer
from bacr_jax.questions.loaders import own_tokenizer
from bacr_jax.report.chosen_step import step_lines
from bacr_jax.runs.chosen_step import choose_step
from bacr_jax.runs.open import (
    check_trained_with,
    read_config,
    read_params,
    trained_style,
)
from bacr_jax.runs.setup import model_shape
from bacr_jax.types import Params


def _shape(config: Config, base: Path | None, params: Params) -> Qwen2Config:
    """Returns the model's shape; raises UserError if the parameters have another shape."""
    rows = params["embed"].shape[0]
    shape = model_shape(config, rows) if base is None else hf_config.read_hf_config(base)
    for entry in names.backbone(shape):
        leaf: Any = params
        for key in entry.path:
            leaf = leaf.get(key, {})
        actual = getattr(leaf, "shape", None)
        expected = entry.leaf_shape(shape.num_layers)
        if actual != expected:
            raise UserError(
                f"checkpoint: {'/'.join(entry.path)} has shape {actual}, but "
                f"{base or 'config.yaml'} specifies {expected}; write the --base it was trained "
                "from"
            )
    return shape


def export(
    run: Path,
    out: Path,
    *,
    base: Path | None = None,
    dtype: str = "float32",
    step: int | str | None = None,
    merge_told_words: bool = False,
    adapter: Literal["merged", "peft"] = "merged",
    say: Callable[[str], Any] | None = None,
) -> list[str]:
    """Writes a checkpoint of a run as a Hugging Face folder.

    Args:
      out: a folder that does not exist yet.
      base: present folder of `model.path`; None if it is at the config's path.
      dtype: type of the weights: float32, bfloat16 or float16.
      step: step of the checkpoint, "best" or "newest"; None for the best, or the newest if no
        evaluation chose one.
      merge_told_words: True to leave out the code that enforces budgets, for a policy that reads
        its budget in the prompt.
      adapter: for a run that trained adapters: "merged" writes the complete model, "peft" only the
        adapters in PEFT's layout.
      say: called with each line that describes the chosen step; None to print none.

    Returns:
      Names of the files.

    Raises:
      UserError: an option does not fit the run, or the run can't be read.
    """
    archive.check_free(out)
    config = read_config(run)
    if merge_told_words and config.conditioning.told != "words":
        raise UserError(
            f"--merge-told-words: the run's policy has conditioning.told={config.conditioning.told}"
            ", which a chat template can't do; leave it out"
        )
    if adapter == "peft" and config.adapter.rank is None:
        raise UserError("--adapter peft: the run trained all weights, not adapters; leave it out")
    chosen = choose_step(run, step)
    params = read_params(run, chosen.step, base=base)
    if base is None and config.model.path is not None:
        base = Path(config.model.path)
    if base is not None and not (base / "config.json").is_file():
        raise UserError(
            f"{base}: holds no config.json; write --base with the folder the run started from"
        )
    if adapter == "peft":
        # The base of adapters after a warm-up is the warm-up's weights, which need a folder.
        write_base = functools.partial(_write_base, params, config, base)
        files = peft.save_adapter(
            out,
            params,
            config=_shape(config, base, params),
            settings=config.adapter,
            module=_module(config, params),
            base=base,
            write_base=write_base if config.warmup.steps else None,
        )
    else:
        tokenizer = _tokenizer(config, base)
        check_trained_with(run, chosen.step, config, tokenizer)
        about = Exported(run, chosen.step, config, trained_style(config), base, merge_told_words)
        files = write_params(out, params, about, dtype=dtype, tokenizer=tokenizer)
    if say is not None:
        # After everything that can fail, because an error must be the only line.
        for line in step_lines(chosen):
            say(line)
    return files


def _module(config: Config, params: Params) -> hf_config.BudgetModule | None:
    """Returns the settings of the budget module, or None if the parameters have none."""
    if "budget" not in params:
        return None
    return hf_config.BudgetModule(config.conditioning, config.budget.max)


def _tokenizer(config: Config, base: Path | None) -> Any:
    """Loads the tokenizer of a run whose model is in `base`."""
    tokenizer_of_data = own_tokenizer(config.data)
    if tokenizer_of_data is not None:
        return tokenizer_of_data
    folder = config.model.tokenizer or base
    return load_tokenizer(folder, where="model.tokenizer", model=base)


def _written_tokenizer(config: Config) -> Any:
    """Returns the tokenizer to write: the data's, or a folder to copy; None for the base's."""
    tokenizer_of_data: Any = own_tokenizer(config.data)
    return config.model.tokenizer if tokenizer_of_data is None else tokenizer_of_data


def _write_base(params: Params, config: Config, base: Path | None, out: Path) -> None:
    """Writes the frozen weights under a run's adapters as a folder of the plain model."""
    frozen, _ = adapters.split(params)
    policy_folder.save_policy(
        out,
        {name: leaf for name, leaf in frozen.items() if name != "adapter_scale"},
        config=_shape(config, base, params),
        source=base,
        tokenizer=_written_tokenizer(config),
    )


def write_params(
    out: Path, params: Params, about: Exported, *, dtype: str = "float32", tokenizer: Any = None
) -> list[str]:
    """Writes a policy's parameters with adapters merged, and descriptions of the policy's use.

    Args:
      tokenizer: tokenizer of the run; None to read it.

    Returns:
      Names of the files.
    """
    config = about.config
    base = about.base
    style = about.style
    levels = config.budget.levels
    if tokenizer is None:
        tokenizer = _tokenizer(config, base)
    shape = _shape(config, base, params)
    budget = policy_folder.BudgetInput(_module(config, params), about.words or None, levels)
    generation = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": list(eos_ids(tokenizer, style)),
        "pad_token_id": tokenizer.pad_token_id,
        # Greedy, as evaluations are by default.
        "do_sample": False,
        # Without a length, transformers would use a short one.
        "max_length": shape.max_positions,
    }
    explained = policy_folder.Explained(
        thinking=describe(config, tokenizer, style, shape.vocab_size),
        chat_template=chat_template(tokenizer, style, about.words, levels),
        generation=generation,
        card=model_card(about),
        held=not about.merged,
    )
    return policy_folder.save_policy(
        out,
        adapters.merge(params),
        config=shape,
        budget=budget,
        source=base,
        tokenizer=_written_tokenizer(config),
        dtype=dtype,
        explained=explained,
    )
