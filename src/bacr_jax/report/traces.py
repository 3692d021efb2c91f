"""Sampled traces as HTML: question, budget, thinking with its cuts, verdicts and advantages."""

import html
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from bacr_jax import rewards
from bacr_jax.config import Config
from bacr_jax.errors import UserError
from bacr_jax.report.table import NONE
from bacr_jax.runs.files import read_lines

Trace = dict[str, Any]

# Files read, traces shown and characters shown, so that a page stays a page.
_MOST_FILES, _MOST_TRACES, _MOST_CHARS = 200, 120, 1_200_000
# Of a longer text beginning and end are shown.
_LONGEST = 12_000
# More different budgets than this are chosen by doublings.
_MOST_BUDGETS = 8
# Columns of the answers that hold words.
_TEXTS = ("answer", "decided by")
# From this size on, an advantage is drawn strong.
_STRONG = 0.5


def read_traces(folder: Path) -> list[Trace]:
    """Traces of a run in the order of their steps; of many steps, some that are spread evenly.

    Args:
      folder: `rollouts/` of a run.

    Raises:
      UserError: a damaged file.
    """
    paths = sorted(folder.glob("*.jsonl"))
    places = np.linspace(0, len(paths) - 1, min(_MOST_FILES, len(paths))).round().astype(int)
    found = []
    for path in (paths[place] for place in places):
        for record in read_lines(path):
            try:
                _check(record)
            except (KeyError, TypeError, ValueError, IndexError):
                raise UserError(f"{path}: holds something else than traces; remove it") from None
            found.append(record)
    return found


def _check(trace: Trace) -> None:
    """Fails where a field that every trace has is missing or something else."""
    for name in ("step", "budget", "thinking_tokens"):
        int(trace[name])
    outcomes = [float(outcome) for outcome in trace["outcomes"]]
    if not len(outcomes) == len(trace["answers"]) == len(list(map(int, trace["context"]))):
        raise ValueError
    if not isinstance(trace.get("segments", [""]), list) or trace.get("segments") == []:
        raise ValueError
    str(trace["prompt"]), str(trace["closed_by"]), trace.get("segments") or str(trace["thinking"])
    for name in _PER_ANSWER:
        values = trace.get(name)
        if values is not None and not isinstance(values, list):
            raise TypeError


_PER_ANSWER = (
    *("extracted", "decided_by", "rewards", "values", "segment_advantages", "answer_advantages"),
    *("forced_tokens", "answer_tokens", "total_tokens"),
)


def shown_traces(traces: Sequence[Trace], *, runs: int = 1) -> list[Trace]:
    """As many as a page can show: of steps that are spread evenly, the first and last included.

    Args:
      traces: of one run, in the order of their steps.
      runs: runs that share the page.
    """
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
    texts = [trace["prompt"], trace.get("thinking", ""), *trace["answers"]]
    return sum(min(len(str(text)), _LONGEST) for text in texts)


def is_right(trace: Trace) -> bool:
    """The verdict on the answer at the end of the thinking."""
    return float(trace["outcomes"][-1]) > 0.5


def is_cut(trace: Trace) -> bool:
    """Whether the budget ended the thinking."""
    return trace["closed_by"] == "budget"


def budget_names(traces: Iterable[Trace]) -> Callable[[Trace], str]:
    """What a filter calls the budget of a trace: itself, or the doubling that it lies in."""
    if len({int(trace["budget"]) for trace in traces}) <= _MOST_BUDGETS:
        return lambda trace: f"{int(trace['budget']):,}"

    def doubling(trace: Trace) -> str:
        budget = int(trace["budget"])
        if budget < 1:
            return str(budget)
        low = 2 ** (budget.bit_length() - 1)
        return f"{low:,} to {2 * low - 1:,}"

    return doubling


