"""What a run shows: traces of a step, notes on an evaluation, and the report of a finished run."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bacr_jax.config import Config
from bacr_jax.config.derived import HOLDOUT
from bacr_jax.documents import append_line
from bacr_jax.errors import attempt
from bacr_jax.evaluation.samples import CLOSE_NAMES, UNLIMITED
from bacr_jax.evaluation.summary import Summary
from bacr_jax.prompts.tokenizers import decode_ids
from bacr_jax.report import table
from bacr_jax.report.figures import short_names
from bacr_jax.report.page import try_report
from bacr_jax.report.traces import Trace, is_right, read_traces, shown_traces
from bacr_jax.runs.folder import RunFolder
from bacr_jax.runs.metrics import MetricsWriter, Rows, as_json
from bacr_jax.training.logging import Iteration
from bacr_jax.training.run import Run


def write_traces(path: Path, step: int, run: Run, done: Iteration) -> None:
    """Writes `output.rollouts` rows of an iteration, spread over its rollout.

    All that is known of each trace; docs/report.md says what the fields are.
    """
    rows = len(done.chosen.rollout.trunks.prompt_lengths)
    count = min(run.config.output.rollouts, rows)
    chosen = np.linspace(0, rows - 1, count).astype(int)
    path.unlink(missing_ok=True)
    for row in chosen.tolist():
        asked, sampled = _question(run, done, row), _sampled(run, done, row)
        found = {**asked, **sampled, **_verdicts(done, row), **_learned(done, row)}
        append_line(path, {"step": step, "row": row, **found})


def _question(run: Run, done: Iteration, row: int) -> dict[str, Any]:
    questions, plan = run.environment.train, done.chosen.plan
    place = int(plan.rows[row])
    by_embedding, in_words = run.method.conditioned, questions.told is not None
    ways = [way for way, so in (("embedding", by_embedding), ("words", in_words)) if so]
    return {
        "id": questions.set.ids[place],
        "level": int(questions.set.levels[place]),
        "group": int(np.asarray(plan.groups)[row // plan.budgets.shape[1]]),
        "question": questions.set.questions[place],
        "gold": questions.set.answers[place],
        "told": int(np.asarray(plan.budgets).reshape(-1)[row]) if ways else None,
        "told_by": " and ".join(ways) or "nothing",
    }


def _sampled(run: Run, done: Iteration, row: int) -> dict[str, Any]:
    """Prompt, thinking and answers as text, and the tokens of each part."""
    decode = lambda ids: decode_ids(run.environment.tokenizer, ids.tolist())
    trunks, branches = done.chosen.rollout.trunks, done.chosen.rollout.branches
    start, thinking = int(trunks.prompt_lengths[row]), int(trunks.thinking[row])
    end = start + int(trunks.sampled[row])
    # Thinking between the cuts, and what the model wrote after the last one.
    places = [start, *(int(c) for c in branches.context[row]), end]
    forced, answered = branches.forced[row].tolist(), branches.sampled[row].tolist()
    seen = [int(c) - start for c in branches.context[row]]
    read = done.chosen.group_batch.extra
    place = divmod(row, done.chosen.plan.budgets.shape[1])
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
        "read": {name: as_json(float(np.asarray(x)[place])) for name, x in read.items()},
        "answers": run.environment.answer_texts(one)[0],
    }


def _verdicts(done: Iteration, row: int) -> dict[str, Any]:
    """Outcomes, the last of which is the trace's verdict, and what decided each."""
    outcomes = done.chosen.outcomes
    found: dict[str, Any] = {"outcomes": _numbers(outcomes.reshape(-1, outcomes.shape[-1])[row])}
    if scores := done.chosen.group_batch.by_reward:
        place = divmod(row, outcomes.shape[1])
        found["reward_scores"] = {name: _numbers(x[place]) for name, x in scores.items()}
    if done.chosen.verdicts is not None:
        verdicts = done.chosen.verdicts[row]
        found["extracted"] = [verdict.extracted for verdict in verdicts]
        found["decided_by"] = [
            "deadline" if verdict.timed_out else verdict.path for verdict in verdicts
        ]
    return found


def _learned(done: Iteration, row: int) -> dict[str, Any]:
    """Rewards, values and advantages of each cut, and whether the row was in the loss."""
    chosen, given = done.chosen, done.advantages
    question, rollout = divmod(row, chosen.plan.budgets.shape[1])
    cuts = np.asarray(chosen.plan.cuts)[question, rollout]
    counted = bool(chosen.useful[question])
    if given.keep is not None:
        counted = counted and bool(given.keep[question, rollout])
    values = None if done.values is None else _numbers(done.values[question, rollout])
    ends = np.asarray(chosen.group_batch.cuts)[question, rollout].tolist()
    sampled = int(chosen.rollout.trunks.sampled[row])
    per_token = np.asarray(given.thinking)[row]
    return {
        "cuts": cuts.tolist(),
        "rewards": _numbers(given.rewards[question, rollout]),
        "values": values,
        # None for a segment without a token.
        "segment_advantages": [
            as_json(float(per_token[begin])) if begin < min(end, sampled) else None
            for begin, end in zip([0, *ends], ends)
        ],
        "answer_advantages": _numbers(given.answers[row]),
        "in_loss": counted,
    }


