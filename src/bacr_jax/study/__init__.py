"""The paper's experiments: many runs, and what they say together."""
