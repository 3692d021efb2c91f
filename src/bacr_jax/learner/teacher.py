"""Scores the policy's own traces under a teacher, for on-policy distillation.

`learner.updates` calls `Teacher.scores`, and `learner.objective` adds the teacher's
log-probabilities to the advantages. This module does not load weights.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from bacr_jax.learner.batch import Batch
from bacr_jax.learner.spec import LearnerSpec
from bacr_jax.learner.token_scores import TokenScores
from bacr_jax.learner.train_step import score_batch
from bacr_jax.types import Params


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A policy whose log-probabilities of the sampled tokens are distilled into the trained policy.

    Attributes:
      spec: static settings of the teacher. Its vocabulary is the vocabulary of the policy.
      budget: thinking budget that the teacher receives as input, in tokens, if it has a budget
        embedding.
      params: all parameters of the teacher. None if the teacher is the policy that sampled the
        traces.
    """

    spec: LearnerSpec
    budget: int
    params: Params | None = None

    def scores(
        self, policy: Params, rows: Batch, allowed_tokens: Any, micro_batches: int
    ) -> TokenScores:
        """Returns the teacher's log-probabilities of the sampled tokens of traces.

        Args:
          policy: all parameters of the policy that sampled the traces.
          rows: the traces.
          allowed_tokens: True for ids that can be sampled.
          micro_batches: number of micro-batches that are scored one after the other.
        """
        params = policy if self.params is None else self.params
        rows = dataclasses.replace(rows, budgets=jnp.full_like(rows.budgets, self.budget))
        return score_batch(
            params, rows, allowed_tokens, spec=self.spec, micro_batches=micro_batches
        )
