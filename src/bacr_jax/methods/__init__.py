"""Training methods, composed of the functions of `curriculum`, `rewards` and `advantages`.

Each method is a module with its published formulas, `make(config)`, which computes no array, and
`problems(config)` if settings can contradict the method. `method` defines the type `Method`,
`registry` finds a method by name. Several methods share `grpo_family` and `budget_prior`.
"""

from bacr_jax.methods.method import (
    Advantages as Advantages,
    DynamicSampling as DynamicSampling,
    GroupBatch as GroupBatch,
    Method as Method,
    Published as Published,
    RejectionSFT as RejectionSFT,
)
from bacr_jax.methods.registry import load_method as load_method
