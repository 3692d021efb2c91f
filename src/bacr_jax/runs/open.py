"""Policies on disk, opened for reading: the checkpoint of a run, or a Hugging Face folder."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bacr_jax import documents
from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.config.values import FrozenMap
from bacr_jax.errors import UserError
from bacr_jax.prompts import fingerprints, thinking_section, tokenizers
from bacr_jax.prompts.formats import PromptFormat, format_for, with_texts
from bacr_jax.runs import folder as run_folder
from bacr_jax.runs.chosen_step import ChosenStep, choose_step
from bacr_jax.runs.folder import RunPaths
from bacr_jax.types import Params


def read_config(folder: Path) -> Config:
    """The config of a run; UserError: no run there, or a config that can't be read."""
    path = RunPaths(folder).config
    if not path.is_file():
        raise UserError(f"--run {folder}: holds no {path.name}; write the folder of a run")
    return run_folder.read_config_file(path)


def read_params(folder: Path, step: int, *, base: Path | None = None) -> Params:
    """Policy parameters of a checkpoint, on the host.

    Only the policy is read: optimizer states, data and devices of the run are not needed. A
    checkpoint of adapters holds no base; that is read from where the run had it.
    """
    from bacr_jax.runs.checkpoint import read_part

    state = _state_folder(folder, step)
    trained = dict(read_part(state, "train", "policy"))
    if "adapter" not in trained:
        return trained
    from bacr_jax.runs.initial import read_base

    return {**read_base(folder, read_config(folder), state, base), **trained}


def _state_folder(folder: Path, step: int) -> Path:
    return RunPaths(folder.absolute()).checkpoints / str(step) / "state"


def trained_style(config: Config) -> PromptFormat:
    """The prompt format that a run trains in."""
    from bacr_jax.methods.registry import declares_budget

    return format_for(config, declares_budget=declares_budget(config))


def check_trained_with(run: Path, step: int, config: Config, tokenizer: Any) -> None:
    """Refuses a tokenizer or a chat template that is not what a run was trained with.

    `config`: the run's.

    UserError: says which, or the checkpoint is damaged.
    """
    from bacr_jax.runs.checkpoint import read_meta
    from bacr_jax.runs.provenance import check_same_prompts

    now = {
        "tokenizer": fingerprints.tokenizer_fingerprint(tokenizer),
        "template": fingerprints.template_fingerprint(tokenizer, trained_style(config)),
    }
    check_same_prompts(read_meta(_state_folder(run, step)), now, config, run)


@dataclass(frozen=True)
class SavedPolicy:
    """A policy on disk, not read yet.

    Attributes:
      step: step of the checkpoint; None for a Hugging Face folder.
      config: settings it was trained with, or those that fit the folder.
      identity: what makes it this policy and no other, for records.
      style: prompt format that a Hugging Face folder names; None: the config says it.
      called: what tables call it; None: what its folder is called.
      trained: config of the run, whatever `under` changes; None for a Hugging Face folder.
      chosen: how the step was chosen; None for a Hugging Face folder.
    """

    folder: Path
    step: int | None
    config: Config
    identity: dict[str, Any]
    style: PromptFormat | None = None
    called: str | None = None
    trained: Config | None = None
    chosen: ChosenStep | None = None

    def under(self, config: Config) -> "SavedPolicy":
        """The policy under other settings; its own prompt format goes where they say another."""
        of = lambda one: (one.data.prompt_format, one.method)
        style = self.style
        if of(config) != of(self.config):
            style = None
        elif style is not None:
            style = with_texts(style, config)
        return dataclasses.replace(self, config=config, style=style)

    @property
    def name(self) -> str:
        """For tables."""
        name = self.called or self.folder.absolute().name
        return name if self.step is None else f"{name}, step {self.step}"

    def check(self) -> None:
        """UserError if its files can't be used, as far as that shows without a value read."""
        if self.step is not None:
            from bacr_jax.runs.checkpoint import check_policy

            return check_policy(_state_folder(self.folder, self.step))
        from bacr_jax.model.hf.reading import check_folder

        return check_folder(self.folder)

    def params(self) -> Params:
        """Its parameters: on the host from a run, on the device from a Hugging Face folder."""
        if self.step is not None:
            return read_params(self.folder, self.step)
        import jax.numpy as jnp

        from bacr_jax.model.hf.reading import load_policy

        return load_policy(self.folder, dtype=jnp.dtype(self.config.model.compute_dtype))[1]

    def tokenizer(self) -> Any:
        """The tokenizer that it was trained with; UserError: its folder holds none, or another."""
        from bacr_jax.runs import setup

        if self.step is not None:
            tokenizer = setup.run_tokenizer(self.config)
            if self.trained is not None:
                check_trained_with(self.folder, self.step, self.trained, tokenizer)
            return tokenizer
        model = self.config.model
        folder = model.tokenizer or model.path
        return tokenizers.load_tokenizer(folder, where="model.tokenizer", model=model.path)


