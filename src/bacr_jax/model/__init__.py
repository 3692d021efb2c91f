"""The policy network: the decoder, the budget embedding, the value head."""
