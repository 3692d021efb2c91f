"""What a finished run shows: report.html and pictures, here and on the boards."""

from collections.abc import Mapping, Sequence
from typing import Any

from bacr_jax.config import Config
from bacr_jax.evaluation.summary import Summary
from bacr_jax.report.page import try_report
from bacr_jax.report.run_figures import short_names
from bacr_jax.report.traces import Trace, is_right, read_traces, shown_traces
from bacr_jax.runs.boards import Rows, attempt
from bacr_jax.runs.folder import RunFolder
from bacr_jax.runs.metrics import MetricsWriter

# Fields of a trace that a table shows as they are; traces of older versions lack some.
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

    return Rows(_COLUMNS, [[cell(trace, name) for name in _COLUMNS] for trace in traces])


def _text(value: Any) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def publish(
    folder: RunFolder, config: Config, metrics: MetricsWriter, step: int, *, again: bool
) -> None:
    """report.html and pictures of a finished run; the boards get pictures and traces, and end.

    The results are in their files by now, and nothing here can cost them.

    Args:
      folder: of the run.
      config: its settings.
      metrics: its boards.
      step: its last.
      again: it was finished before, so that the boards have it all.
    """
    if config.output.report:
        try_report(folder.path)
    if not again:
        attempt("pictures", _show_pictures, folder, metrics, step)
        attempt("traces", _show_traces, folder, metrics, step)
    metrics.close()


def _show_pictures(folder: RunFolder, metrics: MetricsWriter, step: int) -> None:
    pictures = {path.stem: path for path in sorted(folder.path.glob("*.png"))}
    metrics.show(step, pictures=pictures)


def _show_traces(folder: RunFolder, metrics: MetricsWriter, step: int) -> None:
    metrics.show(step, traces=trace_rows(shown_traces(read_traces(folder.rollouts))))
