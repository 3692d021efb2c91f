"""Renders HTML pages in one file from templates that escape every text.

Pages load nothing and run no other script than page.js and the library that draws charts, which
the page contains. A template escapes its values unless they
are `Markup`, the result of another template.
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
# A variable for each colour of charts, and a class for each curve of a legend.
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
    """Returns an environment for the templates of these folders.

    Lines of blocks leave no blank lines, and a missing value is an error.
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
    """Returns a text between line ends, as `page.html` contains it; empty text stays empty."""
    return f"\n{text}\n" if text else ""


def security(style: str, script: str = "") -> dict[str, Any]:
    """Returns the values of `page.html` for style, script, and the policy that allows them.

    The Content-Security-Policy only allows this style and this script, by their digests, and
    pictures inside the page. A page can load nothing, and no text of a model can run.
    """
    scripts = f"'sha256-{_digest(_on_lines(script))}'" if script else "'none'"
    rules = (
        f"default-src 'none'; img-src data:; style-src 'sha256-{_digest(_on_lines(style))}'; "
        f"script-src {scripts}; base-uri 'none'; form-action 'none'"
    )
    # Style and script come from this package, so they need not be escaped.
    return {
        "rules": Markup(rules),
        "style": Markup(_on_lines(style)),
        "script": Markup(_on_lines(script)),
    }
