"""Renders sampled traces as HTML: question, budget, thinking with its cuts, and graded answers.

A cut is a point at which the thinking was truncated to sample an answer.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bacr_jax.errors import UserError
from bacr_jax.files import read_lines
from bacr_jax.report.html_page import render
from bacr_jax.report.run_data import ODD
from bacr_jax.report.table import NONE

Trace = dict[str, Any]

# Maximum number of files to read, and of traces and characters on a page. They limit the size of
# the page and the time to build it.
_MOST_FILES = 200
_MOST_TRACES = 120
_MOST_CHARS = 1_200_000
# Maximum number of characters of a text. Longer texts are shortened in the middle.
_LONGEST = 12_000
# Maximum number of characters of the question in a trace's heading, and of an extracted answer.
_LONGEST_HEADING = 160
_LONGEST_EXTRACTED = 300
# If there are more distinct budgets, the budget filter lists ranges between powers of two.
_MOST_BUDGETS = 8
# Numeric columns of the answers: heading, field of the trace, and format.
_NUMBERS = (
    ("reward", "rewards", "{:+.2f}"),
    ("value", "values", "{:+.2f}"),
    ("advantage of the segment", "segment_advantages", "{:+.2f}"),
    ("of the answer", "answer_advantages", "{:+.2f}"),
    ("forced", "forced_tokens", "{:,.0f}"),
    ("answered", "answer_tokens", "{:,.0f}"),
    ("total", "total_tokens", "{:,.0f}"),
)
# Smallest absolute advantage that is highlighted with the stronger colour.
_STRONG = 0.5
# Fields that must be lists unless they are missing, None or empty.
_LISTS = ("segments", "extracted", "decided_by", *(field for _, field, _ in _NUMBERS))


def read_traces(folder: Path) -> list[Trace]:
    """Reads the traces of a run, ordered by step.

    Every file contains the traces of one step. If there are more than `_MOST_FILES` files, evenly
    spaced files are read, including the first and the last.

    Raises:
      UserError: if a file contains a record that is not a trace.
    """
    paths = sorted(folder.glob("*.jsonl"))
    traces = []
    for path in _evenly_spaced(paths, min(_MOST_FILES, len(paths))):
        for trace in read_lines(path):
            try:
                _check(trace)
            except ODD:
                raise UserError(
                    f"{path}: this file contains records that are not traces (sampled responses) "
                    "of this run; delete the file"
                ) from None
            traces.append(trace)
    return traces


def _evenly_spaced(items: Sequence[Any], count: int) -> list[Any]:
    """Returns `count` evenly spaced items, which include the first and the last."""
    indices = np.linspace(0, len(items) - 1, count).round().astype(int)
    return [items[index] for index in indices]


def _check(trace: Trace) -> None:
    """Raises one of the errors in `ODD` if the page can't show this trace."""
    counts = {len(trace[name]) for name in ("outcomes", "answers", "context")}
    if len(counts) > 1:
        raise ValueError
    for name in _LISTS:
        if not isinstance(trace.get(name) or [], list):
            raise ValueError
    # These calls read every field that the page shows, and raise an error if a field is malformed.
    _num_chars(trace)
    labels = _filter_values("", trace, budget_names([trace]))
    _template_values(trace, labels, show_run=False)


