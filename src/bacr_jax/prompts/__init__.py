"""The environment of the policy: prompts, stop strings and grading of answers."""