def traces_section(runs: Sequence[tuple[str, Sequence[Trace], Config]]) -> str:
    """Traces of runs with what chooses among them; empty where there are none.

    Args:
      runs: label, traces and config of each.
    """
    several = len(runs) > 1
    shown = [(label, trace, config) for label, found, config in runs for trace in found]
    if not shown:
        return ""
    budget_of = budget_names([trace for _, trace, _ in shown])
    facts = [
        {
            "run": label,
            "verdict": "right" if is_right(trace) else "wrong",
            "thinking": "cut" if is_cut(trace) else "complete",
            "level": str(trace.get("level") or NONE),
            "budget": budget_of(trace),
            "step": f"{int(trace['step']):,}",
        }
        for label, trace, _ in shown
    ]
    # Budgets and levels rise in the list.
    by_size = np.argsort([int(trace["budget"]) for _, trace, _ in shown], kind="stable")
    names = ("run", "verdict", "thinking", "level", "budget", "step")
    parts = ['<form class="filters">\n']
    for name in names[0 if several else 1 :]:
        values = [facts[place][name] for place in by_size]
        if name in ("run", "step"):
            values = [fact[name] for fact in facts]
        elif name != "budget":
            values = sorted(values)
        parts.append(_choice(name, values))
    parts.append(
        '<label>text <input type="search" data-search placeholder="any"></label>\n'
        f'<output data-count aria-live="polite">{len(shown):,} traces</output>\n</form>\n'
    )
    for (_, trace, config), fact in zip(shown, facts):
        parts.append(_trace(trace, config, fact, several))
    return "".join(parts)


def _choice(name: str, values: Sequence[str]) -> str:
    options = "".join(
        f'<option value="{html.escape(value, quote=True)}">{html.escape(value)} ({count:,})'
        "</option>"
        for value, count in Counter(values).items()
    )
    return (
        f'<label>{name} <select data-filter="{name}"><option value="">all</option>{options}'
        "</select></label>\n"
    )


def _trace(trace: Trace, config: Config, fact: Mapping[str, str], several: bool) -> str:
    data = "".join(f' data-{k}="{html.escape(v, quote=True)}"' for k, v in fact.items())
    closed = html.escape(str(trace["closed_by"]))
    level = f"level {int(trace['level'])}, " if trace.get("level") else ""
    run = f"{html.escape(fact['run'])}, " if several else ""
    question = _shortened(str(trace.get("question") or trace["prompt"]), 160)
    return (
        f'<details class="trace"{data}><summary><span class="chip {fact["verdict"]}">'
        f"{fact['verdict']}</span> <b>budget {int(trace['budget']):,}</b> "
        f'<span class="note">{run}step {fact["step"]}, {level}'
        f"{int(trace['thinking_tokens']):,} thinking tokens, closed by {closed}</span> "
        f'<span class="text">{html.escape(question)}</span></summary>\n'
        f"{_facts(trace)}"
        f'<div class="text">{html.escape(_shortened(str(trace["prompt"])))}'
        f"<b>{_thinking(trace)}</b></div>\n{_cuts(trace, config)}</details>\n"
    )


def _facts(trace: Trace) -> str:
    """What a trace of today says and an older one does not."""
    rows: list[tuple[str, str]] = []
    if "id" in trace:
        rows.append(("question", f"{trace['id']}, difficulty group {trace.get('group')}"))
        told = trace.get("told")
        rows.append(
            ("told", "no budget" if told is None else f"{told:,} tokens, by {trace['told_by']}")
        )
        rows.append(("gold", str(trace.get("gold"))))
    if "closing_tokens" in trace:
        counts = [
            (trace["prompt_tokens"], "prompt"),
            (trace["thinking_tokens"], "thinking"),
            (trace["closing_tokens"], "closing tag"),
        ]
        rows.append(("tokens", ", ".join(f"{int(n):,} {name}" for n, name in counts)))
    read = trace.get("read") or {}
    rows += [(str(name), str(value)) for name, value in read.items()]
    if trace.get("in_loss") is False:
        rows.append(("learned from", "no: the method left it out of the loss"))
    cells = "".join(
        f"<dt>{html.escape(name)}</dt><dd>{html.escape(_shortened(text))}</dd>"
        for name, text in rows
    )
    return f"<dl>{cells}</dl>\n" if cells else ""


