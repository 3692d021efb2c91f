"""The training loop: Algorithm 1 of the paper, its start, its warm-up and its output."""
