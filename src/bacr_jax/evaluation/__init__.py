"""Accuracy by budget, with its uncertainty."""
