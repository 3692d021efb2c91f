"""Answers that are graded while others are still being sampled."""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int

from bacr_jax.data.shared_grading import own_share
from bacr_jax.grading import STRICT
from bacr_jax.grading.pooled import PooledGrader
from bacr_jax.types import Branches, Trunks

# `rollout.generate` tells of rows that are done: their indices, trunks and branches.
OnRows = Callable[[Int[np.ndarray, "n"], Trunks, Branches], None]


def grade_early(
    grader: PooledGrader,
    texts_of: Callable[[Branches], list[list[str]]],
    answers: Sequence[str],
    questions: Sequence[str] | None,
) -> OnRows:
    """Has a process's grader start on answers as rows end.

    Args:
      grader: of this process, which is later asked about all rows, its share of them if there are
        several processes.
      texts_of: the texts of rows' answers.
      answers: gold answer of each row to be sampled.
      questions: question of each row.
    """

    def begin(rows: Int[np.ndarray, "n"], trunks: Trunks, branches: Branches) -> None:
        del trunks
        texts = texts_of(branches)
        cells = [(i, j, int(row)) for i, row in enumerate(rows) for j in range(len(texts[i]))]
        # Where each text stands among those of all rows.
        places = np.array([row * len(texts[i]) + j for i, j, row in cells], int)
        mine = [cell for cell, own in zip(cells, own_share(places)) if own]
        grader.ahead(
            [texts[i][j] for i, j, _ in mine],
            [answers[row] for *_, row in mine],
            mode=STRICT,
            questions=None if questions is None else [questions[row] for *_, row in mine],
        )

    return begin
