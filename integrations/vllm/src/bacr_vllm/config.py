"""What vLLM may not do with a folder of ours; run when its configuration is complete."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.model_executor.models.config import VerifyAndUpdateConfig

from bacr_client import check_manifest, fingerprint, read_rules
from bacr_vllm.requests import BudgetRequests, processor_name

# Architectures of folders without an embedding, and of those with one.
PLAIN = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM")
CONDITIONED = tuple(f"Bacr{name}" for name in PLAIN)

# Values of `budget_module` in config.json that the model knows.
_MODULE = {
    "sharing": ("shared", "per_layer"),
    "positions": ("all", "response"),
    "input": ("raw", "log", "normalised"),
    "gate": ("sigmoid", "sigmoid_normed", "tanh"),
}


def _refuse(advice: str) -> None:
    raise ValueError(f"bacr-vllm: {advice}")


def check_module(module: Any) -> None:
    """The section `budget_module` says what the model can do.

    Raises:
      ValueError: it does not.
    """
    if not isinstance(module, dict):
        _refuse("config.json has no budget_module; serve a folder of bacr export")
    for name, known in _MODULE.items():
        if module.get(name) not in known:
            _refuse(f"budget_module.{name}: found {module.get(name)!r}; export the folder again")
    # Folders of earlier versions say where phi joins the stream.
    if module.get("site", "after_block") != "after_block":
        _refuse(f"budget_module.site: found {module['site']!r}; only after_block is supported")
    for name in ("gate_bias", "b_max"):
        if isinstance(module.get(name), bool) or not isinstance(module.get(name), int | float):
            _refuse(f"budget_module.{name}: found {module.get(name)!r}; export the folder again")


def check_thinking(thinking: Any) -> None:
    """The section `thinking` says how budgets are held.

    Raises:
      ValueError: it does not.
    """
    try:
        read_rules(thinking)
    except (KeyError, TypeError, ValueError, AttributeError):
        _refuse("config.json does not say how thinking is held (thinking); export the folder again")


def check_files(model_config: Any) -> None:
    """The files of a local folder are what was exported.

    Raises:
      ValueError: one of them is not.
    """
    folder = Path(model_config.model)
    if folder.is_dir():
        try:
            check_manifest(folder)
        except ValueError as error:
            _refuse(str(error))


def is_ours(config: Any) -> bool:
    """Whether the config of a plain folder was written by `bacr export`."""
    thinking = getattr(config, "thinking", None)
    return isinstance(thinking, Mapping) and "prompt_format" in thinking


def add_requests(model_config: Any) -> None:
    """Makes vLLM ask `BudgetRequests` about every request for this model, and for no other."""
    config = model_config.hf_config
    folder = Path(model_config.model)
    most = config.max_position_embeddings - 1
    levels = dict(getattr(config, "budget_levels", None) or {})
    name = processor_name(levels, most, fingerprint(folder) if folder.is_dir() else "")
    others = [one for one in model_config.logits_processors or () if one != name]
    model_config.logits_processors = [*others, name]


def check_engine(vllm_config: Any) -> None:
    """The engine is one in which budgets hold.

    Raises:
      ValueError: says what to leave out.
    """
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        _refuse("pipeline parallelism is not supported; pass --tensor-parallel-size instead")
    if vllm_config.speculative_config is not None:
        _refuse("speculative decoding is not supported; leave --speculative-config out")
    if not vllm_config.use_v2_model_runner:
        _refuse(
            "budgets per request need vLLM's model runner V2; set VLLM_USE_V2_MODEL_RUNNER=1 (with "
            "Triton), and leave out what V2 does not support"
        )


class ConditionedChecks(VerifyAndUpdateConfig):
    """For folders whose policy is told its budget by an embedding."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Called by vLLM with the model's part.

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
            _refuse(f"head_dim: found {config.head_dim}; vLLM's Qwen2 has hidden_size / heads")
        add_requests(model_config)

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Called by vLLM with all of it.

        Raises:
          ValueError: this way of serving is not supported.
        """
        check_engine(vllm_config)


class PlainChecks(VerifyAndUpdateConfig):
    """For plain models: folders that are none of ours stay as they are."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """As of `ConditionedChecks`."""
        check_files(model_config)
        if is_ours(model_config.hf_config):
            check_thinking(model_config.hf_config.thinking)
            add_requests(model_config)

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """As of `ConditionedChecks`."""
        if is_ours(vllm_config.model_config.hf_config):
            check_engine(vllm_config)


__all__ = [
    "CONDITIONED",
    "PLAIN",
    "BudgetRequests",
    "ConditionedChecks",
    "PlainChecks",
]
