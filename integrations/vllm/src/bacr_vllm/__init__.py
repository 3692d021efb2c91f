"""Thinking budgets in vLLM: one per request, for policies exported by bacr_jax."""

import re
from typing import Any

__all__ = ["Server", "generate_within", "register"]

# Versions of vLLM whose hooks are known, as pyproject.toml pins them.
_FIRST, _AFTER_LAST = (0, 32), (0, 34)


def check_version(version: str) -> None:
    """Refuses versions of vLLM whose hooks are unknown.

    Raises:
      ImportError: it is another version.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if not found or not _FIRST <= tuple(map(int, found.groups())) < _AFTER_LAST:
        raise ImportError(
            f"bacr-vllm: found vLLM {version}; install vllm>=0.32,<0.34, or leave bacr-vllm out"
        )


def register() -> None:
    """Entry point `vllm.general_plugins`: runs in every process of vLLM.

    Raises:
      ImportError: an unknown version of vLLM.
    """
    from vllm import ModelRegistry, __version__
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    check_version(__version__)
    from bacr_vllm.cache_salt import salt_requests
    from bacr_vllm.config import CONDITIONED, PLAIN, ConditionedChecks, PlainChecks

    known = ModelRegistry.get_supported_archs()
    for conditioned, plain in zip(CONDITIONED, PLAIN, strict=True):
        if conditioned not in known:
            ModelRegistry.register_model(conditioned, f"bacr_vllm.model:{conditioned}")
        MODELS_CONFIG_MAP[conditioned] = ConditionedChecks
        # Of vLLM's own models: folders that say how their thinking is held, and no others.
        MODELS_CONFIG_MAP.setdefault(plain, PlainChecks)
    salt_requests()


def __getattr__(name: str) -> Any:
    """What users call; read when it is asked for, since vLLM imports this file at every start."""
    if name == "Server":
        from bacr_client import Server

        return Server
    if name == "generate_within":
        from bacr_vllm.offline import generate_within

        return generate_within
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
