"""Converts models in llama.cpp's GGUF format to Hugging Face folders. Does not require JAX."""
