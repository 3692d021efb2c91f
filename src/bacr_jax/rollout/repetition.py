"""Recognises traces that repeat themselves at their end, the usual sign of a ruined policy."""

import numpy as np
from jaxtyping import Bool, Int

# Sampled tokens at the end of a trace that are looked at, and the longest unit that may repeat in
# them: a unit is seen at least twice.
WINDOW, LONGEST_UNIT = 16, 8


def ends_in_repetition(
    tokens: Int[np.ndarray, "B S"], starts: Int[np.ndarray, "B"], counts: Int[np.ndarray, "B"]
) -> Bool[np.ndarray, "B"]:
    """Returns which traces end by repeating a unit of at most `LONGEST_UNIT` tokens.

    The last `WINDOW` sampled tokens x repeat a unit of p tokens if x_i = x_{i-p} for every i from p
    on. The unit may be cut at both ends, as in "is 2. The answer is 2. The answer".

    Args:
      tokens: prompt and sampled tokens of each row, ids.
      starts: index of the first sampled token of each row.
      counts: sampled tokens of each row; a row with fewer than `WINDOW` does not repeat itself.
    """
    ends = starts + counts
    long_enough = counts >= WINDOW
    first = np.where(long_enough, ends - WINDOW, 0)
    width = min(WINDOW, tokens.shape[1])
    last = np.take_along_axis(tokens, first[:, None] + np.arange(width), axis=1)
    repeats = np.zeros(len(tokens), bool)
    for unit in range(1, LONGEST_UNIT + 1):
        repeats |= (last[:, unit:] == last[:, :-unit]).all(axis=1)
    return repeats & long_enough
