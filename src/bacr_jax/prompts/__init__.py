"""Round a policy: prompts in, stop strings, graded outcomes out."""
