"""Algorithm 1, and the loop around it."""
