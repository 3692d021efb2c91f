"""rollouts/STEP.jsonl: some traces of a step, from the question to each segment's advantage."""

import math
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bacr_jax.data.tokenizers import decode_ids
from bacr_jax.evaluation.samples import CLOSE_NAMES
from bacr_jax.runs.files import append_line
from bacr_jax.training.logging import Iteration
from bacr_jax.training.run import Run


def write_traces(path: Path, step: int, run: Run, done: Iteration) -> None:
    """Writes `output.rollouts` rows of an iteration, spread over its rollout.

    Args:
      path: a JSONL file, replaced.
      step: of the run.
      run: tokenizer, prompt format and questions.
      done: the iteration.
    """
    rows = len(done.batch.rollout.trunks.prompt_lengths)
    count = min(run.config.output.rollouts, rows)
    chosen = np.linspace(0, rows - 1, count).astype(int)
    path.unlink(missing_ok=True)
    for row in chosen:
        append_line(path, trace_of(run, done, step, int(row)))


def trace_of(run: Run, done: Iteration, step: int, row: int) -> dict[str, Any]:
    """Everything that is known of one trace, for JSON; docs/report.md says what each field is."""
    return {
        "step": step,
        "row": row,
        **_question(run, done, row),
        **_sampled(run, done, row),
        **_judged(done, row),
        **_learned(run, done, row),
    }


def _question(run: Run, done: Iteration, row: int) -> dict[str, Any]:
    questions, plan = run.environment.train, done.batch.plan
    place = int(plan.rows[row])
    by_embedding, in_words = run.method.conditioned, questions.told is not None
    ways = [way for way, so in (("embedding", by_embedding), ("words", in_words)) if so]
    return {
        "id": questions.set.ids[place],
        "level": int(questions.set.levels[place]),
        "group": int(np.asarray(plan.groups)[row // plan.budgets.shape[1]]),
        "question": questions.set.questions[place],
        "gold": questions.set.answers[place],
        "told": int(done.batch.rollout.trunks.budgets[row]) if ways else None,
        "told_by": " and ".join(ways) or "nothing",
    }


def _sampled(run: Run, done: Iteration, row: int) -> dict[str, Any]:
    """Prompt, thinking and answers as text, and the tokens of each part."""
    decode = lambda ids: decode_ids(run.environment.tokenizer, ids.tolist())
    trunks, branches = done.batch.rollout.trunks, done.batch.rollout.branches
    start, thinking = int(trunks.prompt_lengths[row]), int(trunks.thinking[row])
    end = start + int(trunks.sampled[row])
    # Thinking between the cuts, and what the model wrote after the last one.
    places = [start, *(int(c) for c in branches.context[row]), end]
    forced, answered = branches.forced[row].tolist(), branches.sampled[row].tolist()
    seen = [int(c) - start for c in branches.context[row]]
    read = done.batch.group_batch.extra
    group = done.batch.plan.budgets.shape[1]
    one = type(branches)(**{name: value[row : row + 1] for name, value in vars(branches).items()})
    return {
        "prompt": decode(trunks.tokens[row, :start]),
        "budget": int(trunks.budgets[row]),
        "thinking": decode(trunks.tokens[row, start:end]),
        "segments": [decode(trunks.tokens[row, i:j]) for i, j in pairwise(places)],
        "prompt_tokens": start,
        "thinking_tokens": thinking,
        "closing_tokens": end - start - thinking,
        "forced_tokens": forced,
        "answer_tokens": answered,
        "total_tokens": [sum(parts) for parts in zip(seen, forced, answered)],
        "closed_by": CLOSE_NAMES[int(trunks.close[row])],
        "context": seen,
        "read": {name: _number(np.asarray(x)[divmod(row, group)]) for name, x in read.items()},
        "answers": run.environment.answer_texts(one)[0],
    }


def _judged(done: Iteration, row: int) -> dict[str, Any]:
    """Outcomes, the last of which is the trace's verdict, and what decided each."""
    outcomes = done.batch.outcomes
    found: dict[str, Any] = {"outcomes": _numbers(outcomes.reshape(-1, outcomes.shape[-1])[row])}
    if done.batch.verdicts is not None:
        verdicts = done.batch.verdicts[row]
        found["extracted"] = [verdict.extracted for verdict in verdicts]
        found["decided_by"] = [
            "deadline" if verdict.timed_out else verdict.path for verdict in verdicts
        ]
    return found


def _learned(run: Run, done: Iteration, row: int) -> dict[str, Any]:
    """Rewards, values and advantages of each cut, and whether the row was in the loss."""
    batch, credit = done.batch, done.credit
    question, rollout = divmod(row, batch.plan.budgets.shape[1])
    cuts = np.asarray(batch.plan.cuts)[question, rollout]
    counted = bool(batch.useful[question])
    if credit.keep is not None:
        counted = counted and bool(credit.keep[question, rollout])
    values = None if done.values is None else _numbers(done.values[question, rollout])
    # The last segment has the tokens of a grace window too.
    ends = [*cuts[:-1].tolist(), int(cuts[-1]) + run.config.budget.grace]
    sampled = int(batch.rollout.trunks.sampled[row])
    advantages = _of_segments(np.asarray(credit.thinking)[row], ends, sampled)
    return {
        "cuts": cuts.tolist(),
        "rewards": _numbers(credit.rewards[question, rollout]),
        "values": values,
        "segment_advantages": advantages,
        "answer_advantages": _numbers(credit.answers[row]),
        "in_loss": counted,
    }


def _of_segments(per_token: np.ndarray, ends: list[int], sampled: int) -> list[Any]:
    """The advantage that the tokens of each segment have; None for a segment without a token."""
    return [
        _number(per_token[begin]) if begin < min(end, sampled) else None
        for begin, end in zip([0, *ends], ends)
    ]


def _number(value: Any) -> float | str:
    """A number that JSON can hold."""
    number = float(value)
    return number if math.isfinite(number) else str(number)


def _numbers(values: Iterable[Any]) -> list[float | str]:
    return [_number(value) for value in np.asarray(values).reshape(-1)]
