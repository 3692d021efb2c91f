"""The policy network: Qwen2.5, the budget embedding, the value head."""
