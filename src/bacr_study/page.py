"""study.html: everything a study found, in one file that needs no other."""

import base64
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bacr_jax.report.html_page import STYLE, renderer, security
from bacr_jax.report.table import Table
from bacr_study.figures import Drawn
from bacr_study.items import budget_phrase, difference_text, estimate_of, row_names
from bacr_study.spec import MEAN, Study

_STYLE = """
figure { margin: 1.2rem 0; } figcaption { color: var(--soft); font-size: .87rem; }
th.group { text-align: center; } th.group:empty { border-bottom: 0; }
tr.rule td { border-bottom: 2px solid var(--soft); } sup { line-height: 0; }
details > h3 { display: none; } details { margin: .4rem 0; }
td.words { white-space: normal; min-width: 6rem; } .warning { border-left: 3px solid #d55e00;
  padding-left: .7rem; } nav a { margin-right: .9rem; white-space: nowrap; }
li { overflow-wrap: anywhere; }
""".strip()
_render = renderer(Path(__file__).with_name("templates"))


def page(
    results: Mapping[str, Any],
    study: Study,
    tables: Sequence[Table],
    figures: Sequence[tuple[Drawn, Path, Path]],
) -> str:
    """The HTML of a study, from results.json, and the tables and figures made of it."""
    pictures = [(drawn, base64.b64encode(png.read_bytes()).decode()) for drawn, png, _ in figures]
    return _render(
        "study.html",
        title=study.heading,
        study=study,
        results=results,
        verdict=list(_verdict(results, study)),
        tables=tables,
        pictures=pictures,
        provenance=[f"{k}: {'; '.join(v)}" for k, v in sorted(results["provenance"].items())],
        **security(f"{STYLE}\n{_STYLE}"),
    )


def _verdict(results: Mapping[str, Any], study: Study) -> Iterator[str]:
    """Which arm leads each task at its smallest and largest budget and on average, and by what."""
    pairs = dict[tuple[str, ...], Any]()
    for entry in results["comparisons"]:
        pairs.setdefault(tuple(entry[k] for k in ("task", "set", "budget", "variant")), entry)
    names = row_names(study)
    for task in study.tasks:
        for budget in (str(min(task.budgets)), str(max(task.budgets)), MEAN):
            found = {
                variant.key: estimate["mean"]
                for variant in study.variants()
                if (estimate := estimate_of(results, task, task.main, variant, budget))
            }
            if found:
                best = max(found, key=lambda key: found[key])
                line = f"{task.label}, {budget_phrase(budget)}: {names[best]} leads with "
                line += f"{100 * found[best]:.1f} %"
                if entry := pairs.get((task.id, task.main, budget, best)):
                    line += f", {difference_text(entry)} points from {names[entry['reference']]}"
                yield line
