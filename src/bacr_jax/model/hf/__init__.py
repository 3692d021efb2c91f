"""Hugging Face folders in, and adapters out; `bacr_jax.export` writes policies."""