def _thinking(trace: Trace) -> str:
    """The segments with a mark at each cut, coloured by their advantage."""
    segments = trace.get("segments")
    if segments is None:
        return html.escape(_shortened(str(trace["thinking"])))
    given, most, parts = trace.get("segment_advantages"), _LONGEST // len(segments), list[str]()
    for place, segment in enumerate(segments):
        paid = _at(given, place, len(segments) - 1)
        advantage = None if paid is None else float(paid)
        text = html.escape(_shortened(str(segment), most))
        if advantage is not None and math.isfinite(advantage) and text:
            strength = "2" if abs(advantage) >= _STRONG else "1"
            side = "up" if advantage > 0 else "down" if advantage < 0 else "even"
            text = (
                f'<span class="{side}{strength}" title="advantage {advantage:+.3f}">{text}</span>'
            )
        parts.append(text)
        if place < len(segments) - 1:
            parts.append(f'<span class="cut">cut {_cut_of(trace, place)}</span>')
    return "".join(parts)


def _dense(outcomes: Sequence[float], config: Config) -> Float[np.ndarray, "M"] | None:
    """Rewards of the cuts, where the run trained on them."""
    if config.method != "bacr" or not config.reward.dense:
        return None
    return rewards.dense_reward(np.array(outcomes), coefficient=config.reward.coefficient)


def _cuts(trace: Trace, config: Config) -> str:
    """A row per answer: where, what, and how it was judged and paid."""
    outcomes = [float(r) for r in trace["outcomes"]]
    paid = trace.get("rewards")
    if paid is None:
        dense = _dense(outcomes, config)
        paid = None if dense is None else dense.tolist()
    signed, plain = "{:+.2f}".format, "{:,.0f}".format
    columns: list[tuple[str, Sequence[Any] | None, Callable[[float], str]]] = [
        ("reward", paid, signed),
        ("value", trace.get("values"), signed),
        ("advantage of the segment", trace.get("segment_advantages"), signed),
        ("of the answer", trace.get("answer_advantages"), signed),
        ("forced", trace.get("forced_tokens"), plain),
        ("answered", trace.get("answer_tokens"), plain),
        ("total", trace.get("total_tokens"), plain),
    ]
    there = [column for column in columns if column[1] is not None]
    words = ["cut", "at", "answer", "outcome", *(["decided by"] if "decided_by" in trace else [])]
    head = "".join(
        f'<th class="words">{name}</th>' if name in _TEXTS else f"<th>{name}</th>"
        for name in (*words, *(name for name, _, _ in there))
    )
    rows, count = [], len(outcomes)
    for j, (answer, outcome) in enumerate(zip(trace["answers"], outcomes)):
        verdict = "right" if outcome > 0.5 else "wrong"
        cells = [
            f"<td>{_cut_of(trace, j)}</td><td>{int(trace['context'][j]):,}</td>",
            f'<td class="words"><span class="text">{html.escape(_shortened(str(answer)))}'
            f'</span></td><td><span class="chip {verdict}">{outcome:g}</span></td>',
        ]
        if "decided_by" in trace:
            by, found = (_at(trace.get(n), j, count) for n in ("decided_by", "extracted"))
            what = str(by) if found is None else f"{by}: {found}"
            cells.append(f'<td class="words">{html.escape(_shortened(what, 300))}</td>')
        cells += [f"<td>{_cell(_at(values, j, count), form)}</td>" for _, values, form in there]
        rows.append(f"<tr>{''.join(cells)}</tr>\n")
    return f'<div class="wide"><table><tr>{head}</tr>\n{"".join(rows)}</table></div>\n'


def _at(values: Sequence[Any] | None, place: int, count: int) -> Any:
    """The entry of one of `count` answers, where each may serve several of them; None: none."""
    return values[place * len(values) // count] if values and place < count else None


def _cut_of(trace: Trace, place: int) -> int:
    """Number of the cut that an answer belongs to, from 1 on; a cut may have several answers."""
    count = len(trace["answers"])
    return place * len(trace.get("cuts") or trace["answers"]) // count + 1


def _cell(value: Any, form: Callable[[float], str]) -> str:
    return NONE if value is None else html.escape(form(float(value)))


def _shortened(text: str, most: int = _LONGEST) -> str:
    """Beginning and end of a text that is too long."""
    if len(text) <= most:
        return text
    half = max(most // 2, 1)
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"
