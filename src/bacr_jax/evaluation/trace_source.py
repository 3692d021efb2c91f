"""What draws the answers of an evaluation: this package's rollout, or an engine elsewhere."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import jax
import numpy as np
from jaxtyping import Int

from bacr_jax.config import EvalConfig
from bacr_jax.data.environment import Environment
from bacr_jax.evaluation.samples import EvalSetting
from bacr_jax.types import Branches, Prompts, Trunks

# Row numbers, and the settings of their traces: of one decoding and budget.
Part = tuple[Int[np.ndarray, "rows"], Sequence[EvalSetting]]


@dataclass(frozen=True)
class Asked:
    """Rows that are decoded alike.

    Attributes:
      prompts: as they are fed.
      rows: row numbers.
      settings: decoding and budget; with several the same traces are cut at several places.
    """

    prompts: Prompts
    rows: Int[np.ndarray, "rows"]
    settings: Sequence[EvalSetting]


class TraceSource(Protocol):
    """A `decoder.Decoder`, or a server that is asked."""

    def traces(
        self,
        environment: Environment,
        parts: Sequence[Asked],
        key: jax.Array,
        config: EvalConfig,
        *,
        poll: Callable[[], None] | None,
        on_rows: Callable[[int], None] | None = None,
    ) -> list[tuple[Trunks, Branches]]:
        """Thinking and answers of some rows, part by part.

        Args:
          environment: tokenizer, format and rules.
          parts: rows by decoding and budget, as many cuts in each.
          key: of the evaluation; what a row says depends on it, its number and its budget.
          config: temperature and nucleus of sampled answers.
          poll: called regularly, so that a caller can stop by raising.
          on_rows: called with how many more rows are done.
        """
