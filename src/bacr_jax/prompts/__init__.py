"""The policy's task: builds prompts, detects stop strings, and grades answers."""
