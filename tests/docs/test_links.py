"""Tests that all links, files, modules, functions and config keys on pages exist."""

import ast
import functools
import re
import typing
from pathlib import Path

import pytest

from bacr_jax.config.io import schema

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/studies/*.md"))
)
# Folders to which a path on a page may be relative.
BASES = (ROOT, SOURCE, SOURCE / "bacr_jax")
# Beginnings of paths in run folders, which the repository does not contain.
RUN_FILES = ("runs/", "checkpoints/", "exports/", "rollouts/", "tensorboard/", "wandb/", "warmup/")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# The file of a picture, either the default one or the variant for dark pages.
PICTURE = re.compile(r'<(?:img|source)\b[^>]*\bsrc(?:set)?="([^"]+)"')
OURS = "|".join(path.name for path in SOURCE.iterdir() if path.is_dir())
DOTTED = re.compile(rf"\b(?:{OURS})(?:\.\w+)+")
IMPORT = re.compile(rf"^from ((?:{OURS})[\w.]*) import ([\w, ]+)$", re.MULTILINE)
FILE = re.compile(
    r"(?<![\w./*-])(?:(?:src|docs|tests|configs|benchmarks|research|examples|launch|\.ci)/[\w./-]*[\w/]"
    r"|(?:[\w-]+/)*[\w.-]+\.(?:py|sh|env|cff)\b)"
)
CODE = re.compile(r"`([^`\n]+)`")
KEY = re.compile(r"(?<![\w./-])([a-z_]+(?:\.[a-z_0-9]+)+)(?![\w./-])")
# A dotted name with one of these endings is a file, not a config key.
ENDINGS = ("py", "md", "json", "jsonl", "yaml", "html", "png", "tex", "safetensors")
# Files that a page asks the reader to write.
YOURS = {"brief_grpo.py", "mine.py", "FILE.py"}


def text_of(page):
    return (ROOT / page).read_text()


def heading_anchors(path):
    titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@functools.cache
def names_in(path):
    """Names that a module defines or imports, and those of its classes as Class.name."""
    names = set()

    def collect(body, prefix):
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                collect(node.body, f"{prefix}{node.name}.")
            if isinstance(node, ast.If):
                collect(node.body, prefix)
            if isinstance(node, ast.Import | ast.ImportFrom):
                names.update(prefix + (alias.asname or alias.name) for alias in node.names)
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names.update(
                    prefix + name.id
                    for target in targets
                    for name in ast.walk(target)
                    if isinstance(name, ast.Name)
                )

    collect(ast.parse(path.read_text()).body, "")
    return names


def exists(dotted):
    """Whether a dotted name is a module of ours, or a name in one."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        place = SOURCE.joinpath(*parts[:count])
        rest = ".".join(parts[count:])
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                return not rest or rest in names_in(file)
    return False


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    wrong = []
    for target in LINK.findall(text_of(page)) + PICTURE.findall(text_of(page)):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        if not path.exists() or (anchor and anchor not in heading_anchors(path)):
            wrong.append(target)
    assert wrong == []


@pytest.mark.parametrize("page", PAGES)
def test_modules_and_names_in_them_exist(page):
    text = text_of(page)
    named = set(DOTTED.findall(text))
    for module, names in IMPORT.findall(text):
        named |= {f"{module}.{name.strip()}" for name in names.split(",")}
    assert [name for name in sorted(named) if not exists(name)] == []


@pytest.mark.parametrize("page", PAGES)
def test_files_exist(page):
    found = set(FILE.findall(text_of(page))) - YOURS
    named = {name for name in found if not name.startswith(RUN_FILES)}
    there = lambda name: any((base / name).exists() for base in BASES)
    assert [name for name in sorted(named) if not there(name)] == []


@pytest.mark.parametrize("page", PAGES)
def test_config_keys_and_names_in_rooms_exist(page):
    """`train.steps` must be a key; `methods.grpo.make` must be in a room."""
    sections = {name for name, key in schema().items() if key.is_section}
    rooms = {path.stem for path in (SOURCE / "bacr_jax").iterdir() if path.suffix in ("", ".py")}
    named = {match[1] for code in CODE.findall(text_of(page)) for match in KEY.finditer(code)}
    wrong = [
        name
        for name in sorted(named)
        if name.partition(".")[0] in sections | rooms
        and name.rpartition(".")[2] not in ENDINGS
        and name not in schema()
        and not exists(f"bacr_jax.{name}")
    ]
    assert wrong == []


def test_every_page_is_in_the_index():
    index = set(LINK.findall((ROOT / "docs/index.md").read_text()))
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert pages - index == set()


def test_results_keep_cells_numbers_tables_and_the_pictures_that_pages_show():
    """PDF, TeX and CSV are made by `study --report`, and no picture lies there unseen."""
    folder = ROOT / "docs" / "results"
    shown = {
        (ROOT / page).parent.joinpath(link).resolve()
        for page in PAGES
        for link in LINK.findall(text_of(page)) + PICTURE.findall(text_of(page))
    }
    for path in filter(Path.is_file, folder.rglob("*")):
        assert path.suffix in (".xz", ".md", ".png"), path
        assert path.suffix != ".png" or path.resolve() in shown, path


def test_the_page_of_the_budget_input_has_a_row_for_each_value():
    page = (ROOT / "docs" / "budget-input.md").read_text()
    table = page.partition("| --- |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)`", table, re.MULTILINE)
    hint = schema()["conditioning.budget_input"].hint
    assert sorted(rows) == sorted(typing.get_args(hint))
