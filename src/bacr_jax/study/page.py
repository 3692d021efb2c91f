"""study.html: everything a study found, in one file that needs no other."""

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bacr_jax.report.html_page import STYLE, document
from bacr_jax.study.figures import Picture
from bacr_jax.study.typeset import StudyTable

_STYLE = """
figure { margin: 1.2rem 0; } figcaption { color: var(--soft); font-size: .87rem; }
th.group { text-align: center; } th.group:empty { border-bottom: 0; }
tr.rule td { border-bottom: 2px solid var(--soft); } sup { line-height: 0; }
td.words { white-space: normal; min-width: 6rem; } .warning { border-left: 3px solid #d55e00;
  padding-left: .7rem; } nav a { margin-right: .9rem; white-space: nowrap; }
li { overflow-wrap: anywhere; }
""".strip()


def page(
    results: Mapping[str, Any], tables: Sequence[StudyTable], pictures: Sequence[Picture]
) -> str:
    """The HTML of a study.

    Args:
      results: results.json.
      tables: that were made of it.
      pictures: that were drawn of it.
    """
    study = results["study"]
    title = html.escape(study["title"])
    parts = [
        f"<h1>{title}</h1>\n",
        _facts(results),
        *(f"<p class=warning>{html.escape(line)}</p>\n" for line in results["warnings"]),
        '<nav><a href="#tables">Tables</a><a href="#figures">Figures</a>'
        '<a href="#provenance">Where the numbers come from</a></nav>\n',
        '<h2 id="tables">Tables</h2>\n',
        *(table.html() for table in tables),
        '<h2 id="figures">Figures</h2>\n',
        *map(_figure, pictures),
        '<h2 id="provenance">Where the numbers come from</h2>\n',
        _provenance(results),
    ]
    return document(study["title"], "".join(parts), style=f"{STYLE}\n{_STYLE}")


def _facts(results: Mapping[str, Any]) -> str:
    study = results["study"]
    sizes = sorted({cell["study_size"] for cell in results["cells"].values()})
    words = [
        f"study {study['name']}, size {', '.join(sizes)}",
        f"{len(results['cells'])} runs",
        f"{len(study['arms'])} methods",
        f"tasks: {', '.join(task['label'] for task in study['tasks'])}",
        f"seeds: {', '.join(map(str, study['seeds']))}",
        *(
            f"budgets of {task['label']}: {', '.join(f'{b:,}' for b in task['budgets'])} tokens"
            for task in study["tasks"]
        ),
    ]
    return f"<p class=note>{html.escape('; '.join(words))}</p>\n"


def _figure(picture: Picture) -> str:
    data = base64.b64encode(picture.png.read_bytes()).decode()
    alt = html.escape(f"{picture.title}. {picture.caption}", quote=True)
    return (
        f'<figure><img alt="{alt}" src="data:image/png;base64,{data}">\n'
        f"<figcaption>{html.escape(picture.caption)}</figcaption></figure>\n"
    )


def _provenance(results: Mapping[str, Any]) -> str:
    lines = [f"{key}: {'; '.join(found)}" for key, found in sorted(results["provenance"].items())]
    missing = results["missing"]
    shown = _list(lines)
    if missing:
        shown += f"<details><summary>{len(missing)} cells are missing</summary>{_list(missing)}"
        shown += "</details>\n"
    return shown


def _list(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{html.escape(line)}</li>\n" for line in lines) + "</ul>\n"
