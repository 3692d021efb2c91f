"""Training methods as compositions of the functions of `curriculum`, `rewards` and `advantages`."""

from bacr_jax.methods.method import Credit, Method, Observed, Resampling, load_method

__all__ = ["Credit", "Method", "Observed", "Resampling", "load_method"]
