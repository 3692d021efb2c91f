"""Sampled traces as HTML: question, budget, thinking with its cuts, verdicts and advantages."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bacr_jax.documents import read_lines
from bacr_jax.errors import UserError
from bacr_jax.report.html_page import render
from bacr_jax.report.run_data import ODD
from bacr_jax.report.table import NONE

Trace = dict[str, Any]

# Files read, traces shown and characters shown, so that a page stays a page.
_MOST_FILES, _MOST_TRACES, _MOST_CHARS = 200, 120, 1_200_000
# Of a longer text beginning and end are shown.
_LONGEST = 12_000
# More different budgets than this are chosen by doublings.
_MOST_BUDGETS = 8
# Columns of the answers that hold numbers: name, field, and how a number is written.
_NUMBERS = (
    ("reward", "rewards", "{:+.2f}"),
    ("value", "values", "{:+.2f}"),
    ("advantage of the segment", "segment_advantages", "{:+.2f}"),
    ("of the answer", "answer_advantages", "{:+.2f}"),
    ("forced", "forced_tokens", "{:,.0f}"),
    ("answered", "answer_tokens", "{:,.0f}"),
    ("total", "total_tokens", "{:,.0f}"),
)
# From this size on, an advantage is drawn strong.
_STRONG = 0.5


def read_traces(folder: Path) -> list[Trace]:
    """Traces of a run in the order of their steps; of many steps, some that are spread evenly."""
    paths = sorted(folder.glob("*.jsonl"))
    places = np.linspace(0, len(paths) - 1, min(_MOST_FILES, len(paths))).round().astype(int)
    found = []
    for path in (paths[place] for place in places):
        for record in read_lines(path):
            try:
                _check(record)
            except ODD:
                raise UserError(f"{path}: holds something else than traces; remove it") from None
            found.append(record)
    return found


def _check(trace: Trace) -> None:
    """Fails where it can't be shown, or not as what it is."""
    counts = {len(trace[name]) for name in ("outcomes", "answers", "context")}
    lists = ("segments", "extracted", "decided_by", *(field for _, field, _ in _NUMBERS))
    if len(counts) > 1 or not all(isinstance(trace.get(name) or [], list) for name in lists):
        raise ValueError
    _size(trace), _trace(trace, _labels("", trace, budget_names([trace])), several=False)


