"""Budget-adaptive curriculum reasoning for language models, in JAX."""

__version__ = "0.1.0"
