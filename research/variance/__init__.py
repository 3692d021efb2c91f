"""Measures the noise of policy gradients with different baselines on the same rollouts."""
