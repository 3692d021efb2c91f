"""Reads Hugging Face folders and writes PEFT adapters. `bacr_jax.export` writes full policies."""
