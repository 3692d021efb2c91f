"""report.html of a run: one file with everything in it, to be mailed or kept."""

import base64
import html
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bacr_jax import documents
from bacr_jax.config import Config
from bacr_jax.errors import UserError
from bacr_jax.evaluation.folder import finished_evaluations
from bacr_jax.evaluation.samples import UNLIMITED
from bacr_jax.evaluation.summary import Summary
from bacr_jax.methods.registry import built_in_departures
from bacr_jax.report import completion, evaluation, run_figures
from bacr_jax.report.dense import dense_table
from bacr_jax.report.table import (
    Table,
    comparison,
    set_title,
    title_without,
    without_near_duplicates,
)
from bacr_jax.report.traces import traces_section
from bacr_jax.runs.files import read_lines, write_atomically
from bacr_jax.runs.folder import RunPaths
from bacr_jax.runs.open import read_config
from bacr_jax.runs.progress import duration

STYLE = """
:root { --ink: #1c1e21; --soft: #667; --line: #dde; --paper: #fff; --tint: #f5f6f9; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 74rem; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { margin-top: 2.4rem; font-size: 1.25rem;
  border-bottom: 1px solid var(--line); padding-bottom: .2rem; } h3 { font-size: 1rem; }
img { max-width: 100%; height: auto; } .note { color: var(--soft); font-size: .87rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .88rem; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid var(--line);
  font-variant-numeric: tabular-nums; white-space: nowrap; }
th { color: var(--soft); font-weight: 600; } .words { text-align: left; }
pre, .trace { background: var(--tint); padding: .7rem .9rem; border-radius: 6px; overflow-x: auto; }
pre { font-size: .82rem; } .trace { margin: .8rem 0; }
.text { font-family: ui-monospace, monospace; font-size: .82rem; white-space: pre-wrap;
  overflow-wrap: anywhere; }
.cut { background: #fc8; color: #000; border-radius: 3px; padding: 0 .3rem; font-size: .75rem; }
.right { background: #bfe5cf; } .wrong { background: #f6ccc4; }
.right, .wrong { color: #000; border-radius: 3px; padding: 0 .35rem; }
summary { cursor: pointer; color: var(--soft); }
""".strip()


_KINDS = {int: "whole number", str: "text", dict: "object"}


