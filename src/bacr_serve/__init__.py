"""`bacr serve`: an OpenAI-compatible HTTP server whose requests can set a thinking budget."""
