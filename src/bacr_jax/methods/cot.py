"""Standard chain of thought: the policy as it is, cut at the budget like every other.

It trains nothing: `python -m bacr_jax.evaluate` measures it.
"""

NAME = "Standard CoT"


def samples_and_budget(budget: int, *, samples: int = 1) -> tuple[int, int]:
    """Samples per question and thinking budget of each, at budget b: one, with all of it.

    Args:
      budget: b, in tokens.
      samples: repetitions, whose accuracy is averaged.

    Returns:
      Samples, and tokens for each.
    """
    return samples, budget
