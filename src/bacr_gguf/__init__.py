"""Converts models of llama.cpp's file format (GGUF) to Hugging Face folders; needs no JAX."""