def shown_traces(traces: Sequence[Trace], *, runs: int = 1) -> list[Trace]:
    """As many as a page of `runs` can show: of steps spread evenly, the first and last included."""
    most, chars = max(_MOST_TRACES // runs, 1), _MOST_CHARS // runs
    by_step: dict[int, list[Trace]] = {}
    for trace in traces:
        by_step.setdefault(int(trace["step"]), []).append(trace)
    steps, count = list(by_step), len(by_step)
    while True:
        places = np.linspace(0, len(steps) - 1, count).round().astype(int)
        chosen = [trace for place in places for trace in by_step[steps[place]]]
        size = sum(_size(trace) for trace in chosen)
        if count <= 1 or (len(chosen) <= most and size <= chars):
            return chosen[:most]
        count = max(count * 3 // 4, 1)


def _size(trace: Trace) -> int:
    texts = [trace["prompt"], trace["thinking"], *trace["answers"]]
    return sum(min(len(str(text)), _LONGEST) for text in texts)


def is_right(trace: Trace) -> bool:
    """The verdict on the answer at the end of the thinking."""
    return float(trace["outcomes"][-1]) > 0.5


def budget_names(traces: Iterable[Trace]) -> Callable[[Trace], str]:
    """Returns a function that names a trace's budget in a filter: the budget, or its doubling."""
    if len({int(trace["budget"]) for trace in traces}) <= _MOST_BUDGETS:
        return lambda trace: f"{int(trace['budget']):,}"

    def doubling(trace: Trace) -> str:
        budget = int(trace["budget"])
        if budget < 1:
            return str(budget)
        low = 2 ** (budget.bit_length() - 1)
        return f"{low:,} to {2 * low - 1:,}"

    return doubling


def traces_section(runs: Sequence[tuple[str, Sequence[Trace]]]) -> str:
    """Traces of runs with what chooses among them, as HTML; empty where there are none."""
    shown = [(label, trace) for label, found in runs for trace in found]
    if not shown:
        return ""
    budget_of = budget_names([trace for _, trace in shown])
    labels = [_labels(label, trace, budget_of) for label, trace in shown]
    # Budgets and levels rise in the list.
    by_size = np.argsort([int(trace["budget"]) for _, trace in shown], kind="stable")
    filters = []
    for name in list(labels[0])[0 if len(runs) > 1 else 1 :]:
        values = [of[name] for of in labels]
        if name == "budget":
            values = [values[place] for place in by_size]
        elif name not in ("run", "step"):
            values = sorted(values)
        filters.append((name, list(Counter(values).items())))
    traces = [_trace(trace, of, len(runs) > 1) for (_, trace), of in zip(shown, labels)]
    verdicts = [of["verdict"] for of in labels]
    first = {verdicts.index(verdict) for verdict in set(verdicts)}
    return render("traces.html", filters=filters, traces=traces, opened=first, strong=_STRONG)


def _labels(label: str, trace: Trace, budget_of: Callable[[Trace], str]) -> dict[str, str]:
    """Returns the values by which the page filters a trace, by filter; the run comes first."""
    return {
        "run": label,
        "verdict": "right" if is_right(trace) else "wrong",
        "thinking": "cut" if trace["closed_by"] == "budget" else "complete",
        "level": str(trace["level"] or NONE),
        "budget": budget_of(trace),
        "step": f"{int(trace['step']):,}",
    }


def _trace(trace: Trace, labels: Mapping[str, str], several: bool) -> dict[str, Any]:
    """Returns the template's values for a trace."""
    level = f"level {int(trace['level'])}, " if trace["level"] else ""
    run = f"{labels['run']}, " if several else ""
    columns, answers = _answers(trace)
    return {
        "labels": labels,
        "budget": f"{int(trace['budget']):,}",
        "note": f"{run}step {labels['step']}, {level}{int(trace['thinking_tokens']):,} thinking "
        f"tokens, closed by {trace['closed_by']}",
        "question": _shortened(str(trace["question"]), 160),
        "facts": [(name, _shortened(text)) for name, text in _facts(trace)],
        "prompt": _shortened(str(trace["prompt"])),
        "thinking": _thinking(trace),
        "columns": columns,
        "answers": answers,
    }


def _facts(trace: Trace) -> list[tuple[str, str]]:
    """Returns rows (name, text) about the question, the budget and the tokens of a trace."""
    told = trace["told"]
    kinds = {"prompt": "prompt", "thinking": "thinking", "closing": "closing tag"}
    counts = [f"{int(trace[f'{kind}_tokens']):,} {name}" for kind, name in kinds.items()]
    rows = [
        ("question", f"{trace['id']}, difficulty group {trace['group']}"),
        ("told", "no budget" if told is None else f"{told:,} tokens, by {trace['told_by']}"),
        ("gold", str(trace["gold"])),
        ("tokens", ", ".join(counts)),
        *((str(name), str(value)) for name, value in trace["read"].items()),
    ]
    if not trace["in_loss"]:
        rows.append(("learned from", "no: the method left it out of the loss"))
    return rows


def _thinking(trace: Trace) -> list[tuple[str, str, str]]:
    """The segments with a mark at each cut: text, style, and what is said when it is touched."""
    segments, given = trace["segments"], trace["segment_advantages"]
    most = _LONGEST // len(segments)
    parts, cuts = [], len(segments) - 1
    for place, segment in enumerate(segments):
        text, paid = _shortened(str(segment), most), _at(given, place, cuts)
        advantage = math.nan if paid is None else float(paid)
        style = title = ""
        if math.isfinite(advantage) and text:
            side = "up" if advantage > 0 else "down" if advantage < 0 else "even"
            style = f"{side}{'2' if abs(advantage) >= _STRONG else '1'}"
            title = f"advantage {advantage:+.3f}"
        parts.append((text, style, title))
        if place < cuts:
            parts.append((f"cut {_cut_of(trace, place)}", "cut", ""))
    return parts


def _answers(trace: Trace) -> tuple[list[tuple[str, bool]], list[list[tuple[str, str]]]]:
    """Columns, with whether each holds words, and the cells of each answer with their styles."""
    columns = [("cut", False), ("at", False), ("answer", True), ("outcome", False)]
    rows = [
        [
            (str(_cut_of(trace, j)), ""),
            (f"{int(trace['context'][j]):,}", ""),
            (_shortened(str(trace["answers"][j])), "text"),
            (f"{outcome:g}", f"chip {'right' if outcome > 0.5 else 'wrong'}"),
        ]
        for j, outcome in enumerate(map(float, trace["outcomes"]))
    ]
    if "decided_by" in trace:
        columns.append(("decided by", True))
        for j, row in enumerate(rows):
            by, found = (_at(trace.get(n), j, len(rows)) for n in ("decided_by", "extracted"))
            row.append((_shortened(str(by) if found is None else f"{by}: {found}", 300), ""))
    for name, field, form in _NUMBERS:
        if (values := trace[field]) is not None:
            columns.append((name, False))
            for j, row in enumerate(rows):
                value = _at(values, j, len(rows))
                row.append((NONE if value is None else form.format(float(value)), ""))
    return columns, rows


def _at(values: Sequence[Any] | None, place: int, count: int) -> Any:
    """The entry of one of `count` answers, where each may serve several of them; None: none."""
    return values[place * len(values) // count] if values and place < count else None


def _cut_of(trace: Trace, place: int) -> int:
    """Number of the cut that an answer belongs to, from 1 on; a cut may have several answers."""
    return place * len(trace["cuts"]) // len(trace["answers"]) + 1


def _shortened(text: str, most: int = _LONGEST) -> str:
    """Beginning and end of a text that is too long."""
    if len(text) <= most:
        return text
    half = max(most // 2, 1)
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"
