"""Exports a checkpoint of a run as a Hugging Face folder with its prompt and decoding rules.

`bacr export` calls `export`. Training calls `write_params` to export weights for the servers that
sample its rollouts.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from bacr_jax.config import AdapterConfig, ConditioningConfig, DataConfig, ModelConfig
from bacr_jax.config import io as config_io
from bacr_jax.config.settings import resolve
from bacr_jax.errors import UserError
from bacr_jax.export import policy_folder
from bacr_jax.export.model_card import Exported, model_card
from bacr_jax.export.template import chat_template
from bacr_jax.model import adapters
from bacr_jax.model.hf import archive, hf_config, names, peft
from bacr_jax.model.hf.generation_config import read_sampling
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.prompts.encoding import eos_ids
from bacr_jax.prompts.thinking_section import describe
from bacr_jax.questions.loaders import own_tokenizer
from bacr_jax.report.chosen_step import step_lines
from bacr_jax.runs.chosen_step import choose_step
from bacr_jax.runs.saved_policy import (
    check_base,
    check_trained_with,
    read_config,
    read_params,
    trained_style,
)
from bacr_jax.runs.setup import model_shape, run_tokenizer
from bacr_jax.types import Params


def _shape(model: ModelConfig, base: Path | None, params: Params) -> Qwen2Config:
    """Returns the model's configuration. Raises UserError if the parameters do not match it."""
    rows = params["embed"].shape[0]
    shape = model_shape(model, rows) if base is None else hf_config.read_hf_config(base)
    for entry in names.backbone(shape):
        leaf: Any = params
        for key in entry.path:
            leaf = leaf.get(key, {})
        actual = getattr(leaf, "shape", None)
        expected = entry.leaf_shape(shape.num_layers)
        if actual != expected:
            raise UserError(
                f"checkpoint: the parameter {'/'.join(entry.path)!r} has shape {actual}, but "
                f"{base or 'config.yaml'} specifies {expected}, so it describes another model; "
                "pass the folder of the model that the run started from as --base"
            )
    return shape


def export(
    run: Path,
    out: Path,
    *,
    base: Path | None = None,
    dtype: str | None = None,
    step: int | str | None = None,
    merge_budget_prompt: bool = False,
    adapter: Literal["merged", "peft"] = "merged",
    print_line: Callable[[str], Any] | None = None,
) -> list[str]:
    """Exports a checkpoint of a run as a Hugging Face folder.

    Args:
      run: run folder.
      out: output folder, which must not exist.
      base: folder of the base model if it was moved after training. None for `model.path`.
      dtype: dtype of the weights: float32, bfloat16 or float16. None for float32.
      step: step of the checkpoint, "best" or "newest". None selects the best step, or the newest
        step if no evaluation selected a best one.
      merge_budget_prompt: True to omit the code that enforces budgets. Requires a policy whose
        prompts contain the budget.
      adapter: format for a run that trained adapters. "merged" writes the full model, and "peft"
        writes only the adapters in the PEFT format.
      print_line: called with each line that describes the selected step, or None to print nothing.

    Returns:
      Names of the written files.

    Raises:
      UserError: an option is incompatible with the run, or the run can't be read.
    """
    archive.check_free(out)
    config = read_config(run)
    if merge_budget_prompt and config.conditioning.budget_input != "prompt":
        raise UserError(
            "--merge-budget-prompt: this option writes the budget into the chat template as "
            "text, but the policy of this run does not read it there "
            f"(conditioning.budget_input={config.conditioning.budget_input}); leave out the option"
        )
    if adapter == "peft":
        _check_peft(config.adapter, dtype, merge_budget_prompt=merge_budget_prompt)
    chosen = choose_step(run, step)
    where = "model.path=" if base is None else "--base "
    if base is None and config.model.path is not None:
        base = Path(config.model.path)
    if base is not None and not (base / "config.json").is_file():
        raise UserError(
            f"{base} contains no config.json, so the model that the run started from is no longer "
            "in this folder; pass its current folder as --base"
        )
    check_base(run, chosen.step, base, where)
    params = read_params(run, chosen.step, base=base)
    if adapter == "peft":
        # After a warm-up, the base of the adapters is the warm-up's weights, which must be
        # written as well.
        write_base = functools.partial(_write_base, params, config.data, config.model, base)
        files = peft.save_adapter(
            out,
            params,
            config=_shape(config.model, base, params),
            settings=config.adapter,
            module=_module(config.conditioning, config.budget.max, params),
            base=base,
            write_base=write_base if config.warmup.steps else None,
        )
    else:
        tokenizer = _tokenizer(config.data, config.model, base)
        style = trained_style(resolve(config).method)
        check_trained_with(run, chosen.step, config_io.flatten(config), style, tokenizer)
        exported = Exported(run, chosen.step, config, style, base, merge_budget_prompt)
        dtype = dtype or "float32"
        files = write_params(out, params, exported, dtype=dtype, tokenizer=tokenizer)
    if print_line is not None:
        # Called after everything that can fail, because an error must be the only line
        # printed.
        for line in step_lines(chosen):
            print_line(line)
    return files