def _image(path: Path, text: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{html.escape(text)}" src="data:image/png;base64,{data}">\n'


def _read_summary(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        summary = documents.read_json(path)
    except ValueError:
        summary = None
    numbers = ("steps", "generated_tokens", "wall_seconds")
    if (
        not isinstance(summary, dict)
        or not all(type(summary.get(name, 0)) in (int, float) for name in numbers)
        or not isinstance(summary.get("departures", []), list)
    ):
        raise UserError(f"{path}: is damaged; remove it, or run the training again")
    return summary


def _records(path: Path, fields: dict[str, type]) -> list[dict[str, Any]]:
    """Records of a JSONL file that have the fields a report is made of.

    Raises:
      UserError: a record without one of them.
    """
    records = read_lines(path)
    for number, record in enumerate(records, 1):
        for name, kind in fields.items():
            if not isinstance(record.get(name), kind):
                raise UserError(
                    f"{path}, line {number}: its field {name!r} is missing or no "
                    f"{_KINDS[kind]}; fix or remove the line"
                )
    return records


def _facts(config: Config, summary: dict[str, Any], records: list[dict[str, Any]]) -> Table:
    steps = summary.get("steps", records[-1]["step"] if records else 0)
    tokens = summary.get("generated_tokens")
    if tokens is None and records:
        tokens = int(float(records[-1].get("rollout/tokens_total", 0)))
    state = "finished" if summary else "not finished"
    model = config.model.path or (
        config.model.preset
        if config.model.preset != "custom"
        else f"random, {config.model.num_layers} layers of width {config.model.hidden_size}"
    )
    rows = [
        ["state", f"{state}, {steps:,} steps"],
        ["model", model],
        ["trained on", config.data.train],
        ["budgets", f"{config.budget.min:,} to {config.budget.max:,} thinking tokens"],
        ["seed", str(config.seed)],
    ]
    if tokens is not None:
        rows.append(["generated tokens", f"{tokens:,}"])
    if "wall_seconds" in summary:
        rows.append(["time", duration(summary["wall_seconds"])])
    departures = summary.get("departures", built_in_departures(config))
    rows += [["departs from its publication", line] for line in departures]
    return Table("In short", ["", ""], rows, words=2)


def _evaluations(folder: Path) -> str:
    """Tables of the evaluations that were made of this run afterwards."""
    parts = []
    for path in finished_evaluations(folder):
        try:
            results = documents.read_json(path)
            tables = evaluation.tables(results)
        except (ValueError, KeyError, TypeError, StopIteration):
            raise UserError(f"{path}: is damaged; run its evaluation again") from None
        inside = "".join(table.html() for table in tables)
        title = html.escape(f"{results['name']} ({path.parent.name})")
        parts.append(f"<details open><summary>{title}</summary>\n{inside}</details>\n")
    return "<h2>Evaluations</h2>\n" + "".join(parts) if parts else ""


def _accuracy(
    name: str, policies: dict[str, Summary], drawn: dict[str, Path], short: str, dense: Any
) -> Iterator[str]:
    """Pictures and tables of one evaluation set."""
    name, kind = set_title(name), "accuracy by thinking budget"
    if f"accuracy_{short}" in drawn:
        yield _image(drawn[f"accuracy_{short}"], f"{name}: {kind}")
    what = "accuracy in % [95 % interval], mean thinking tokens"
    yield comparison(f"{name}: {what}", policies).html()
    others = without_near_duplicates(policies)
    if others is not None:
        yield comparison(f"{title_without(name, policies, others)}: {what}", others).html()
    last = list(policies.values())[-1]
    if completion.entries_have_it(last):
        yield completion.completion(name, last).html()
        yield completion.adherence(name, last).html()
    if dense:
        yield dense_table(name, dense, last).html()
    if f"evaluation_{short}" in drawn:
        yield _image(drawn[f"evaluation_{short}"], f"{name}: accuracy during training")


def _is_entry(entry: Any) -> bool:
    """Whether this is what an evaluation says of one budget, as far as every picture needs it."""
    if not isinstance(entry, dict):
        return False
    numbers = [entry.get("accuracy"), entry.get("mean_thinking_tokens")]
    ends = entry.get("ci95")
    numbers += ends if isinstance(ends, list) and len(ends) == 2 else [None]
    return all(type(number) in (int, float) for number in numbers)


def _check_evaluations(path: Path, records: list[dict[str, Any]]) -> None:
    """Refuses records whose sets hold something else than accuracies by decoding and budget.

    Raises:
      UserError: names the line.
    """
    for number, record in enumerate(records, 1):
        modes = [mode for of_set in record["sets"].values() for mode in _values(of_set)]
        # An empty name for what is no mapping of budgets at all.
        maps = [mode if isinstance(mode, dict) else {"": None} for mode in modes]
        entries = [item for budgets in maps for item in budgets.items()]
        known = all(key.isdecimal() or key == UNLIMITED for key, _ in entries)
        known = known and isinstance(record.get("dense", {}), dict)
        if not known or not all(_is_entry(entry) for _, entry in entries):
            raise UserError(
                f"{path}, line {number}: its sets are no accuracies by decoding and budget; fix or "
                "remove the line"
            )


def _values(of_set: Any) -> list[Any]:
    return list(of_set.values()) if isinstance(of_set, dict) and of_set else [None]


def page(folder: Path) -> str:
    """The HTML of a run, whose pictures are drawn into its folder on the way.

    Args:
      folder: run folder, of a finished run or of one under way.

    Raises:
      UserError: no run there, or a damaged file in it.
    """
    try:
        return _page(folder)
    # Fields that no check above has heard of: of a later version, or of somebody's own making.
    except (AttributeError, IndexError, KeyError, StopIteration, TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        paths = RunPaths(folder)
        names = ", ".join(p.name for p in (paths.metrics, paths.evaluations, paths.summary))
        raise UserError(
            f"{folder}: {names} hold something else than a run writes "
            f"({type(error).__name__}: {error}); copy them again"
        ) from None


def _page(folder: Path) -> str:
    paths, config = RunPaths(folder), read_config(folder)
    summary = _read_summary(paths.summary)
    method = str(summary.get("method", config.method))
    records = _records(paths.metrics, {"step": int})
    evaluations = _records(paths.evaluations, {"step": int, "when": str, "sets": dict})
    _check_evaluations(paths.evaluations, evaluations)
    drawn = run_figures.draw_run(folder, method)
    title = html.escape(f"{method}: {folder.absolute().name}")
    parts = [f"<h1>{title}</h1>\n", _facts(config, summary, records).html()]
    if evaluations:
        parts.append("<h2>Accuracy by budget</h2>\n")
    names = dict.fromkeys(run_figures.sets_of(evaluations))
    for name, short in run_figures.short_names(names).items():
        policies = run_figures.first_and_last(evaluations, name, method)
        dense = [record["dense"].get(name) for record in evaluations if "dense" in record]
        parts += _accuracy(name, policies, drawn, short, dense[-1] if dense else None)
    parts.append(_evaluations(folder))
    if "training" in drawn:
        parts += ["<h2>Training</h2>\n", _image(drawn["training"], "training curves")]
    if "budgets" in drawn:
        parts += [
            "<h2>Budgets by difficulty</h2>\n",
            _image(drawn["budgets"], "sampled budgets of each difficulty group"),
        ]
    parts.append(traces_section(paths.rollouts, config))
    name, settings = paths.config.name, html.escape(paths.config.read_text(encoding="utf-8"))
    parts.append(
        f"<h2>Config</h2>\n<details><summary>{name}</summary><pre>{settings}</pre></details>\n"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{STYLE}\n</style>\n</head>\n<body>\n"
        f"{''.join(parts)}</body>\n</html>\n"
    )


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Writes the report of a run.

    Args:
      folder: run folder.
      out: the file; report.html in the run folder by default.

    Returns:
      The file.

    Raises:
      UserError: as `page`, or the file can't be written.
    """
    path = RunPaths(folder).report if out is None else out
    if path.is_dir():
        raise UserError(f"--out {path}: is a folder; write the name of a file")
    if out is not None and not out.absolute().parent.is_dir():
        raise UserError(f"--out {path}: its folder does not exist; make it first")
    write_atomically(path, page(folder))
    return path
