"""Evaluates policies: accuracy at each thinking budget, with confidence intervals."""
