"""Evaluates policies: accuracy by thinking budget, with confidence intervals."""
