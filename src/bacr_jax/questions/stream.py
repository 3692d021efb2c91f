"""The order in which training meets its questions: shuffled within each group, resumable.

The scheduler says from which difficulty group each question of a batch comes (paper Eq. 6); the
stream says which one. Every group is a Grain dataset in a shuffled order of its own, shuffled again
in every pass, so that each question of a group comes once before any comes again. A place in the
stream is one number per group, questions drawn so far; that is all a checkpoint needs.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int


class QuestionStream:
    """Shuffled passes over the questions of each group; `draw` is pure, of cursors and groups."""

    def __init__(self, groups: Sequence[int] | np.ndarray, *, num_groups: int, seed: int):
        """Prepares a dataset for each of groups 0..K-1; the seed fixes the order of every pass."""
        # Not at the top: only where data is read, since not every machine has Grain.
        import grain

        groups = np.asarray(groups)
        self._orders: list[Any] = []
        for group in range(num_groups):
            members = np.flatnonzero(groups == group).tolist()
            source = grain.MapDataset.source(members).seed(int(seed) + group)
            self._orders.append(source.shuffle().repeat() if members else None)

    def draw(
        self, cursors: Int[np.ndarray, "K"], groups: Sequence[int] | np.ndarray
    ) -> tuple[Int[np.ndarray, "Q"], Int[np.ndarray, "K"]]:
        """Places in the set (int32) of the next question of each group asked for, and new cursors.

        No group asked for may be empty.
        """
        cursors = np.array(cursors, np.int32)
        found = np.empty(len(groups), np.int32)
        for row, group in enumerate(np.asarray(groups)):
            found[row] = self._orders[group][int(cursors[group])]
            cursors[group] += 1
        return found, cursors
