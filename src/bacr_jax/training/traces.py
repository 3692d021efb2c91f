"""A few rollouts as text, for people to read."""

from itertools import pairwise
from pathlib import Path

import numpy as np
from jaxtyping import Float

from bacr_jax.data.environment import Environment
from bacr_jax.data.extraction import decode_ids
from bacr_jax.evaluation.samples import CLOSE_NAMES
from bacr_jax.rollout import Rollout
from bacr_jax.runs.folder import append_line


def write_traces(
    path: Path,
    step: int,
    environment: Environment,
    rollout: Rollout,
    outcomes: Float[np.ndarray, "Q G N"],
    *,
    count: int,
) -> None:
    """Question, budget, thinking, its parts between the cuts, answers and outcomes of some rows.

    Args:
      path: a JSONL file, replaced.
      step: of the run.
      environment: tokenizer and prompt format.
      rollout: of Q G rows.
      outcomes: of its N answers a row.
      count: rows written, spread over the rollout.
    """
    path.unlink(missing_ok=True)
    decode = lambda ids: decode_ids(environment.tokenizer, ids.tolist())
    trunks, branches = rollout.trunks, rollout.branches
    texts = environment.answer_texts(branches)
    flat = outcomes.reshape(-1, outcomes.shape[-1])
    for row in np.linspace(0, len(flat) - 1, min(count, len(flat))).astype(int):
        start = int(trunks.prompt_lengths[row])
        end = start + int(trunks.sampled[row])
        # Thinking between the cuts, and what the model wrote after the last one.
        places = [start, *(int(c) for c in branches.context[row]), end]
        append_line(
            path,
            {
                "step": step,
                "row": int(row),
                "prompt": decode(trunks.tokens[row, :start]),
                "budget": int(trunks.budgets[row]),
                "thinking": decode(trunks.tokens[row, start:end]),
                "segments": [decode(trunks.tokens[row, i:j]) for i, j in pairwise(places)],
                "thinking_tokens": int(trunks.thinking[row]),
                "closed_by": CLOSE_NAMES[int(trunks.close[row])],
                "context": [int(c) - start for c in branches.context[row]],
                "answers": texts[row],
                "outcomes": [float(r) for r in flat[row]],
            },
        )
