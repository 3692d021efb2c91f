"""Hugging Face folders in, and adapters out; `bacr_jax.export` writes policies."""

import importlib
from typing import TYPE_CHECKING, Any

from bacr_jax.model.hf.hf_config import (
    BudgetModule as BudgetModule,
    read_budget_module as read_budget_module,
    read_budget_words as read_budget_words,
    read_hf_config as read_hf_config,
    read_levels as read_levels,
    read_thinking as read_thinking,
)

if TYPE_CHECKING:
    from bacr_jax.model.hf.reading import (
        check_folder as check_folder,
        load_policy as load_policy,
    )


def __getattr__(name: str) -> Any:
    """What reads values, and only that, needs JAX: it is imported when it is first used."""
    if name not in ("check_folder", "load_policy"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.reading"), name)
