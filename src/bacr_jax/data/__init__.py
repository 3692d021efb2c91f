"""Questions with verifiable answers: the procedural task, difficulty groups, prompts per set."""
