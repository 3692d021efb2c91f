"""Models of llama.cpp's file format as Hugging Face folders; needs no JAX."""
