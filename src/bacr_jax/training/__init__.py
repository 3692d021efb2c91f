"""Contains the training loop of Algorithm 1, with its initialization, warm-up and output."""