def _numbers(values: Iterable[Any]) -> list[float | str]:
    return [as_json(float(value)) for value in np.asarray(values).reshape(-1)]


# Shares of the answers from which there is something to be said about them; ours.
NEVER_CLOSED, LENIENT_ONLY = 0.1, 0.05


def evaluation_notes(
    config: Config, failed: Iterable[str], record: Mapping[str, Any]
) -> Iterator[str]:
    """Lines for the terminal after an evaluation of a run; `failed`: of `Environment.failures`."""
    yield from failed
    if record["when"] == "before" and config.output.format_report:
        name = HOLDOUT if HOLDOUT in record["sets"] else next(iter(record["sets"]))
        yield from format_lines(record["sets"][name], name, config)


def format_lines(summary: Summary, name: str, config: Config) -> Iterator[str]:
    """Format failures of a policy at its largest budget, and advice where they are many.

    Nothing is decoded for them: the evaluation before training has counted them.
    """
    mode = "sampled" if "sampled" in summary else next(iter(summary))
    budgets = summary[mode]
    budget = max((key for key in budgets if key != UNLIMITED), key=int, default=UNLIMITED)
    entry = budgets[budget]
    unclosed = 1.0 - entry["closed_rate"]
    lenient_only = entry["accuracy"] - entry["strict_accuracy"]
    yield (
        f"format of the starting policy ({table.set_title(name)}, {entry['problems']} questions, "
        f"{mode}, budget {budget}): {unclosed:.1%} of the answers were never closed, "
        f"{lenient_only:.1%} are right by the lenient rules alone"
    )
    if unclosed > NEVER_CLOSED:
        yield (
            "  advice: an answer that is never closed earns nothing; raise rollout.answer_tokens="
            f"{config.rollout.answer_tokens}, or look at what the model reads: "
            "bacr data --config FILE --show-prompts 3"
        )
    if lenient_only > LENIENT_ONLY:
        yield (
            "  advice: rewards follow the strict rules (docs/grading.md), by which these answers "
            "are wrong; look at the answers in rollouts/, and try another data.prompt_format or "
            "data.closing_text, or a verifier of your own (grader)"
        )


# Fields of a trace that a table shows as they are.
_PLAIN = ("step", "row", "id", "level", "question", "gold", "budget", "told", "thinking_tokens")
_LAST = ("answers", "outcomes", "extracted", "decided_by", "rewards", "answer_tokens")
_COLUMNS = (*_PLAIN, "closed_by", "right", *_LAST, "segment_advantages", "thinking")
# Characters of a text in a table.
_LONGEST = 4000


def evaluation_numbers(sets: Mapping[str, Summary]) -> dict[str, float]:
    """`eval/SET/DECODING/BUDGET`: accuracies of an evaluation; `.../tokens`: mean thinking."""
    names, found = short_names(sets), {}
    for spec, summary in sets.items():
        for mode, budgets in summary.items():
            for budget, entry in budgets.items():
                key = f"eval/{names[spec]}/{mode}/{budget}"
                found[key] = float(entry["accuracy"])
                found[f"{key}/tokens"] = float(entry["mean_thinking_tokens"])
    return found


def trace_rows(traces: Sequence[Trace]) -> Rows:
    """Traces as a table: a row each, with the verdict and the answer at the end of the thinking."""

    def cell(trace: Trace, name: str) -> Any:
        value = is_right(trace) if name == "right" else trace.get(name)
        if name in _LAST and isinstance(value, list):
            value = value[-1] if value else None
        # A column has values of one kind.
        return value if type(value) in (int, float, bool) else _text(value)

    return [{name: cell(trace, name) for name in _COLUMNS} for trace in traces]


def _text(value: Any) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def publish(
    folder: RunFolder, config: Config, metrics: MetricsWriter, step: int, *, again: bool
) -> None:
    """report.html and pictures of a finished run; the boards get pictures and traces, and end.

    The results are in their files by now, and nothing here can cost them. `again`: it was finished
    before, so that the boards have it all.
    """
    if config.output.report:
        try_report(folder.path)
    if not again:
        pictures = lambda: {path.stem: path for path in sorted(folder.path.glob("*.png"))}
        traces = lambda: trace_rows(shown_traces(read_traces(folder.rollouts)))
        attempt("pictures can't be shown", lambda: metrics.show(step, "pictures", pictures()))
        attempt("traces can't be shown", lambda: metrics.show(step, "traces", traces()))
    metrics.close()
