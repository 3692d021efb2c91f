"""The site: `sphinx-build -W -b html -c docs . site`, with the repository's root as its source.

So a link between README.md and a page of docs/ is the same link on a code host and here. Pages are
plain Markdown; the tables of contents stand below.
"""

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from bacr_jax import __version__  # noqa: E402

project, author = "bacr_jax", "The bacr_jax authors"
copyright, version, release = author, __version__, __version__

# Captions of the table of contents, and their pages in the order of reading. A page that is missing
# here is a warning, and a warning is an error.
CONTENTS = {
    "Tutorials": ["../README", "quickstart", "recipes", "notebook"],
    "How-to guides": [
        "import",
        "data",
        "tasks",
        "prompts",
        "budget-input",
        "own-grader",
        "runs",
        "adapters",
        "scaling",
        "devices",
        "doctor",
        "cpu",
        "study",
        "serve",
        "serving",
        "llama-cpp",
        "vllm-training",
        "../CONTRIBUTING",
    ],
    "Reference": [
        "models",
        "configuration",
        "methods",
        "metrics",
        "alarms",
        "evaluation",
        "budgets",
        "grading",
        "report",
        "errors",
        "trust",
        "predictions",
        "performance",
        "equations",
        "departures",
        "reference/index",
        "../BUILD",
        "../CHANGELOG",
    ],
    "Explanation": [
        "comparison",
        "results",
        "paper",
        "theory",
        "architecture",
        "reproducibility",
        "smollm2-runs",
        "studies/main",
        "studies/controls",
        "studies/rivals",
        "studies/distill",
        "studies/elsewhere",
        "studies/smollm2",
        "studies/stability",
        "studies/stability-starts",
        "studies/qwen",
        "studies/smollm2-input",
        "studies/elsewhere-input",
        "studies/budget-input",
        "studies/hard",
        "studies/ablation",
        "studies/scale",
        "studies/sensitivity",
        "studies/variance",
        "studies/variance-training",
        "studies/search",
    ],
}

root_doc = "docs/index"
include_patterns = ["docs/**", "*.md"]
exclude_patterns = ["docs/results/**"]
templates_path: list[str] = []
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
# A `dollar` in prose is a dollar.
myst_dmath_allow_space = myst_dmath_allow_digits = False

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True, "show-inheritance": False}
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_use_rtype = False
napoleon_use_ivar = True
maximum_signature_line_length = 80
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = project
html_math_renderer = "mathml"
html_copy_source = html_show_sourcelink = False
html_permalinks_icon = "#"

FENCE = "\n\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{pages}\n```\n"
# A picture for light and for dark pages, as a code host shows it.
PICTURE = re.compile(
    r'<picture>\s*<source [^>]*srcset="(?P<dark>[^"]+)">\s*'
    r'<img alt="(?P<alt>[^"]+)"\s+src="(?P<light>[^"]+)" width="(?P<width>\d+)">\s*</picture>'
)
THEMED_IMAGE = "```{{image}} {path}\n:class: only-{theme}\n:alt: {alt}\n:width: {width}px\n```\n"
PAGE = re.compile(r"(?:docs/)?[\w/.-]+\.md")
# What keeps its meaning in a docstring: code, emphasis, the dots of a list.
KEPT = re.compile(r"(``[^`]+``|`[^`]+`|(?<!\w)\*\w[^*\n]*\*(?!\w)|^ *\* )", re.MULTILINE)


def add_contents(app: Any, name: str, source: list[str]) -> None:
    """The tables of contents, which would be noise where a code host shows the index."""
    if name == root_doc:
        for caption, pages in CONTENTS.items():
            source[0] += FENCE.format(caption=caption, pages="\n".join(pages))


def theme_pictures(app: Any, name: str, source: list[str]) -> None:
    """Replaces `<picture>` by one image per theme, because the site has a theme switch."""

    def both(match: re.Match[str]) -> str:
        alt = " ".join(match["alt"].split())
        images = [
            THEMED_IMAGE.format(path=match[theme], theme=theme, alt=alt, width=match["width"])
            for theme in ("light", "dark")
        ]
        return "\n".join(images)

    source[0] = PICTURE.sub(both, source[0])


