"""Opens saved policies for reading: a checkpoint of a run, or a Hugging Face folder.

`evaluate`, `generate`, `export` and `bacr_jax.load` call `open_policy`, which does not read any
weights.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bacr_jax import files
from bacr_jax.config import Config, EvalConfig
from bacr_jax.config import io as config_io
from bacr_jax.config.settings import MethodSettings, resolve
from bacr_jax.config.values import FrozenMap
from bacr_jax.errors import UserError
from bacr_jax.prompts import fingerprints, thinking_section, tokenizers
from bacr_jax.prompts.formats import PromptFormat, format_for, with_texts
from bacr_jax.runs import folder as run_folder
from bacr_jax.runs.chosen_step import ChosenStep, choose_step
from bacr_jax.runs.folder import RunPaths
from bacr_jax.types import Params

# Config keys that determine what the weights of a policy compute, in addition to keys that every
# evaluation records (such as `model.compute_dtype`).
_MODEL_KEYS = (
    "budget.max",
    "conditioning",
    "model.preset",
    "model.hidden_size",
    "model.intermediate_size",
    "model.num_layers",
    "model.num_heads",
    "model.num_kv_heads",
    "model.head_dim",
    "model.rope_theta",
    "model.tie_embeddings",
)


def read_config(folder: Path) -> Config:
    """Reads the config of a run. Raises UserError if it is missing or invalid."""
    path = RunPaths(folder).config
    if not path.is_file():
        raise UserError(f"--run {folder} contains no {path.name}; use the folder of a run")
    return run_folder.read_config_file(path)


def read_params(folder: Path, step: int, *, base: Path | None = None) -> Params:
    """Loads the policy parameters of a checkpoint to the host.

    This does not require the optimizer state, the data or the devices of the run. If the checkpoint
    contains adapters, the base weights are loaded from the run's model.

    Args:
      folder: run folder.
      step: step of the checkpoint.
      base: current location of the run's model folder if the folder was moved, otherwise None.

    Raises:
      UserError: if the checkpoint or the base weights can't be read.
    """
    from bacr_jax.runs.checkpoint import read_part

    state = _state_folder(folder, step)
    trained = dict(read_part(state, "train", "policy"))
    if "adapter" not in trained:
        return trained
    from bacr_jax.runs.initial import read_base

    config = read_config(folder)
    weights = read_base(folder, resolve(config).policy, config.warmup, state, base)
    return {**weights, **trained}


def _state_folder(folder: Path, step: int) -> Path:
    """Returns the folder with the arrays of a checkpoint."""
    return RunPaths(folder.absolute()).checkpoints / str(step) / "state"


def trained_style(settings: MethodSettings) -> PromptFormat:
    """Returns the prompt format that a run was trained with.

    Args:
      settings: settings of the run's method.
    """
    from bacr_jax.methods.registry import declares_budget

    return format_for(settings.data, declares_budget=declares_budget(settings))


def check_base(run: Path, step: int, base: str | Path | None, where: str) -> None:
    """Checks that the config.json of a run's base model is the one that the run was trained with.

    Args:
      run: run folder.
      step: step of the checkpoint, which contains the configuration of the model.
      base: current folder of the base model, or None for a run without a model folder.
      where: option or config key that contains this folder, for error messages.

    Raises:
      UserError: if the config.json differs or can't be read, or the checkpoint is damaged.
    """
    if base is None:
        return
    from bacr_jax.model.hf.hf_config import read_hf_config
    from bacr_jax.runs.checkpoint import read_meta
    from bacr_jax.runs.provenance import check_same_model, model_record

    meta = read_meta(_state_folder(run, step))
    now = model_record(read_hf_config(base))
    check_same_model(meta, now, f"{where}{base}", f"the run in {run}")


def check_trained_with(
    run: Path, step: int, values: Mapping[str, Any], style: PromptFormat, tokenizer: Any
) -> None:
    """Checks that a run was trained with this tokenizer and this chat template.

    Args:
      run: run folder.
      step: step of the checkpoint, which contains the digests of the tokenizer and the template.
      values: values of the run's config, keyed by dotted name.
      style: prompt format of the run.
      tokenizer: tokenizer to check.

    Raises:
      UserError: if the tokenizer or the template differs, or the checkpoint is damaged.
    """
    from bacr_jax.runs.checkpoint import read_meta
    from bacr_jax.runs.provenance import check_same_prompts

    now = fingerprints.encoding_fingerprints(tokenizer, style)
    check_same_prompts(read_meta(_state_folder(run, step)), now, values, run)


@dataclass(frozen=True)
class SavedPolicy:
    """A policy on disk whose weights have not been loaded.

    Attributes:
      folder: run folder or Hugging Face folder.
      step: step of the checkpoint, or None for a Hugging Face folder.
      config: config of the run, or a config derived from the Hugging Face folder.
      identity: values that identify the policy, without the weights of a run (see
        `recorded_identity`).
      style: prompt format that the Hugging Face folder specifies. None to use the prompt format of
        the config.
      called: name of the policy in tables, or None to use the name of the folder.
      trained: config with which the run was trained, which `under` does not change. None for a
        Hugging Face folder.
      chosen: selected checkpoint and the reason for its selection, or None for a Hugging Face
        folder.
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
        """Returns a copy of the policy with another config.

        The prompt format of the folder is discarded if the new config changes the prompt format or
        the method.
        """
        same_format = config.data.prompt_format == self.config.data.prompt_format
        style = None
        if self.style is not None and same_format and config.method == self.config.method:
            style = with_texts(self.style, config.data)
        return dataclasses.replace(self, config=config, style=style)

    @property
    def name(self) -> str:
        """Returns the name of the policy in tables."""
        name = self.called or self.folder.absolute().name
        return name if self.step is None else f"{name}, step {self.step}"

    def check(self) -> None:
        """Raises UserError if the policy can't be loaded. Does not read any weights."""
        if self.step is not None:
            from bacr_jax.runs.checkpoint import check_policy

            return check_policy(_state_folder(self.folder, self.step))
        from bacr_jax.model.hf.reading import check_folder

        return check_folder(self.folder)

    def recorded_identity(self) -> dict[str, Any]:
        """Returns the values that identify the policy in result files. Reads no weights.

        For a run, they are `identity`, a hash of the weights, and a fingerprint of the settings
        that determine what the weights compute.

        Raises:
          UserError: if the metadata of the checkpoint is damaged.
        """
        if self.step is None or self.trained is None:
            return self.identity
        from bacr_jax.runs.checkpoint import policy_digest

        return self.identity | {
            "weights": policy_digest(_state_folder(self.folder, self.step)),
            "model": config_io.fingerprint(self.trained, *_MODEL_KEYS),
        }

    def params(self) -> Params:
        """Loads the parameters: to the host for a run, to the device for a Hugging Face folder."""
        if self.step is not None:
            return read_params(self.folder, self.step, base=self._moved_base())
        import jax.numpy as jnp

        from bacr_jax.model.hf.reading import load_policy

        return load_policy(self.folder, dtype=jnp.dtype(self.config.model.compute_dtype))[1]

    def _moved_base(self) -> Path | None:
        """Returns the folder `model.path` if it differs from the config of the run, else None."""
        path = self.config.model.path
        if path is None or self.trained is None or path == self.trained.model.path:
            return None
        return Path(path)

    def tokenizer(self) -> Any:
        """Loads the tokenizer with which the policy was trained.

        Raises:
          UserError: if the tokenizer is missing, or if it or the config.json of the model differs
            from the one used in training.
        """
        from bacr_jax.runs import setup

        if self.step is not None:
            tokenizer = setup.run_tokenizer(self.config.data, self.config.model)
            if self.trained is not None:
                check_base(self.folder, self.step, self.config.model.path, "model.path=")
                values = config_io.flatten(self.trained)
                style = trained_style(resolve(self.trained).method)
                check_trained_with(self.folder, self.step, values, style, tokenizer)
            return tokenizer
        model = self.config.model
        folder = model.tokenizer or model.path
        return tokenizers.load_tokenizer(folder, where="model.tokenizer", model=model.path)


