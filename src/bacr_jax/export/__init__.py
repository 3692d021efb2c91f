"""Exports policies as folders for transformers, which contain their prompts and rules."""
