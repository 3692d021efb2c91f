"""Reads Hugging Face folders and writes PEFT adapters; `bacr_jax.export` writes whole policies."""
