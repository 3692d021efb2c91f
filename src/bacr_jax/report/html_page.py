"""HTML pages in one file, from templates that escape every text; a page loads and runs nothing.

A template's values are texts, unless they are `Markup`, which other templates made.
"""

import base64
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

_HERE = Path(__file__).parent
STYLE = (_HERE / "page.css").read_text(encoding="utf-8").strip()
SCRIPT = (_HERE / "page.js").read_text(encoding="utf-8").strip()


def templates(*folders: Path, escape: bool = False) -> jinja2.Environment:
    """Templates of these folders, which leave no lines of their blocks and miss no value."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folders),
        autoescape=escape,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def renderer(*folders: Path) -> Callable[..., Markup]:
    """What fills templates of these folders, and those here, with values given by name."""
    environment = templates(*folders, _HERE / "templates", escape=True)
    return lambda name, **values: Markup(environment.get_template(name).render(**values))


render = renderer()


def security(style: str, script: str = "") -> dict[str, Any]:
    """What `page.html` takes besides its title: style, script, and the policy that allows them.

    The Content-Security-Policy allows this style and this script alone, by their digests, and
    pictures that are part of the page: nothing can be loaded, and no text of a model can run.
    """
    digest = lambda text: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    inside = lambda text: f"\n{text}\n" if text else ""
    scripts = f"'sha256-{digest(inside(script))}'" if script else "'none'"
    rules = (
        f"default-src 'none'; img-src data:; style-src 'sha256-{digest(inside(style))}'; "
        f"script-src {scripts}; base-uri 'none'; form-action 'none'"
    )
    # These are ours, and no text to be escaped.
    return {
        "rules": Markup(rules),
        "style": Markup(inside(style)),
        "script": Markup(inside(script)),
    }
