"""The learner: objective, optimizer and policy updates."""
