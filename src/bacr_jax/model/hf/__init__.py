"""Hugging Face folders in and out."""

from bacr_jax.model.hf.hf_config import (
    BudgetModule,
    read_budget_module,
    read_budget_words,
    read_hf_config,
    read_levels,
    read_thinking,
)
from bacr_jax.model.hf.reading import check_folder, load_policy
from bacr_jax.model.hf.writing import Explained, save_policy

__all__ = [
    "BudgetModule",
    "Explained",
    "check_folder",
    "load_policy",
    "read_budget_module",
    "read_budget_words",
    "read_hf_config",
    "read_levels",
    "read_thinking",
    "save_policy",
]
