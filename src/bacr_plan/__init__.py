"""Predicts the memory and the time of a run before any GPU is used."""