def link_pages(app: Any, tree: nodes.document) -> None:
    """`docs/grading.md`, a page by its name in the repository, becomes a link to it."""
    known = app.env.found_docs
    for literal in list(tree.findall(nodes.literal)):
        name = literal.astext().removesuffix(".md")
        inside = isinstance(literal.parent, nodes.reference | nodes.title)
        if PAGE.fullmatch(literal.astext()) and name in known and not inside:
            here = app.env.docname
            target = app.builder.get_relative_uri(here, name)
            link = nodes.reference("", "", internal=True, refuri=target)
            literal.replace_self(link)
            link += literal


def docstring_as_rst(
    app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
    """Docstrings are plain text with `code` and indented formulas, which reST would misread."""
    written, prose = [], []
    before, formula = "", False
    for line in [*lines, ""]:
        indented = line.startswith("    ")
        formula = formula and (indented or not line.strip())
        fresh = not before or not (prose or written)[-1].strip()
        if indented and fresh and not formula and not before.startswith(" "):
            prose += ["::", ""]
            formula = True
        if formula:
            written += [*_plain(prose), line]
            prose = []
        else:
            prose.append(line)
        before = line if line.strip() else before
    lines[:] = [*written, *_plain(prose)]


def _plain(lines: list[str]) -> list[str]:
    """Lines with their `code` as reST writes it, and what else means something there escaped."""
    parts = KEPT.split("\n".join(lines))
    parts[::2] = [re.sub(r"(?<=\w)_(?!\w)|[|*`]", r"\\\g<0>", part) for part in parts[::2]]
    # An escaped space, which is not shown, lets letters stand beside code.
    parts[1::2] = [f"\\ ``{part.strip('`')}``\\ " if "`" in part else part for part in parts[1::2]]
    return "".join(parts).split("\n") if lines else []


def short_names(
    app: Any, what: str, name: str, thing: Any, options: Any, signature: Any, returned: Any
) -> tuple[Any, Any]:
    """`Float[Array, "Q G M"]`, as it is written in the source."""
    short = lambda text: text and text.replace("jaxlib._jax.Array", "Array")
    return short(signature), short(returned)


def inline_math(self: Any, node: nodes.math) -> None:
    """An equation as MathML, which browsers draw by themselves: no script, no request."""
    self.body.append(tex2mathml(node.astext(), as_block=False))
    raise nodes.SkipNode


def block_math(self: Any, node: nodes.math_block) -> None:
    """The same on lines of its own, with the equation's number."""
    number = f'<span class="eqno">({node["number"]})</span>' if node.get("number") else ""
    drawn = tex2mathml(node.astext(), as_block=True)
    self.body.append(f'<div class="math-block">{drawn}{number}</div>')
    raise nodes.SkipNode


def enter_at_the_root(app: Any, error: Exception | None) -> None:
    """`site/index.html` leads to the index of the pages, which lies in site/docs/."""
    if error is None and app.builder.name == "html":
        page = '<!doctype html><meta charset="utf-8"><title>bacr_jax</title>'
        page += '<meta http-equiv="refresh" content="0; url=docs/index.html">'
        page += '<a href="docs/index.html">bacr_jax</a>\n'
        (Path(app.outdir) / "index.html").write_text(page)


def setup(app: Any) -> None:
    """Hooks of this file."""
    app.connect("source-read", add_contents)
    app.connect("source-read", theme_pictures)
    app.connect("doctree-read", link_pages)
    # Before napoleon, which reads the sections.
    app.connect("autodoc-process-docstring", docstring_as_rst, priority=400)
    app.connect("autodoc-process-signature", short_names)
    app.connect("build-finished", enter_at_the_root)
    app.add_html_math_renderer("mathml", (inline_math, None), (block_math, None))
