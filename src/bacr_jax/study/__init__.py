"""Studies: many runs side by side, and what they say together."""
