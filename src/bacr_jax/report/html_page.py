"""Renders self-contained HTML pages from Jinja templates.

A page is a single file that loads nothing. It contains the only scripts that it runs: page.js, and
the library that draws charts. A template escapes its values unless they are `Markup`, which is the
result of another template.
"""

import base64
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from bacr_jax.report.charts import COLOURS, INK, SHADES

_HERE = Path(__file__).parent
_COLOURS = {**INK, **COLOURS, **SHADES}
# CSS variable for each colour of charts, and CSS class for each colour of curves.
_VARIABLES = [f"--{name}: light-dark({light}, {dark});" for name, (light, dark) in _COLOURS.items()]
_CLASSES = [f".{name} {{ --c: var(--{name}); }}" for name in (*COLOURS, *SHADES)]
STYLE = "\n".join(
    [
        f":root {{ {' '.join(_VARIABLES)} }}",
        *_CLASSES,
        (_HERE / "page.css").read_text(encoding="utf-8").strip(),
    ]
)
SCRIPT = (_HERE / "page.js").read_text(encoding="utf-8").strip()


def templates(*folders: Path, escape: bool = False) -> jinja2.Environment:
    """Returns a Jinja environment for the templates in these folders.

    Lines that contain only a block leave no blank lines, and a missing value is an error.
    """
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folders),
        autoescape=escape,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def renderer(*folders: Path) -> Callable[..., Markup]:
    """Returns a function that renders a Jinja template to HTML.

    The function takes the file name of the template, and the template's variables as keyword
    arguments.

    Args:
      *folders: folders that are searched for the template before the templates of this package.
    """
    environment = templates(*folders, _HERE / "templates", escape=True)

    def render_template(name: str, **values: Any) -> Markup:
        return Markup(environment.get_template(name).render(**values))

    return render_template


render = renderer()


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _on_lines(text: str) -> str:
    """Puts line breaks around a text, as in `page.html`."""
    return f"\n{text}\n"


def security(style: str, script: str) -> dict[str, Any]:
    """Returns the variables of `page.html` for the style, the script and the security policy.

    The Content-Security-Policy allows only this style and this script, which it identifies by their
    hashes, and images that are embedded in the page. Therefore a page can load nothing, and text
    that a model generated can't run as a script.
    """
    rules = (
        f"default-src 'none'; img-src data:; style-src 'sha256-{_digest(_on_lines(style))}'; "
        f"script-src 'sha256-{_digest(_on_lines(script))}'; base-uri 'none'; form-action 'none'"
    )
    # Style and script come from this package, so they need not be escaped.
    return {
        "rules": Markup(rules),
        "style": Markup(_on_lines(style)),
        "script": Markup(_on_lines(script)),
    }
