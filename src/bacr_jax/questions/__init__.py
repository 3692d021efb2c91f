"""Sets of questions with verifiable answers: read or made, grouped, split, drawn from."""
