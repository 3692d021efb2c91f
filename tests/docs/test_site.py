"""Tests that the site contains every page, and a reference of all public modules.

`.ci/run` also builds the site.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Subpackages that the reference documents completely. It documents some modules of the others.
PUBLIC = (
    "advantages",
    "curriculum",
    "rollout",
    "methods",
    "learner",
    "model",
    "evaluation",
    "runs",
)


def contents():
    """Pages of the tables of contents, as paths from docs/."""
    table = (DOCS / "conf.py").read_text().split("\nCONTENTS = ")[1].split("\n}")[0] + "}"
    return [page for pages in ast.literal_eval(table).values() for page in pages]


def reference():
    return "".join(path.read_text() for path in (DOCS / "reference").glob("*.rst"))


def documented_modules():
    return re.findall(r"^\.\. automodule:: (\S+)$", reference(), re.MULTILINE)


def test_every_page_is_in_the_contents_once():
    pages = {path.stem for path in DOCS.glob("*.md")} - {"index"}
    pages |= {f"studies/{path.stem}" for path in DOCS.glob("studies/*.md")}
    pages |= {f"../{path.stem}" for path in ROOT.glob("*.md")} | {"reference/index"}
    found = contents()
    assert len(found) == len(set(found))
    assert pages - set(found) == set(), "docs/conf.py: add these pages to CONTENTS"
    assert set(found) - pages == set(), "docs/conf.py: take these pages out of CONTENTS"


def test_public_modules_are_in_the_reference():
    modules = documented_modules()
    assert len(modules) == len(set(modules))
    there = {name.removeprefix("bacr_jax.") for name in modules}
    # Pages of these packages list the members that the package imports. Of its modules,
    # `bacr_jax.methods` imports only `method`.
    whole = set(re.findall(r"automodule:: bacr_jax\.(\w+)\n   :imported-members:\n", reference()))
    there.add("methods.method")
    missing = []
    for room in set(PUBLIC) - (whole - {"methods"}):
        names = [path.stem for path in (ROOT / "src/bacr_jax" / room).glob("*.py")]
        wanted = {f"{room}.{name}" for name in names if not name.startswith("__")}
        missing += sorted(wanted - there)
    assert missing == [], "docs/reference/: add `.. automodule:: bacr_jax.NAME` for each"


def test_the_reference_names_modules_that_exist():
    for name in documented_modules():
        path = ROOT / "src" / name.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__init__.py").is_file(), name
    pages = {path.stem for path in (DOCS / "reference").glob("*.rst")} - {"index"}
    listed = re.findall(r"^ {3}(\w+)$", (DOCS / "reference/index.rst").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(pages)


def test_no_two_pages_have_one_title():
    """In search results and in a browser's tabs nothing else tells them apart."""
    pages = [(DOCS / f"{name}.md").resolve() for name in contents() if name != "reference/index"]
    pages += [DOCS / "index.md", *(DOCS / "reference").glob("*.rst")]
    titles = [page.read_text().lstrip("# ").partition("\n")[0] for page in pages]
    assert sorted(titles) == sorted(set(titles))
