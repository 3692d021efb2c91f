"""Hugging Face folders in, and adapters out; `bacr_jax.export` writes policies."""

from bacr_jax.model.hf.hf_config import (
    BudgetModule,
    read_budget_module,
    read_budget_words,
    read_hf_config,
    read_levels,
    read_thinking,
)
from bacr_jax.model.hf.reading import check_folder, load_policy

__all__ = [
    "BudgetModule",
    "check_folder",
    "load_policy",
    "read_budget_module",
    "read_budget_words",
    "read_hf_config",
    "read_levels",
    "read_thinking",
]
