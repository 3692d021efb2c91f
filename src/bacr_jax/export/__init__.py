"""Exports policies as Hugging Face folders that include their prompts and decoding rules."""