def _check_peft(adapter: AdapterConfig, dtype: str | None, *, merge_budget_prompt: bool) -> None:
    """Raises UserError if a run's adapters can't be exported as a PEFT folder with these options.

    Args:
      adapter: section `adapter` of the run's config.
      dtype, merge_budget_prompt: as for `export`.
    """
    if adapter.rank is None:
        raise UserError(
            "--adapter peft: this run trained all weights and has no adapters to export; leave "
            "out the option"
        )
    if dtype is not None:
        raise UserError(
            f"--dtype {dtype} has no effect with --adapter peft, which writes the adapters in "
            "float32 as they were trained; leave out one of the two options"
        )
    if merge_budget_prompt:
        raise UserError(
            "--merge-budget-prompt has no effect with --adapter peft, because a PEFT folder "
            "contains no chat template; leave out one of the two options"
        )


def _module(
    conditioning: ConditioningConfig, largest_budget: int, params: Params
) -> hf_config.BudgetModule | None:
    """Returns the settings of the budget module, or None if the parameters contain none."""
    if "budget" not in params:
        return None
    return hf_config.BudgetModule(conditioning, largest_budget)


def _tokenizer(data: DataConfig, model: ModelConfig, base: Path | None) -> Any:
    """Loads the tokenizer of a run, given the folder of its base model."""
    path = None if base is None else str(base)
    return run_tokenizer(data, dataclasses.replace(model, path=path))


def _written_tokenizer(data: DataConfig, model: ModelConfig) -> Any:
    """Returns the tokenizer to write into an exported folder.

    The result is the built-in tokenizer of the task, a tokenizer folder to copy, or None to copy
    the base model's tokenizer.
    """
    tokenizer_of_data: Any = own_tokenizer(data)
    return model.tokenizer if tokenizer_of_data is None else tokenizer_of_data


def _write_base(
    params: Params, data: DataConfig, model: ModelConfig, base: Path | None, out: Path
) -> None:
    """Writes the frozen base weights of a run's adapters as a plain model folder."""
    frozen, _ = adapters.split(params)
    policy_folder.save_policy(
        out,
        {name: leaf for name, leaf in frozen.items() if name != "adapter_scale"},
        config=_shape(model, base, params),
        source=base,
        tokenizer=_written_tokenizer(data, model),
    )


def _sampling(exported: Exported) -> dict[str, Any]:
    """Returns the entries of generation_config.json that describe how answers are sampled.

    Greedy decoding is the default, as in evaluations. A model that was trained to think keeps the
    sampling settings of its base, or gets those of the run's evaluations if the base has none.
    """
    if not exported.style.is_native:
        return {"do_sample": False}
    sampling = {} if exported.base is None else read_sampling(exported.base)
    if sampling:
        return sampling
    evaluation = exported.config.eval
    return {
        "do_sample": True,
        "temperature": evaluation.temperature,
        "top_p": evaluation.top_p,
    }


def write_params(
    out: Path, params: Params, exported: Exported, *, dtype: str = "float32", tokenizer: Any = None
) -> list[str]:
    """Writes policy parameters, with merged adapters, and the files that describe the policy.

    Args:
      out: output folder.
      params: parameters of the policy.
      exported: origin and format of the policy.
      dtype: dtype of the weights.
      tokenizer: tokenizer of the run, or None to load it.

    Returns:
      Names of the written files.
    """
    config = exported.config
    base = exported.base
    style = exported.style
    levels = config.budget.levels
    if tokenizer is None:
        tokenizer = _tokenizer(config.data, config.model, base)
    shape = _shape(config.model, base, params)
    module = _module(config.conditioning, config.budget.max, params)
    budget = policy_folder.BudgetInput(module, exported.words or None, levels)
    generation = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": list(eos_ids(tokenizer, style)),
        "pad_token_id": tokenizer.pad_token_id,
        **_sampling(exported),
        # Without a maximum length, transformers would use a short default.
        "max_length": shape.max_positions,
    }
    explained = policy_folder.Explained(
        thinking=describe(resolve(config).limits, tokenizer, style, shape.vocab_size),
        chat_template=chat_template(tokenizer, style, exported.words, levels),
        generation=generation,
        readme=model_card(exported),
        enforces_budget=not exported.merged,
    )
    return policy_folder.save_policy(
        out,
        adapters.merge(params),
        config=shape,
        budget=budget,
        source=base,
        tokenizer=_written_tokenizer(config.data, config.model),
        dtype=dtype,
        explained=explained,
    )
