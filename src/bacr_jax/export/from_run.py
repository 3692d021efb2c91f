"""A checkpoint of a run as a Hugging Face folder that says by itself how it is asked."""

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
    """The model's shape, checked against its parameters."""
    rows = params["embed"].shape[0]
    shape = model_shape(config, rows) if base is None else hf_config.read_hf_config(base)
    for entry in names.backbone(shape):
        leaf: Any = params
        for key in entry.path:
            leaf = leaf.get(key, {})
        own, expected = getattr(leaf, "shape", None), entry.leaf_shape(shape.num_layers)
        if own != expected:
            raise UserError(
                f"checkpoint: {'/'.join(entry.path)} has shape {own}, but "
                f"{base or 'config.yaml'} says {expected}; write the --base it was trained from"
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
      base: where `model.path` lies now; None: where the config says.
      step: of the checkpoint, "best" or "newest"; None: the best, or the newest if no evaluation
        chose one.
      merge_told_words: leave out the code that holds budgets, for a policy told in words.
      adapter: of a run that trained adapters: the whole model with them merged in, or the adapters
        alone in PEFT's layout.
      say: called with the lines that describe the chosen step; None: they are not needed.
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
    number = chosen.step
    params = read_params(run, number, base=base)
    if base is None and config.model.path is not None:
        base = Path(config.model.path)
    if base is not None and not (base / "config.json").is_file():
        raise UserError(
            f"{base}: holds no config.json; write --base with the folder the run started from"
        )
    if adapter == "peft":
        # After a warm-up the adapters belong to its weights, which no other folder holds.
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
        check_trained_with(run, number, config, tokenizer)
        about = Exported(run, number, config, trained_style(config), base, merge_told_words)
        files = write_params(out, params, about, dtype=dtype, tokenizer=tokenizer)
    if say is not None:
        # After what can be refused, because a refusal is one line.
        for line in step_lines(chosen):
            say(line)
    return files


def _module(config: Config, params: Params) -> hf_config.BudgetModule | None:
    if "budget" not in params:
        return None
    return hf_config.BudgetModule(config.conditioning, config.budget.max)


def _tokenizer(config: Config, base: Path | None) -> Any:
    """The tokenizer of a run whose model lies at `base`."""
    own = own_tokenizer(config.data)
    if own is not None:
        return own
    folder = config.model.tokenizer or base
    return load_tokenizer(folder, where="model.tokenizer", model=base)


def _written_tokenizer(config: Config) -> Any:
    """Returns what a folder gets: a tokenizer's folder, a set's own, or None: the base's."""
    tokenizer: Any = own_tokenizer(config.data)
    return config.model.tokenizer if tokenizer is None else tokenizer


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
    """Writes a policy's parameters, adapters merged, as a folder that says how it is asked.

    `tokenizer`: of the run; None: it is read.
    """
    config, base, style = about.config, about.base, about.style
    if tokenizer is None:
        tokenizer = _tokenizer(config, base)
    # Of a tokenizer that was read the files are copied.
    written = _written_tokenizer(config)
    shape = _shape(config, base, params)
    return policy_folder.save_policy(
        out,
        adapters.merge(params),
        config=shape,
        budget=policy_folder.BudgetInput(
            _module(config, params), about.words or None, config.budget.levels
        ),
        source=base,
        tokenizer=written,
        dtype=dtype,
        explained=policy_folder.Explained(
            thinking=describe(config, tokenizer, style, shape.vocab_size),
            chat_template=chat_template(tokenizer, style, about.words, config.budget.levels),
            generation={
                "bos_token_id": tokenizer.bos_token_id,
                "eos_token_id": list(eos_ids(tokenizer, style)),
                "pad_token_id": tokenizer.pad_token_id,
                # As evaluated by default; a length, so that nobody assumes a short one.
                "do_sample": False,
                "max_length": shape.max_positions,
            },
            card=model_card(about),
            held=not about.merged,
        ),
    )
