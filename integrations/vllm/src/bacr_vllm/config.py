"""Checks of an exported folder and of the engine's settings.

vLLM calls them when its configuration is complete, before it reads any weights.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.model_executor.models.config import VerifyAndUpdateConfig

from bacr_client import check_manifest, fingerprint, read_rules
from bacr_vllm.requests import BudgetRequests, processor_name

# Values of `architectures` in config.json, without and with a budget embedding.
PLAIN = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM")
CONDITIONED = tuple(f"Bacr{name}" for name in PLAIN)

# Supported values of each setting of `budget_module` in config.json.
_SUPPORTED = {
    "sharing": ("shared", "per_layer"),
    "positions": ("all", "response"),
    "input": ("raw", "log", "normalised"),
    "gate": ("sigmoid", "sigmoid_normed", "tanh"),
}


def _refuse(message: str) -> None:
    raise ValueError(f"bacr-vllm: {message}")


def check_module(module: Any) -> None:
    """Raises ValueError if the section `budget_module` of config.json is not supported."""
    if not isinstance(module, dict):
        _refuse("config.json has no section 'budget_module'; serve a folder that bacr export wrote")
    for name, supported in _SUPPORTED.items():
        value = module.get(name)
        if value not in supported:
            _refuse(
                f"budget_module.{name} in config.json is {value!r}, but must be one of "
                f"{', '.join(supported)}; export the folder again"
            )
    # Folders of earlier versions specify at which place of a layer phi is added.
    if module.get("site", "after_block") != "after_block":
        _refuse(
            f"budget_module.site in config.json is {module['site']!r}, but only 'after_block' is "
            "supported"
        )
    for name in ("gate_bias", "b_max"):
        value = module.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            _refuse(
                f"budget_module.{name} in config.json is {value!r}, but must be a number; export "
                "the folder again"
            )


def check_thinking(thinking: Any) -> None:
    """Raises ValueError if the section `thinking` of config.json is missing or invalid."""
    try:
        read_rules(thinking)
    except (KeyError, TypeError, ValueError, AttributeError):
        _refuse(
            "config.json has no valid section 'thinking', which describes how budgets are "
            "enforced; export the folder again"
        )


def check_files(model_config: Any) -> None:
    """Raises ValueError if a file of a local folder differs from what was exported."""
    folder = Path(model_config.model)
    if folder.is_dir():
        try:
            check_manifest(folder)
        except ValueError as error:
            _refuse(str(error))


def is_exported(config: Any) -> bool:
    """True if the config of a folder without an embedding was written by `bacr export`."""
    thinking = getattr(config, "thinking", None)
    return isinstance(thinking, Mapping) and "prompt_format" in thinking


def add_requests(model_config: Any) -> None:
    """Adds the class `BudgetRequests` of this folder to vLLM's logits processors."""
    config = model_config.hf_config
    folder = Path(model_config.model)
    most = config.max_position_embeddings - 1
    levels = dict(getattr(config, "budget_levels", None) or {})
    name = processor_name(levels, most, fingerprint(folder) if folder.is_dir() else "")
    others = [entry for entry in model_config.logits_processors or () if entry != name]
    model_config.logits_processors = [*others, name]


def check_engine(vllm_config: Any) -> None:
    """Raises ValueError if budgets can't be enforced with these settings of the engine."""
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        _refuse("pipeline parallelism is not supported; pass --tensor-parallel-size instead")
    if vllm_config.speculative_config is not None:
        _refuse("speculative decoding is not supported; leave out --speculative-config")
    # Not tested. An adapter has no budget embedding, so its requests would get the folder's.
    if vllm_config.lora_config is not None:
        _refuse(
            "LoRA adapters are not supported; leave out --enable-lora, and serve a folder into "
            "which bacr export merged the adapters"
        )
    if not vllm_config.use_v2_model_runner:
        _refuse(
            "budgets per request need vLLM's model runner V2; set VLLM_USE_V2_MODEL_RUNNER=1 (it "
            "needs Triton), and leave out options that V2 does not support"
        )


class ConditionedChecks(VerifyAndUpdateConfig):
    """Checks of folders whose policy receives its budget as an embedding."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Checks the folder; vLLM calls this with the model's settings.

        Raises:
          ValueError: the folder can't be served.
        """
        check_files(model_config)
        config = model_config.hf_config
        check_module(getattr(config, "budget_module", None))
        check_thinking(getattr(config, "thinking", None))
        width = config.hidden_size // config.num_attention_heads
        qwen2 = config.architectures == [f"Bacr{PLAIN[0]}"]
        if qwen2 and getattr(config, "head_dim", None) not in (None, width):
            _refuse(
                f"head_dim in config.json is {config.head_dim}, but vLLM's Qwen2 supports only "
                f"hidden_size / num_attention_heads, which is {width}"
            )
        add_requests(model_config)

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Checks the engine; vLLM calls this with all settings.

        Raises:
          ValueError: these settings are not supported.
        """
        check_engine(vllm_config)


class PlainChecks(VerifyAndUpdateConfig):
    """Checks of folders without an embedding.

    Folders that `bacr export` did not write are not checked or changed.
    """

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Checks the folder; vLLM calls this with the model's settings."""
        check_files(model_config)
        if is_exported(model_config.hf_config):
            check_thinking(model_config.hf_config.thinking)
            add_requests(model_config)

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Checks the engine; vLLM calls this with all settings."""
        if is_exported(vllm_config.model_config.hf_config):
            check_engine(vllm_config)


__all__ = [
    "CONDITIONED",
    "PLAIN",
    "BudgetRequests",
    "ConditionedChecks",
    "PlainChecks",
]
