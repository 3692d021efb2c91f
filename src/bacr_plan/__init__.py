"""Predicts the memory usage and the duration of a run before the run uses any GPU."""
