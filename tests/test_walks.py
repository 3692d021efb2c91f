"""`.ci/walks.py` counts what its page says, and the config reaches no further than it did."""

import ast
import importlib.util
import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("walks", ROOT / ".ci" / "walks.py")
walks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(walks)

# The counts of this commit, which may only fall.
FUNCTIONS, FILES, RETURNS = 30, 18, 14


@pytest.fixture(scope="module")
def modules():
    return walks.read_modules(ROOT / "src")


def test_the_config_reaches_no_further_than_before(modules):
    walked = walks.walk(modules)
    assert len(walks.functions_with_config(modules)) <= FUNCTIONS
    assert len(walked.files) <= FILES
    assert walked.returns <= RETURNS


# Subpackages in layers below `runs`, which take records or sections of the config.
SUBPACKAGES = (
    *("advantages", "curriculum", "learner", "losses", "methods", "model", "parallel", "prompts"),
    *("questions", "rewards", "rollout", "types"),
)


def test_no_subpackage_below_runs_imports_the_whole_config(modules):
    """The command of `questions` is the only exception."""
    importing = [
        name
        for name, module in modules.items()
        if name.startswith(tuple(f"bacr_jax.{below}" for below in SUBPACKAGES))
        and {"bacr_jax.config.Config", "bacr_jax.config.schema.Config"} & {*module.imports.values()}
    ]
    assert importing == ["bacr_jax.questions.__main__"]


def test_a_walk_is_counted_as_the_page_says(tmp_path):
    """train.main enters rooms.build and files.check, and files.check enters rooms again."""
    sources = {
        "bacr_jax/config/__init__.py": "from bacr_jax.config.schema import Config as Config",
        "bacr_jax/config/schema.py": "class Config: ...\nclass DataConfig: ...",
        "bacr_jax/config/method_settings.py": "",
        "bacr_jax/train.py": """
            from bacr_jax import rooms
            from bacr_jax.config import Config
            def main(argv):
                config = read(argv)
                rooms.build(config)
                from bacr_jax.files import check
                check(config.data)
            def read(argv) -> "Config | None": ...
            def unused(config: Config): ...
        """,
        "bacr_jax/rooms.py": """
            from bacr_jax.config import Config
            def build(config: Config): build(config)
            def size(*, config: "Config"): return number(3)
            def number(count): ...
        """,
        "bacr_jax/files.py": """
            from bacr_jax.config import DataConfig
            from bacr_jax.rooms import size
            class Folder:
                def __init__(self, data: DataConfig): self.make()
                def make(self): size(config=None)
            def check(data: DataConfig): Folder(data)
        """,
    }
    for name, source in sources.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
    modules = walks.read_modules(tmp_path)
    assert walks.functions_with_config(modules) == [
        ("bacr_jax.rooms", "build"),
        ("bacr_jax.rooms", "size"),
        ("bacr_jax.train", "unused"),
    ]
    walked = walks.walk(modules)
    assert walked.functions == [
        ("bacr_jax.train", "main"),
        ("bacr_jax.train", "read"),
        ("bacr_jax.rooms", "build"),
        ("bacr_jax.files", "check"),
        ("bacr_jax.files", "Folder.__init__"),
        ("bacr_jax.files", "Folder.make"),
        ("bacr_jax.rooms", "size"),
    ]
    assert walked.files == ["bacr_jax.train", "bacr_jax.rooms", "bacr_jax.files"]
    assert walked.returns == 1


def names_and_definitions(path):
    """The names that a module reads, and those of its functions and classes."""
    tree = ast.parse(path.read_text())
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    definitions = (ast.FunctionDef, ast.ClassDef)
    return names, {node.name for node in tree.body if isinstance(node, definitions)}


def test_each_walk_of_the_page_leads_from_one_function_to_the_next():
    """A step is defined in its file and named in a file that the walk has passed.

    The functions of a method are reached through the record `Method`.
    """
    page = (ROOT / "docs" / "architecture.md").read_text()
    paragraphs = re.findall(r"^Walk[^:]*: (.*?)\n\n", page + "\n\n", re.DOTALL | re.MULTILINE)
    assert len(paragraphs) == 3
    for paragraph in paragraphs:
        steps = re.findall(r"`([\w/]+\.py)`\s+`(\w+)`", paragraph)
        assert len(steps) >= 10 and paragraph.count("`") == 4 * len(steps)
        passed = set()
        for file, function in steps:
            names, definitions = names_and_definitions(ROOT / "src" / "bacr_jax" / file)
            assert function in definitions, (file, function)
            is_reached = function in passed or file.startswith("methods/")
            assert is_reached or not passed, (file, function)
            passed |= names


def test_each_file_that_the_page_names_for_a_change_exists():
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.partition("## Where to make a change")[2]
    paths = re.findall(r"`([\w./]+\.py|[\w/]*methods/?)`", table)
    assert len(paths) >= 15
    for path in paths:
        source = ROOT if path.startswith("configs/") else ROOT / "src" / "bacr_jax"
        assert (source / path).exists(), path
