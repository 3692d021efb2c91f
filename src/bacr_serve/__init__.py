"""`bacr serve`: an OpenAI-compatible HTTP endpoint whose requests contain a thinking budget."""
