"""Everything between strings and token ids: prompts, stop strings, answer extraction (host)."""
