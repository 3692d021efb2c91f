"""Training methods as compositions of the functions of `curriculum`, `rewards` and `advantages`."""

from bacr_jax.methods.method import Advantages, DynamicSampling, GroupBatch, Method, RejectionSFT
from bacr_jax.methods.registry import load_method

__all__ = [
    "Advantages",
    "DynamicSampling",
    "GroupBatch",
    "Method",
    "RejectionSFT",
    "load_method",
]
