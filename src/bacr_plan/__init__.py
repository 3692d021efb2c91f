"""Predicts the memory usage and the duration of a run before any GPU is used."""