def open_policy(
    run: Path | None, model: Path | None, step: int | str | None = None, *, download: bool = False
) -> SavedPolicy:
    """Opens the policy of a run or of a Hugging Face model, and reads its config.

    Args:
      run: run folder, or None to open `model`.
      model: folder or hub name of a Hugging Face model.
      step: step number, "best" or "newest". None selects the best step, or the newest step if no
        best step was recorded.
      download: True to download the model if it is not on this machine.

    Raises:
      UserError: if the policy is missing or its config is invalid.
    """
    if run is None:
        assert model is not None
        from bacr_jax.model.hf.hub import local_folder

        folder = Path(local_folder(str(model), download=download, where="--model"))
        saved = _policy_of_model(folder)
        if folder == model:
            return saved
        # The name of a folder in the hub's cache is a commit hash, so use the name of the
        # model.
        return dataclasses.replace(saved, called=model.name)
    config = read_config(run)
    chosen = choose_step(run, step)
    identity = {"run": config_io.fingerprint(config), "method": config.method, "step": chosen.step}
    return SavedPolicy(run, chosen.step, config, identity, trained=config, chosen=chosen)


def _policy_of_model(folder: Path) -> SavedPolicy:
    """Opens the policy of a Hugging Face folder.

    The policy receives its budget as an embedding if the folder contains a budget module, and as
    text in the prompt if config.json contains a budget prompt. The prompt format and the lengths
    are read from config.json. The compute dtype is the dtype of the stored weights.

    Raises:
      UserError: if the folder contains no Qwen2 model, or was modified after its export.
    """
    from bacr_jax.model.hf.archive import check_files
    from bacr_jax.model.hf.hf_config import (
        read_budget_module,
        read_budget_words,
        read_hf_config,
        read_levels,
        read_thinking,
    )

    # Verify all files that determine the prompts. Weights are verified when they are loaded.
    check_files(folder, weights=False)
    read_hf_config(folder)
    raw = files.read_object(folder / "config.json")
    stored_dtype = raw.get("torch_dtype") or raw.get("dtype") or "bfloat16"
    config = Config()
    model = dataclasses.replace(
        config.model,
        path=str(folder),
        compute_dtype="float32" if stored_dtype == "float32" else "bfloat16",
    )
    module = read_budget_module(folder)
    words = read_budget_words(folder)
    budget_input: Any = "none" if words is None else "prompt"
    conditioning = config.conditioning
    budget = dataclasses.replace(config.budget, levels=FrozenMap(read_levels(folder)))
    if module is not None:
        budget_input = "embedding" if words is None else "both"
        conditioning = module.conditioning
        budget = dataclasses.replace(budget, max=module.b_max, min=min(budget.min, module.b_max))
    if words is None:
        words = conditioning.prompt_text
    conditioning = dataclasses.replace(conditioning, budget_input=budget_input, prompt_text=words)
    config = dataclasses.replace(config, model=model, conditioning=conditioning, budget=budget)
    style = None
    thinking = read_thinking(folder)
    if thinking is not None:
        where = folder / "config.json"
        style = thinking_section.read_style(thinking, where)
        config = config_io.override(config, thinking_section.read_settings(thinking, where))
    identity = {"weights": weights_fingerprint(folder)}
    return SavedPolicy(folder, None, config, identity, style)


def with_recommended_sampling(evaluation: EvalConfig, folder: Path) -> EvalConfig:
    """Returns the section `eval` with the sampling settings of a Hugging Face folder's publisher.

    They are read from generation_config.json into `temperature` and `top_p`. The section is
    unchanged if this file does not enable sampling.

    Raises:
      UserError: if the file is malformed.
    """
    from bacr_jax.model.hf.generation_config import read_sampling

    sampling = read_sampling(folder)
    if not sampling:
        return evaluation
    return dataclasses.replace(
        evaluation,
        # The default of both settings in transformers is 1.
        temperature=float(sampling.get("temperature", 1.0)),
        top_p=float(sampling.get("top_p", 1.0)),
    )


def weights_fingerprint(folder: Path) -> str:
    """Returns a short digest of the config and of samples of the weight files in a folder.

    Raises:
      UserError: if the folder contains no weight files.
    """
    from bacr_client import fingerprint

    try:
        return fingerprint(folder)
    except FileNotFoundError:
        raise UserError(
            f"{folder} contains no weights in the safetensors format; use a Hugging Face model "
            "folder"
        ) from None
