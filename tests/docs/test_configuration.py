"""Tests that docs/configuration.md agrees with the config schema."""

import importlib.util
import re
from pathlib import Path

from bacr_jax.config.io import schema
from bacr_jax.runs.agreement import FREE

ROOT = Path(__file__).parents[2]


def generator():
    where = importlib.util.spec_from_file_location("make", ROOT / "docs/make_configuration.py")
    module = importlib.util.module_from_spec(where)
    where.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date():
    text = (ROOT / "docs/configuration.md").read_text()
    assert text == generator().page(), "run python docs/make_configuration.py"
    keys = [name for name, key in schema().items() if not key.is_section]
    assert all(text.count(f"\n| `{name}` |") == 1 for name in keys)


def test_the_page_says_of_every_key_whether_processes_may_differ_in_it():
    text = (ROOT / "docs/configuration.md").read_text()
    for name, key in schema().items():
        if not key.is_section:
            (line,) = re.findall(rf"^\| `{re.escape(name)}` \|.*$", text, re.MULTILINE)
            assert line.endswith("| free |" if name in FREE else "| refused |")


def test_an_old_page_is_refused(tmp_path, monkeypatch, capsys):
    make = generator()
    monkeypatch.setattr(make, "PAGE", tmp_path / "configuration.md")
    make.PAGE.write_text("old")
    assert make.main(["--check"]) == 1
    assert "python docs/make_configuration.py" in capsys.readouterr().err
    assert make.main([]) == 0 and make.main(["--check"]) == 0


def test_cells_hold_what_tables_would_split():
    make = generator()
    assert make.code("a|b") == "`a\\|b`" and make.code("") == '`""`'
    assert make.cell("x | <tag>") == "x \\| &lt;tag>"
