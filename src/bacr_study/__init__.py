"""The paper's experiments: runs of many methods, tasks and seeds, and what they say together."""
