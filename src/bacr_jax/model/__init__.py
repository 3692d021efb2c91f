"""The policy network: decoder layers, budget embedding, value head and low-rank adapters."""
