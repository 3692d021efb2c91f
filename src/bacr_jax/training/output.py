"""Writes and prints the results of a run: traces, evaluations, tables and the report.

`loop.Trainer` calls these functions. The metrics of steps are computed in `training.logging`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bacr_jax.config.derived import HOLDOUT
from bacr_jax.config.schema import WarmupConfig
from bacr_jax.errors import attempt
from bacr_jax.evaluation.decline import Decline, declines
from bacr_jax.evaluation.samples import CLOSE_NAMES, UNLIMITED
from bacr_jax.evaluation.summary import Summary
from bacr_jax.files import append_line
from bacr_jax.prompts.prompted_questions import PromptedQuestions
from bacr_jax.prompts.tokenizers import decode_ids
from bacr_jax.report import table
from bacr_jax.report.chosen_step import best_note, certainty_text, declines_of
from bacr_jax.report.figures import short_names
from bacr_jax.report.page import try_report
from bacr_jax.report.traces import Trace, is_right, read_traces, shown_traces
from bacr_jax.runs.folder import RunFolder, RunPaths, steps_in
from bacr_jax.runs.metrics import MetricsWriter, TableRows, as_json
from bacr_jax.runs.progress import Progress
from bacr_jax.training.logging import Iteration
from bacr_jax.training.run import Run


def write_traces(path: Path, step: int, run: Run, done: Iteration) -> None:
    """Writes traces of an iteration to a JSON Lines file.

    `output.rollouts` traces are selected from the batch at even intervals. docs/report.md describes
    the fields of a trace.
    """
    num_rows = len(done.chosen.rollout.trunks.prompt_lengths)
    count = min(run.config.output.rollouts, num_rows)
    rows = np.linspace(0, num_rows - 1, count).astype(int)
    path.unlink(missing_ok=True)
    for row in rows.tolist():
        trace: dict[str, Any] = {"step": step, "row": row}
        trace |= _question_fields(run, done, row)
        trace |= _sampled_fields(run, done, row)
        trace |= _verdict_fields(done, row)
        trace |= _learner_fields(done, row)
        append_line(path, trace)


def _question_fields(run: Run, done: Iteration, row: int) -> dict[str, Any]:
    """Returns the question of a trace and the budget that the policy receives, as trace fields."""
    questions = run.task_data.train
    plan = done.chosen.plan
    question = int(plan.rows[row])
    in_prompt = questions.budget_prompts is not None
    if run.method.conditioned:
        budget_input = "both" if in_prompt else "embedding"
    else:
        budget_input = "prompt" if in_prompt else "none"
    budget = int(plan.input_budgets[row])
    return {
        "id": questions.set.ids[question],
        "level": int(questions.set.levels[question]),
        "group": int(np.asarray(plan.groups)[row // plan.budgets.shape[1]]),
        "question": questions.set.questions[question],
        "gold": questions.set.answers[question],
        "policy_budget": None if budget_input == "none" else budget,
        "budget_input": budget_input,
    }


def _sampled_fields(run: Run, done: Iteration, row: int) -> dict[str, Any]:
    """Returns the prompt, thinking and answers of a trace as text, each with its token count.

    Args:
      row: index of the trace in the batch.
    """

    def decode(ids: list[int]) -> str:
        return decode_ids(run.task_data.tokenizer, ids)

    trunks = done.chosen.rollout.trunks
    branches = done.chosen.rollout.branches
    start = int(trunks.prompt_lengths[row])
    thinking = int(trunks.thinking[row])
    thinking_ids = trunks.thinking_ids(row)
    tokens_before_cut = [int(position) - start for position in branches.context[row]]
    # The last segment is the text after the last truncation point.
    segment_ends = [0, *tokens_before_cut, len(thinking_ids)]
    forced = branches.forced[row].tolist()
    answered = branches.sampled[row].tolist()
    question, rollout = divmod(row, done.chosen.plan.budgets.shape[1])
    read = done.chosen.group_batch.extra
    branches_of_row = jax.tree.map(lambda x: x[row : row + 1], branches)
    return {
        "prompt": decode(trunks.tokens[row, :start].tolist()),
        "budget": int(trunks.budgets[row]),
        "thinking": decode(thinking_ids),
        "segments": [decode(thinking_ids[first:last]) for first, last in pairwise(segment_ends)],
        "prompt_tokens": start,
        "thinking_tokens": thinking,
        "closing_tokens": len(thinking_ids) - thinking,
        "forced_tokens": forced,
        "answer_tokens": answered,
        "total_tokens": [sum(parts) for parts in zip(tokens_before_cut, forced, answered)],
        "closed_by": CLOSE_NAMES[int(trunks.close[row])],
        "context": tokens_before_cut,
        "read": {
            name: as_json(float(np.asarray(x)[question, rollout])) for name, x in read.items()
        },
        "answers": run.task_data.answer_texts(branches_of_row)[0],
    }


def _verdict_fields(done: Iteration, row: int) -> dict[str, Any]:
    """Returns the outcomes of a trace's answers, and the grading rules that decided them.

    The last outcome is the verdict on the answer after the complete thinking.

    Args:
      row: index of the trace in the batch.
    """
    outcomes = done.chosen.outcomes
    fields: dict[str, Any] = {"outcomes": _numbers(outcomes.reshape(-1, outcomes.shape[-1])[row])}
    scores = done.chosen.group_batch.by_reward
    if scores:
        question, rollout = divmod(row, outcomes.shape[1])
        fields["reward_scores"] = {
            name: _numbers(values[question, rollout]) for name, values in scores.items()
        }
    if done.chosen.verdicts is not None:
        verdicts = done.chosen.verdicts[row]
        fields["extracted"] = [verdict.extracted for verdict in verdicts]
        fields["decided_by"] = [
            "deadline" if verdict.timed_out else verdict.path for verdict in verdicts
        ]
    return fields


def _learner_fields(done: Iteration, row: int) -> dict[str, Any]:
    """Returns the rewards, values and advantages of a trace, and whether the loss includes it.

    Args:
      row: index of the trace in the batch.
    """
    chosen = done.chosen
    advantages = done.advantages
    question, rollout = divmod(row, chosen.plan.budgets.shape[1])
    in_loss = bool(chosen.useful[question])
    if advantages.keep is not None:
        in_loss = in_loss and bool(advantages.keep[question, rollout])
    values = None if done.values is None else _numbers(done.values[question, rollout])
    segment_ends = np.asarray(chosen.group_batch.cuts)[question, rollout].tolist()
    sampled = int(chosen.rollout.trunks.sampled[row])
    per_token = np.asarray(advantages.thinking)[row]
    segment_advantages: list[float | str | None] = []
    for begin, end in pairwise([0, *segment_ends]):
        has_tokens = begin < min(end, sampled)
        segment_advantages.append(as_json(float(per_token[begin])) if has_tokens else None)
    return {
        "cuts": np.asarray(chosen.plan.cuts)[question, rollout].tolist(),
        "rewards": _numbers(advantages.rewards[question, rollout]),
        "values": values,
        "segment_advantages": segment_advantages,
        "answer_advantages": _numbers(advantages.answers[row]),
        "in_loss": in_loss,
    }


def _numbers(values: Iterable[Any]) -> list[float | str]:
    """Returns the values of an array as a flat list that can be serialized as JSON."""
    return [as_json(float(value)) for value in np.asarray(values).reshape(-1)]


# Thresholds for printing advice: the share of answers without a closing tag (`NEVER_CLOSED`), and
# the share of answers that are correct only under the lenient grading rules (`LENIENT_ONLY`). We
# chose both values.
NEVER_CLOSED = 0.1
LENIENT_ONLY = 0.05


def evaluation_record(
    step: int, when: str, results: Mapping[str, Mapping[str, Any]], *, dense: bool
) -> dict[str, Any]:
    """Returns the record of an evaluation for eval.jsonl.

    Args:
      when: "before", "during" or "after" training.
      results: results of `evaluate_set` by set name.
      dense: True if the results contain the entry `dense`: the accuracy at many truncation points
        of the same traces (eval.cut_every).
    """
    sets = {name: result["by_budget"] for name, result in results.items()}
    record: dict[str, Any] = {"step": step, "when": when, "sets": sets}
    parts = ["anytime", "near_duplicates"]
    if dense:
        parts.append("dense")
    for part in parts:
        record[part] = {name: result[part] for name, result in results.items()}
    return record


def evaluation_notes(
    failed: Iterable[str], record: Mapping[str, Any], *, format_report: bool, answer_tokens: int
) -> Iterator[str]:
    """Yields messages for the terminal after an evaluation.

    Args:
      failed: messages about failed verifiers (`TaskData.failures`).
      record: record of the evaluation in eval.jsonl.
      format_report: `output.format_report`.
      answer_tokens: `rollout.answer_tokens`.
    """
    yield from failed
    if record["when"] == "before" and format_report:
        name = HOLDOUT if HOLDOUT in record["sets"] else next(iter(record["sets"]))
        yield from format_lines(record["sets"][name], name, answer_tokens)


def format_lines(summary: Summary, name: str, answer_tokens: int) -> Iterator[str]:
    """Yields messages about answers of the starting policy that break the prompt format.

    The counts are taken from the evaluation before training at its largest budget, so nothing is
    sampled again. If there are many such answers, a message with advice is added.

    Args:
      summary: results of one evaluation set.
      name: name of the set.
      answer_tokens: `rollout.answer_tokens`.
    """
    mode = "sampled" if "sampled" in summary else next(iter(summary))
    budgets = summary[mode]
    budget = max((key for key in budgets if key != UNLIMITED), key=int, default=UNLIMITED)
    entry = budgets[budget]
    unclosed = 1.0 - entry["closed_rate"]
    lenient_only = entry["accuracy"] - entry["strict_accuracy"]
    yield (
        f"answer format before training ({table.set_title(name)}, {entry['problems']} questions, "
        f"{mode}, budget {budget}):"
    )
    yield (
        f"  {unclosed:.1%} of answers were never closed, {lenient_only:.1%} are right only by "
        "the lenient rules"
    )
    if unclosed > NEVER_CLOSED:
        yield (
            "  advice: an answer that is never closed by a tag gets no reward; set a value above "
            f"rollout.answer_tokens={answer_tokens}, or look at the prompts of the model with "
            "bacr data --config FILE --show-prompts 3"
        )
    if lenient_only > LENIENT_ONLY:
        yield (
            "  advice: rewards follow the strict grading rules (docs/grading.md), by which these "
            "answers are wrong; look at the answers in rollouts/, and try another "
            "data.prompt_format or data.closing_text, or your own verifier (grader)"
        )


def evaluation_numbers(sets: Mapping[str, Summary], sets_of_run: Iterable[str]) -> dict[str, float]:
    """Returns evaluation results as flat metrics.

    Accuracies are named `eval/SET/DECODING/BUDGET`, and mean thinking tokens
    `eval/SET/DECODING/BUDGET/tokens`.

    Args:
      sets: results of the evaluated sets.
      sets_of_run: all evaluation sets of the run. Sets with equal short names are numbered in this
        order, so that a set has the same name if only some of the sets are evaluated.
    """
    names = short_names(sets_of_run)
    numbers = {}
    for spec, summary in sets.items():
        for mode, budgets in summary.items():
            for budget, entry in budgets.items():
                key = f"eval/{names[spec]}/{mode}/{budget}"
                numbers[key] = float(entry["accuracy"])
                numbers[f"{key}/tokens"] = float(entry["mean_thinking_tokens"])
    return numbers


def decline_warning(set_name: str, worse: Sequence[Decline], prefix: str = "") -> Iterator[str]:
    """Yields a warning with all results that are worse than before training, if there are any.

    Args:
      set_name: name of the evaluation set.
      worse: results that are worse than before training.
      prefix: step of an evaluation during training, such as `step 20: `. Empty at the end of a run.
    """
    if not worse:
        return
    advice = "Set"
    if not any(decline.is_shown for decline in worse):
        advice = "If it lasts, set" if prefix else "If other seeds lose it too, set"
    yield (
        f"WARNING, {prefix}worse than before training on {table.set_title(set_name)}: "
        f"{certainty_text(worse)}. {advice} a lower optimizer.learning_rate"
    )


def end_lines(
    folder: Path,
    step: int,
    best: Mapping[str, Any] | None,
    worse: Mapping[str, Sequence[Decline]],
    start: str,
) -> Iterator[str]:
    """Yields the last lines of a run: its best checkpoint, and what is worse than before training.

    Nothing is yielded for a run whose last checkpoint is the best and is not worse on any set.

    Args:
      folder: run folder.
      step: last step of the run.
      best: content of best.json, or None if no checkpoint was evaluated.
      worse: results that are worse after training than before, by evaluation set.
      start: sentence that describes where the policy before training is, or "" if it is not stored.
    """
    is_worse = any(worse.values())
    if is_worse or (best is not None and best["step"] != step):
        yield best_note(best)
    for name, of_set in worse.items():
        yield from decline_warning(name, of_set)
    export = RunPaths(folder).exports / str(step)
    if is_worse and export.exists():
        line = f"WARNING, {export}: contains step {step}, which is worse than before training"
        if best is not None and best["step"] != step:
            line = f"{line}; bacr export takes the best checkpoint"
        yield line
    declined = declines_of(best["declines"]) if best is not None else []
    if declined:
        line = (
            "WARNING, all evaluated checkpoints are worse than before training at some budget. "
            "The policy before training had better results than the best of them: "
            f"{certainty_text(declined)}"
        )
        yield f"{line}. {start}" if start else line


def start_policy(
    folder: RunPaths, warmup: WarmupConfig, model_path: str | None, *, has_sft: bool
) -> str:
    """Describes where the policy before training is stored, or returns "" if it is not stored.

    Args:
      folder: run folder.
      warmup: settings of the warm-up.
      model_path: the key model.path.
      has_sft: True if the method has a supervised stage after the warm-up. Its checkpoint was
        deleted unless it is step 0.
    """
    if 0 in steps_in(folder.checkpoints):
        return "Its checkpoint is step 0 (--step 0)"
    if has_sft:
        return ""
    if warmup.steps:
        path = warmup.dir or folder.warmup
        return f"Its weights are in {path}, and a run with warmup.dir={path} starts from them"
    if model_path is not None:
        return f"It is the model in model.path={model_path}"
    return ""


def print_results(
    progress: Progress,
    step: int,
    before: Mapping[str, Summary],
    now: Mapping[str, Summary],
) -> None:
    """Prints one line with the results of each set, and a warning for those that became worse.

    Args:
      progress: prints the lines.
      step: current training step.
      before: results before training, by set. Empty if nothing was evaluated before.
      now: results at this step, by set.
    """
    for name, summary in now.items():
        progress.print_line(f"step {step}, {table.set_title(name)}: {table.in_one_line(summary)}")
        worse = list(declines(before.get(name, {}), summary))
        for line in decline_warning(name, worse, f"step {step}: "):
            progress.print_line(line)


def print_tables(
    progress: Progress,
    evaluated_sets: Mapping[str, PromptedQuestions],
    before: Mapping[str, Summary],
    after: Mapping[str, Summary],
    method_name: str,
) -> None:
    """Prints a table with the accuracy at each budget before and after training, for every set.

    Held-out training questions get a line instead of a table if other sets were evaluated, because
    their accuracy is not a result.
    """
    for name, questions in evaluated_sets.items():
        if name == HOLDOUT and len(evaluated_sets) > 1:
            progress.print_line(
                f"after training, {table.set_title(name)}: {table.in_one_line(after[name])}"
            )
            continue
        policies = {"before": before[name], method_name: after[name]}
        for title, summaries in table.with_and_without(table.set_title(name), policies):
            progress.print_line(
                table.comparison_table(
                    f"{title}: accuracy by thinking budget, 95 % intervals", summaries
                )
            )
        if questions.set.note:
            progress.print_line(questions.set.note)


# Trace fields that are copied to a table without changes.
_PLAIN = (
    "step",
    "row",
    "id",
    "level",
    "question",
    "gold",
    "budget",
    "policy_budget",
    "thinking_tokens",
)
# Trace fields with one entry per truncation point. A table contains only the last entry.
_LAST = ("answers", "outcomes", "extracted", "decided_by", "rewards", "answer_tokens")
_COLUMNS = (*_PLAIN, "closed_by", "right", *_LAST, "segment_advantages", "thinking")
# Maximum length in characters of a text in a table. Longer texts are truncated.
_MAX_TEXT = 4000


def trace_rows(traces: Sequence[Trace]) -> TableRows:
    """Returns one table row per trace, with its answer at the last truncation point."""
    return [{name: _cell(trace, name) for name in _COLUMNS} for trace in traces]


def _cell(trace: Trace, name: str) -> Any:
    """Returns the value of one table column for a trace."""
    value = is_right(trace) if name == "right" else trace.get(name)
    if name in _LAST and isinstance(value, list):
        value = value[-1] if value else None
    # Convert all other types to text, because each column of a table has a single type.
    return value if type(value) in (int, float, bool) else _text(value)


def _text(value: Any) -> str:
    """Converts a value to text of limited length. None becomes an empty string."""
    text = "" if value is None else str(value)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]} ..."


def publish(
    folder: RunFolder, metrics: MetricsWriter, step: int, *, report: bool, again: bool
) -> None:
    """Writes the report and figures of a finished run, and sends figures and traces to dashboards.

    All results are already written to files. An error in this function is therefore printed and
    does not stop the run.

    Args:
      report: True to write the report and its figures (`output.report`).
      again: True if the run was already finished before, so that the dashboards already have the
        figures and traces.
    """

    def show_pictures() -> None:
        paths = sorted(folder.path.glob("*.png"))
        # Dashboards show each picture once.
        pictures = {path.stem: path for path in paths if not path.stem.endswith("-dark")}
        metrics.show(step, "pictures", pictures)

    def show_traces() -> None:
        rows = trace_rows(shown_traces(read_traces(folder.rollouts)))
        metrics.show(step, "traces", rows)

    if report:
        try_report(folder.path)
    if not again:
        attempt("pictures can't be shown", show_pictures)
        attempt("traces can't be shown", show_traces)
    metrics.close()
