"""Everything around the policy: prompts, stop strings, and grading of its answers."""
