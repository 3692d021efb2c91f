"""Contains the training methods, built from functions of `curriculum`, `rewards` and `advantages`.

Each method is a module that contains the published formulas and a function `make(config)`, which
builds the method without computing any array. If some settings are incompatible with the method,
the module also contains a function `problems(config)`. The module `method` defines the `Method`
class, and `registry` looks up methods by name. `grpo_family` and `budget_prior` contain code shared
by several methods.
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
