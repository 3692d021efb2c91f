"""Hugging Face folders in and out."""

from bacr_jax.model.hf.hf_config import (
    BudgetModule,
    read_budget_module,
    read_budget_words,
    read_hf_config,
    read_levels,
)
from bacr_jax.model.hf.reading import check_folder, load_policy
from bacr_jax.model.hf.writing import save_policy

__all__ = [
    "BudgetModule",
    "check_folder",
    "load_policy",
    "read_budget_module",
    "read_budget_words",
    "read_hf_config",
    "read_levels",
    "save_policy",
]