def shown_traces(traces: Sequence[Trace], *, runs: int = 1) -> list[Trace]:
    """Selects as many traces as fit on a page.

    Steps are selected at even intervals, including the first and the last step. All traces of a
    selected step are returned.

    Args:
      traces: traces of a run, ordered by step.
      runs: number of runs that share the page.
    """
    max_traces = max(_MOST_TRACES // runs, 1)
    max_chars = _MOST_CHARS // runs
    by_step: dict[int, list[Trace]] = {}
    for trace in traces:
        by_step.setdefault(int(trace["step"]), []).append(trace)
    num_steps = len(by_step)
    while True:
        steps = _evenly_spaced(list(by_step), num_steps)
        selected = [trace for step in steps for trace in by_step[step]]
        num_chars = sum(_num_chars(trace) for trace in selected)
        fits = len(selected) <= max_traces and num_chars <= max_chars
        if fits or num_steps <= 1:
            return selected[:max_traces]
        num_steps = max(num_steps * 3 // 4, 1)


def _num_chars(trace: Trace) -> int:
    """Returns the total length of the long texts of a trace on the page, in characters."""
    texts = [trace["prompt"], trace["thinking"], *trace["answers"]]
    return sum(min(len(str(text)), _LONGEST) for text in texts)


def is_right(trace: Trace) -> bool:
    """True if the answer at the end of the thinking is correct."""
    return float(trace["outcomes"][-1]) > 0.5


def budget_names(traces: Iterable[Trace]) -> Callable[[Trace], str]:
    """Returns a function that names a trace's budget in the budget filter.

    The name is the budget itself, or, if the traces have many distinct budgets, the range between
    two powers of two that contains the budget.
    """

    def exact(trace: Trace) -> str:
        return f"{int(trace['budget']):,}"

    def power_of_two_range(trace: Trace) -> str:
        budget = int(trace["budget"])
        if budget < 1:
            return str(budget)
        low = 2 ** (budget.bit_length() - 1)
        return f"{low:,} to {2 * low - 1:,}"

    budgets = {int(trace["budget"]) for trace in traces}
    return exact if len(budgets) <= _MOST_BUDGETS else power_of_two_range


def traces_section(runs: Sequence[tuple[str, Sequence[Trace]]]) -> str:
    """Renders the traces of runs and the filters that select among them.

    Args:
      runs: label and traces of each run.

    Returns:
      The HTML of the section, or "" if the runs have no traces.
    """
    labelled_traces = [(label, trace) for label, traces in runs for trace in traces]
    if not labelled_traces:
        return ""
    traces = [trace for _, trace in labelled_traces]
    budget_name_of = budget_names(traces)
    filter_values = [
        _filter_values(label, trace, budget_name_of) for label, trace in labelled_traces
    ]
    # The first trace of each verdict is unfolded.
    verdicts = [values["verdict"] for values in filter_values]
    opened = {verdicts.index(verdict) for verdict in set(verdicts)}
    show_run = len(runs) > 1
    return render(
        "traces.html",
        filters=_filters(traces, filter_values, show_run=show_run),
        traces=[
            _template_values(trace, values, show_run=show_run)
            for trace, values in zip(traces, filter_values)
        ],
        opened=opened,
        strong=_STRONG,
    )


def _filter_values(
    label: str, trace: Trace, budget_name_of: Callable[[Trace], str]
) -> dict[str, str]:
    """Returns the values by which the page filters a trace, by filter name.

    Args:
      label: label of the trace's run.
    """
    return {
        "run": label,
        "verdict": "right" if is_right(trace) else "wrong",
        "thinking": "cut" if trace["closed_by"] == "budget" else "complete",
        "level": str(trace["level"] or NONE),
        "budget": budget_name_of(trace),
        "step": f"{int(trace['step']):,}",
    }


def _filters(
    traces: Sequence[Trace], filter_values: Sequence[Mapping[str, str]], *, show_run: bool
) -> list[tuple[str, list[tuple[str, int]]]]:
    """Returns the filters: name, and the values with the number of traces that have each value."""
    # List the budgets by size. Sorting their names would not be numerical.
    by_budget = np.argsort([int(trace["budget"]) for trace in traces], kind="stable")
    filters = []
    for name in filter_values[0]:
        if name == "run" and not show_run:
            continue
        values = [values_of_trace[name] for values_of_trace in filter_values]
        if name == "budget":
            values = [values[index] for index in by_budget]
        elif name not in ("run", "step"):
            values.sort()
        counts = Counter(values)
        filters.append((name, list(counts.items())))
    return filters


def _template_values(
    trace: Trace, filter_values: Mapping[str, str], *, show_run: bool
) -> dict[str, Any]:
    """Returns the values of the template for a trace."""
    note = [filter_values["run"]] if show_run else []
    note.append(f"step {filter_values['step']}")
    if trace["level"]:
        note.append(f"level {int(trace['level'])}")
    note.append(f"{int(trace['thinking_tokens']):,} thinking tokens")
    note.append(f"closed by {trace['closed_by']}")
    columns, answers = _answers(trace)
    return {
        "labels": filter_values,
        "budget": f"{int(trace['budget']):,}",
        "note": ", ".join(note),
        "question": _shortened(str(trace["question"]), _LONGEST_HEADING),
        "facts": [(name, _shortened(text)) for name, text in _facts(trace)],
        "prompt": _shortened(str(trace["prompt"])),
        "thinking": _thinking(trace),
        "columns": columns,
        "answers": answers,
    }


def _facts(trace: Trace) -> list[tuple[str, str]]:
    """Returns (name, text) rows about the question, the budget and the tokens of a trace."""
    declared = trace["policy_budget"]
    budget_text = "no budget"
    if declared is not None:
        budget_text = f"{declared:,} tokens, by {trace['budget_input']}"
    counts = [
        f"{int(trace['prompt_tokens']):,} prompt",
        f"{int(trace['thinking_tokens']):,} thinking",
        f"{int(trace['closing_tokens']):,} closing tag",
    ]
    rows = [
        ("question", f"{trace['id']}, difficulty group {trace['group']}"),
        ("policy's budget", budget_text),
        ("gold", str(trace["gold"])),
        ("tokens", ", ".join(counts)),
    ]
    for name, value in trace["read"].items():
        rows.append((str(name), str(value)))
    if not trace["in_loss"]:
        rows.append(("learned from", "no: the method left it out of the loss"))
    return rows


def _thinking(trace: Trace) -> list[tuple[str, str, str]]:
    """Returns the segments of the thinking, separated by a mark at each truncation point (cut).

    Returns:
      A (text, CSS class, tooltip) tuple for each segment and for each mark.
    """
    segments = trace["segments"]
    max_chars = _LONGEST // len(segments)
    num_cuts = len(segments) - 1
    parts = []
    for index, segment in enumerate(segments):
        text = _shortened(str(segment), max_chars)
        style = ""
        tooltip = ""
        value = _value_at(trace["segment_advantages"], index, num_cuts)
        advantage = math.nan if value is None else float(value)
        if text and math.isfinite(advantage):
            style = _advantage_style(advantage)
            tooltip = f"advantage {advantage:+.3f}"
        parts.append((text, style, tooltip))
        if index < num_cuts:
            parts.append((f"cut {_cut_number(trace, index)}", "cut", ""))
    return parts


def _advantage_style(advantage: float) -> str:
    """Returns the CSS class of an advantage, such as `up1`, or `up2` for a large advantage."""
    strength = 2 if abs(advantage) >= _STRONG else 1
    if advantage > 0:
        return f"up{strength}"
    if advantage < 0:
        return f"down{strength}"
    return f"even{strength}"


def _answers(trace: Trace) -> tuple[list[tuple[str, bool]], list[list[tuple[str, str]]]]:
    """Returns the table of a trace's answers.

    Returns:
      A tuple of the columns, as (heading, True if the column contains text), and the rows, as lists
      of (text, CSS class).
    """
    columns = [
        ("cut", False),
        ("at", False),
        ("answer", True),
        ("outcome", False),
    ]
    rows = []
    for index, answer in enumerate(trace["answers"]):
        outcome = float(trace["outcomes"][index])
        verdict = "right" if outcome > 0.5 else "wrong"
        row = [
            (str(_cut_number(trace, index)), ""),
            (f"{int(trace['context'][index]):,}", ""),
            (_shortened(str(answer)), "text"),
            (f"{outcome:g}", f"chip {verdict}"),
        ]
        rows.append(row)
    if "decided_by" in trace:
        columns.append(("decided by", True))
        for index, row in enumerate(rows):
            text = str(_value_at(trace["decided_by"], index, len(rows)))
            extracted = _value_at(trace.get("extracted"), index, len(rows))
            if extracted is not None:
                text += f": {extracted}"
            row.append((_shortened(text, _LONGEST_EXTRACTED), ""))
    for heading, field, form in _NUMBERS:
        values = trace[field]
        if values is None:
            continue
        columns.append((heading, False))
        for index, row in enumerate(rows):
            value = _value_at(values, index, len(rows))
            text = NONE if value is None else form.format(float(value))
            row.append((text, ""))
    return columns, rows


def _value_at(values: Sequence[Any] | None, index: int, count: int) -> Any:
    """Returns the value of an answer from a list in which consecutive answers can share a value.

    Args:
      values: one value for every `count / len(values)` consecutive answers.
      index: index of the answer.
      count: number of answers.

    Returns:
      The value. None if `values` is empty, or if `index` is not the index of an answer.
    """
    if not values or index >= count:
        return None
    return values[index * len(values) // count]


def _cut_number(trace: Trace, index: int) -> int:
    """Returns the number of the cut at which an answer was sampled, counted from 1."""
    return index * len(trace["cuts"]) // len(trace["answers"]) + 1


def _shortened(text: str, max_chars: int = _LONGEST) -> str:
    """Returns a text, or only its beginning and its end if it is longer than `max_chars`."""
    if len(text) <= max_chars:
        return text
    half = max(max_chars // 2, 1)
    num_omitted = len(text) - 2 * half
    return f"{text[:half]} [... {num_omitted:,} characters ...] {text[-half:]}"
