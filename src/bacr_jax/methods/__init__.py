"""Training methods as compositions of the functions of `curriculum`, `rewards` and `advantages`.

A module here is a method: its published formulas, `make(config)`, which computes no array, and
`problems(config)` where settings can contradict it. `method` says what it is made of, `registry`
finds it by name, `grpo_family` and `budget_prior` are what several share.
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
