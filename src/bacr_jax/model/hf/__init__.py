"""Hugging Face folders in, and adapters out; `bacr_jax.export` writes policies."""

from bacr_jax.model.hf.hf_config import (
    BudgetModule as BudgetModule,
    read_budget_module as read_budget_module,
    read_budget_words as read_budget_words,
    read_hf_config as read_hf_config,
    read_levels as read_levels,
    read_thinking as read_thinking,
)
from bacr_jax.model.hf.reading import (
    check_folder as check_folder,
    load_policy as load_policy,
)
