"""A laboratory of its own: how noisy gradients are under every baseline, on the same rollouts."""
