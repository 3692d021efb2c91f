"""vLLM plugin that gives every request its own thinking budget.

It serves folders that `bacr export` wrote. vLLM loads it through the entry point `register`.
"""

import re
from typing import Any

__all__ = ["Server", "generate_within", "register"]

# Supported versions of vLLM: from the first, and before the second. pyproject.toml has the same
# limits, because the plugin overrides functions that other versions may not have.
_FIRST_VERSION = (0, 32)
_END_VERSION = (0, 34)


def check_version(version: str) -> None:
    """Raises ImportError if this version of vLLM is not supported."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if not match or not _FIRST_VERSION <= tuple(map(int, match.groups())) < _END_VERSION:
        raise ImportError(
            f"bacr-vllm does not support vLLM {version}; install vllm>=0.32,<0.34, or uninstall "
            "bacr-vllm"
        )


def register() -> None:
    """Registers the models and checks of this plugin with vLLM.

    vLLM calls this function (entry point `vllm.general_plugins`) in each of its processes.

    Raises:
      ImportError: this version of vLLM is not supported.
    """
    from vllm import ModelRegistry, __version__
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    check_version(__version__)
    from bacr_vllm.cache_salt import salt_requests
    from bacr_vllm.config import CONDITIONED, PLAIN, ConditionedChecks, PlainChecks

    registered = ModelRegistry.get_supported_archs()
    for conditioned, plain in zip(CONDITIONED, PLAIN, strict=True):
        if conditioned not in registered:
            ModelRegistry.register_model(conditioned, f"bacr_vllm.model:{conditioned}")
        MODELS_CONFIG_MAP[conditioned] = ConditionedChecks
        # vLLM's own model classes get checks too, which apply only to folders of `bacr export`.
        MODELS_CONFIG_MAP.setdefault(plain, PlainChecks)
    salt_requests()


def __getattr__(name: str) -> Any:
    """Imports `Server` or `generate_within` when it is first used.

    vLLM imports this module at every start, which should not import the client too.
    """
    if name == "Server":
        from bacr_client import Server

        return Server
    if name == "generate_within":
        from bacr_vllm.offline import generate_within

        return generate_within
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
