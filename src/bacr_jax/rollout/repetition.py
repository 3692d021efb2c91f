"""Detects traces that end in repetition, a common symptom of a collapsed policy."""

import numpy as np
from jaxtyping import Bool, Int

# Number of sampled tokens at the end of a trace that are checked.
WINDOW = 16
# Maximum length of a repeated unit, in tokens. It is half of the window, so that a unit occurs at
# least twice.
LONGEST_UNIT = 8


def ends_in_repetition(
    tokens: Int[np.ndarray, "B S"], starts: Int[np.ndarray, "B"], counts: Int[np.ndarray, "B"]
) -> Bool[np.ndarray, "B"]:
    """Returns True for each trace that ends by repeating a unit of at most `LONGEST_UNIT` tokens.

    The last `WINDOW` sampled tokens x repeat a unit of p tokens if x_i = x_{i-p} for all i >= p.
    The unit may be incomplete at both ends, as in "is 2. The answer is 2. The answer".

    Args:
      tokens: token ids of prompt and response of each row.
      starts: index of the first sampled token of each row.
      counts: number of sampled tokens of each row. The result is False for rows with fewer than
        `WINDOW` sampled tokens.
    """
    ends = starts + counts
    long_enough = counts >= WINDOW
    first = np.where(long_enough, ends - WINDOW, 0)
    width = min(WINDOW, tokens.shape[1])
    columns = first[:, None] + np.arange(width)
    last = np.take_along_axis(tokens, columns, axis=1)
    repeats = np.zeros(len(tokens), bool)
    for unit in range(1, LONGEST_UNIT + 1):
        later = last[:, unit:]
        earlier = last[:, :-unit]
        repeats |= (later == earlier).all(axis=1)
    return repeats & long_enough
