"""An HTML page in one file: its style and script in it, and nothing that it could load or run."""

import base64
import hashlib
import html
from collections.abc import Sequence
from pathlib import Path

STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8").strip()
SCRIPT = Path(__file__).with_name("page.js").read_text(encoding="utf-8").strip()


def document(title: str, body: str, *, style: str = STYLE, script: str = "") -> str:
    """A whole page.

    Its Content-Security-Policy allows this style and this script alone, by their digests, and
    pictures that are part of the page: nothing can be loaded, and no text of a model can run.

    Args:
      title: as text.
      body: as HTML.
      style: a style sheet.
      script: JavaScript; empty: none.
    """
    digest = lambda text: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    inside = lambda text: f"\n{text}\n"
    scripts = f"'sha256-{digest(inside(script))}'" if script else "'none'"
    rules = (
        f"default-src 'none'; img-src data:; style-src 'sha256-{digest(inside(style))}'; "
        f"script-src {scripts}; base-uri 'none'; form-action 'none'"
    )
    code = f"<script>{inside(script)}</script>\n" if script else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{rules}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{html.escape(title)}</title>\n<style>{inside(style)}</style>\n</head>\n<body>\n"
        f"{body}{code}</body>\n</html>\n"
    )


def tabs(sections: Sequence[tuple[str, str]]) -> str:
    """Sections with a list of their names above; a script shows one at a time.

    Args:
      sections: name and HTML of each; those without HTML are left out.
    """
    there = [(name, name.lower().replace(" ", "-"), body) for name, body in sections if body]
    links = "".join(
        f'<a role="tab" href="#{place}" aria-controls="{place}">{html.escape(name)}</a>'
        for name, place, _ in there
    )
    shown = "".join(
        f'<section id="{place}" role="tabpanel">\n<h2>{html.escape(name)}</h2>\n{body}</section>\n'
        for name, place, body in there
    )
    return f'<nav class="tabs" role="tablist">{links}</nav>\n{shown}'


def charts(parts: Sequence[str]) -> str:
    """Charts side by side, as many as the width holds."""
    return f'<div class="charts">\n{"".join(parts)}</div>\n' if parts else ""
