"""The check of density and plain text counts right, and its record may only fall."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / ".ci" / "style.py"
_spec = importlib.util.spec_from_file_location("style", SCRIPT)
style = importlib.util.module_from_spec(_spec)
sys.modules["style"] = style
_spec.loader.exec_module(style)

PLAIN = '''"""Adds numbers."""

TOTAL = 1


def add(left, right):
    """Returns the sum of two numbers."""
    return left + right
'''


def figures(tmp_path, source):
    path = tmp_path / "bacr_one" / "module.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    (counts,) = style.measure(tmp_path).values()
    return counts, counts.figures()


def test_plain_code_is_within_every_limit(tmp_path):
    counts, values = figures(tmp_path, PLAIN)
    # TOTAL = 1, def, return; the docstrings are two words and six.
    assert (counts.code, counts.docstrings, counts.words) == (3, 2, 8)
    # Assign, Name, Constant; FunctionDef, two docstring statements with their constants; Return,
    # BinOp, two Names.
    assert counts.nodes == 3 + 1 + 4 + 4
    assert all(values[name] <= limit for name, limit in style.LIMITS.items())


@pytest.mark.parametrize(
    ("line", "figure"),
    [
        ("a, b = 1, 2", "parallel assignments per 1,000 lines"),
        ("double = lambda x: 2 * x", "assigned lambdas"),
        ("found = 1", "vague names"),
        ("# What a server says of its own state.", "words: say"),
        ("# It is told so.", "words: tell"),
        ("# That of the other one.", "words: that of"),
        ("# It stands there.", "words: stand"),
        ("# Beside it.", "words: beside"),
        ("# A thread of its own.", "words: of its own"),
        ("# Whoever calls.", "words: whoever"),
        ("# This is no error.", "words: is no"),
    ],
)
def test_every_habit_is_counted_once_with_its_place(tmp_path, line, figure):
    counts, values = figures(tmp_path, f"{PLAIN}\n\n{line}\n")
    assert values[figure] > style.LIMITS[figure] or figure == "vague names"
    (place,) = counts.places[figure]
    assert place.startswith("bacr_one/module.py:11")


def test_what_is_allowed_is_not_counted(tmp_path):
    source = (
        f"{PLAIN}\n\na, b = divmod(7, 2)\nnames = sorted([], key=lambda x: x)\n"
        "text = 'What it says is told'\n# It is no longer so.\n"
    )
    counts, _ = figures(tmp_path, source)
    assert not any(counts.places.values())


def test_first_words_and_lengths_are_counted(tmp_path):
    odd = PLAIN.replace("Returns the sum", "What the sum is")
    counts, values = figures(tmp_path, odd)
    assert values["odd first words (%)"] == 50.0
    assert counts.places["odd first words (%)"] == [
        "bacr_one/module.py:6 What the sum is of two numbers."
    ]
    long = PLAIN + "\n\ndef long():\n" + "    print(1)\n" * 80
    counts, _ = figures(tmp_path, long)
    assert counts.places["functions over 80 lines"] == ["bacr_one/module.py:11 long: 81"]
    counts, _ = figures(tmp_path, PLAIN + "\n" * 600)
    assert counts.places["files over 600 lines"] == ["bacr_one/module.py: 608"]


def test_a_figure_may_only_fall():
    name = "vague names"
    assert style.risen({"a": {name: 5}}, {"a": {name: 5.0}}) == []
    assert style.risen({"a": {name: 2}}, {}) == []
    (line,) = style.risen({"a": {name: 6}}, {"a": {name: 5.0}})
    assert "a, vague names: 6, allowed 5" in line
    assert style.lowered({"a": {name: 4}}, {"a": {name: 5.0}}) == {"a": {name: 4}}
    assert style.lowered({"a": {name: 9}}, {"a": {name: 5.0}}) == {"a": {name: 5.0}}
    # Within the limit nothing needs a record.
    assert style.lowered({"a": {name: 2}}, {"a": {name: 5.0}}) == {"a": {}}


def test_the_repository_is_within_its_record():
    recorded = json.loads(SCRIPT.with_name("style.json").read_text())
    finished = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout
    packages = (SCRIPT.parent.parent / "src").glob("*/__init__.py")
    assert set(recorded) == {path.parent.name for path in packages}
