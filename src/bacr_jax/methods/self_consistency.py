"""Self-Consistency (arXiv 2203.11171): k samples, the most frequent answer.

It trains nothing: `python -m bacr_jax.evaluate` measures it with `majority_at_k`, where
unanswered samples do not vote and ties count by their expected accuracy. What budget b means for k
samples is stated with every number, since both readings are in use.
"""

from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from bacr_jax.errors import UserError

NAME = "Self-Consistency"

Accounting = Literal["per_sample", "matched_total"]


def samples_and_budget(
    budget: int, *, samples: int = 8, accounting: Accounting = "matched_total"
) -> tuple[int, int]:
    """Samples per question and thinking budget of each, at budget b.

        per_sample:     k samples of b tokens, k b in all
        matched_total:  k samples of floor(b / k) tokens, b in all

    Only the second compares with a method that thinks once for b tokens.

    Args:
      budget: b, in tokens.
      samples: k.
      accounting: which of the two.

    Returns:
      k, and tokens for each.

    Raises:
      UserError: fewer tokens than samples, or an unknown accounting.
    """
    if accounting == "per_sample":
        return samples, budget
    if accounting != "matched_total":
        raise UserError(f"accounting: found {accounting!r}; write per_sample or matched_total")
    if budget < samples:
        raise UserError(
            f"budget {budget}: leaves no token for each of {samples} samples; write fewer samples, "
            f"or a budget of {samples} or more"
        )
    return samples, budget // samples


def tokens_spent(lengths: Int[np.ndarray, "n k"]) -> Float[np.ndarray, "n"]:
    """Tokens of a vote: the sum over its samples, not their mean.

    Args:
      lengths: tokens of each sample, answers included.

    Returns:
      Tokens per question.
    """
    return np.asarray(lengths).sum(axis=1).astype(np.float64)
