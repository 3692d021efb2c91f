"""Measures how noisy policy gradients are under every baseline, on the same rollouts."""
