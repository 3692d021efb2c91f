"""Orders the training questions: shuffled within each difficulty group, and resumable.

The scheduler chooses the difficulty group of each question of a batch (paper Eq. 6), and the stream
chooses the question. Each group is a Grain dataset that is shuffled anew in every pass, so every
question of a group is drawn once per pass. The state of the stream consists of one cursor per
group, which is the number of questions drawn so far. Checkpoints store only these cursors.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int


class QuestionStream:
    """A shuffled, resumable order of the questions in each difficulty group.

    `draw` is a pure function of the cursors and the groups, so the object has no mutable state.
    """

    def __init__(self, groups: Sequence[int] | np.ndarray, *, num_groups: int, seed: int):
        """Creates a shuffled dataset for each group.

        Args:
          groups: difficulty group of each question, in [0, num_groups).
          num_groups: number of groups K.
          seed: seed of the shuffled orders.
        """
        # Imported here because Grain is not installed on every machine.
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
        """Draws the next question of each of these groups.

        Args:
          cursors: number of questions drawn so far from each group.
          groups: group of each of the Q questions to draw. The groups must not be empty.

        Returns:
          Index of each question in the set (int32), and the new cursors.
        """
        cursors = np.array(cursors, np.int32)
        questions = np.empty(len(groups), np.int32)
        for row, group in enumerate(np.asarray(groups)):
            order = self._orders[group]
            questions[row] = order[int(cursors[group])]
            cursors[group] += 1
        return questions, cursors