def open_policy(
    run: Path | None, model: Path | None, step: int | str | None = None, *, download: bool = False
) -> SavedPolicy:
    """The policy of a run, or of a Hugging Face folder or name; only its config is read."""
    if run is None:
        assert model is not None
        from bacr_jax.model.hf.hub import local_folder

        folder = Path(local_folder(str(model), download=download, where="--model"))
        saved = _policy_of_model(folder)
        # Folders of the hub's cache are called after commits.
        return saved if folder == model else dataclasses.replace(saved, called=model.name)
    config = read_config(run)
    chosen = choose_step(run, step)
    identity = {"run": config_io.fingerprint(config), "method": config.method, "step": chosen.step}
    return SavedPolicy(run, chosen.step, config, identity, trained=config, chosen=chosen)


def _policy_of_model(folder: Path) -> SavedPolicy:
    """The policy of a Hugging Face folder; UserError: it holds no Qwen2 model.

    It is conditioned if the folder has a budget module, told in words if config.json says in which,
    asked in the prompt format and within the lengths that are named there, and computes in the type
    that its weights are stored in.
    """
    from bacr_jax.model.hf.archive import check_files
    from bacr_jax.model.hf.hf_config import (
        read_budget_module,
        read_budget_words,
        read_hf_config,
        read_levels,
        read_thinking,
    )

    # What says how it is asked is read before its weights are.
    check_files(folder, weights=False)
    read_hf_config(folder)
    module = read_budget_module(folder)
    raw = documents.read_object(folder / "config.json")
    stored = raw.get("torch_dtype") or raw.get("dtype") or "bfloat16"
    config = Config()
    model = dataclasses.replace(
        config.model,
        path=str(folder),
        compute_dtype="float32" if stored == "float32" else "bfloat16",
    )
    words = read_budget_words(folder)
    told: Any = "nothing" if words is None else "words"
    conditioning = config.conditioning
    budget = dataclasses.replace(config.budget, levels=FrozenMap(read_levels(folder)))
    if module is not None:
        told = "embedding" if words is None else "both"
        conditioning = module.conditioning
        budget = dataclasses.replace(budget, max=module.b_max, min=min(budget.min, module.b_max))
    conditioning = dataclasses.replace(
        conditioning, told=told, words=conditioning.words if words is None else words
    )
    config = dataclasses.replace(config, model=model, conditioning=conditioning, budget=budget)
    thinking, style = read_thinking(folder), None
    if thinking is not None:
        where = folder / "config.json"
        style = thinking_section.read_style(thinking, where)
        config = config_io.override(config, thinking_section.read_settings(thinking, where))
    identity = {"weights": weights_fingerprint(folder)}
    return SavedPolicy(folder, None, config, identity, style)


def weights_fingerprint(folder: Path) -> str:
    """A short hash of a folder's config and of pieces all over its weight files."""
    from bacr_client import fingerprint

    try:
        return fingerprint(folder)
    except FileNotFoundError:
        raise UserError(
            f"{folder}: holds no safetensors weights; write a Hugging Face folder"
        ) from None
