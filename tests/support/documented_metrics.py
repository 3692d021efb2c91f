"""Reads the metrics that docs/metrics.md documents, and the metrics that the code can write."""

import ast
import re
from pathlib import Path

import numpy as np

from bacr_grading.grader import ExactGrader
from bacr_jax.evaluation.samples import EvalSetting, Graded
from bacr_jax.evaluation.summary import summarise

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/metrics.md"
# Heading of the section about the results for one evaluation set, decoding mode and budget.
ENTRY = "eval.jsonl: one set, mode and budget"
# Subpackages that read metrics and write none.
READERS = ("report",)
NAME = re.compile(r"[a-z]\w*/[\w*]+")


def documented():
    """Returns the documented keys of each section of the page, by the section's heading."""
    sections = {}
    for section in PAGE.read_text().split("\n## ")[1:]:
        heading = section.partition("\n")[0]
        sections[heading] = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    return sections


def rows():
    """Returns the cells of every row of the page's tables."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def keys_of(file):
    """Returns the documented keys of a file, except the keys of the section `ENTRY`.

    Args:
      file: metrics.jsonl, eval.jsonl or summary.json, with which the headings of its sections
        begin.
    """
    found = documented().items()
    return [key for name, keys in found if name.startswith(file) and name != ENTRY for key in keys]


def pattern(key):
    """Compiles a documented key to a regular expression.

    A word in capitals, such as SET, stands for any name. `*` stands for any text.
    """
    escaped = re.escape(key).replace(r"\*", ".+")
    return re.compile(re.sub(r"(?<![A-Za-z])[A-Z]+(?![A-Za-z])", r"[^./]+", escaped))


def advice(missing, where):
    """Returns the error message for keys that the page does not document.

    Args:
      missing: names of the keys.
      where: heading of the section to which they belong.
    """
    return f"docs/metrics.md: add a row under '## {where}' for each of {sorted(missing)}"


def undocumented(names, file="metrics.jsonl"):
    """Returns the keys that the page does not document.

    Args:
      names: keys that a run wrote to `file`.
    """
    keys = keys_of(file)
    # An object without any value is written as null, so its own key is valid too.
    keys += [key.rpartition(".")[0] for key in keys if "." in key]
    known = [pattern(key) for key in keys]
    return {name for name in names if not any(one.fullmatch(name) for one in known)}


def leaves(value, prefix=""):
    """Returns the dotted names of the numbers, texts and lists in nested dicts.

    Dots in a key are replaced by `_`, because names of sets, levels and subjects may contain dots.
    """
    if not isinstance(value, dict):
        return {prefix}
    join = lambda key: f"{prefix}.{key.replace('.', '_')}" if prefix else key
    return {leaf for key, inside in value.items() for leaf in leaves(inside, join(key))}


def written_names():
    """Returns the names of metrics in the source code, which are dict keys `group/name`.

    `*` stands for a part of a name that is computed at run time.
    """
    found = set()
    for path in (ROOT / "src/bacr_jax").rglob("*.py"):
        if path.relative_to(ROOT / "src/bacr_jax").parts[0] not in READERS:
            for node in ast.walk(ast.parse(path.read_text())):
                found |= {name for key in _keys(node) if NAME.fullmatch(name := _text(key))}
    return found


def _keys(node):
    """Returns the expressions that a syntax node uses as keys of a dict that it creates or changes.

    Calls of `Clock.lap` count too, because each lap becomes a metric.
    """
    if isinstance(node, ast.Dict):
        return [key for key in node.keys if key is not None]
    if isinstance(node, ast.DictComp):
        return [node.key]
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        return [node.slice]
    # clock.lap("plan") writes the metric time/plan.
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "lap":
        return [ast.Constant(f"time/{_text(one)}") for one in node.args]
    return []


def _text(node):
    """Returns the text of a string or f-string, with `*` for computed parts, else ""."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(getattr(part, "value", "*") if _fixed(part) else "*" for part in node.values)
    return ""


def _fixed(part):
    return isinstance(part, ast.Constant)


def an_evaluation():
    """Returns a record of eval.jsonl in which every field of an evaluation has a value."""
    rng = np.random.default_rng(0)
    settings = [EvalSetting("sampled", 8, 2), EvalSetting("sampled", 8, 2, cut=4)]
    results = {setting: _samples(rng, setting) for setting in settings}
    with ExactGrader() as grader:
        made = summarise(results, grader, problems=_Marked())
    each = {name: {"A": made[name]} for name in ("anytime", "dense", "near_duplicates")}
    return {"step": 1, "when": "during", "sets": {"A": made["by_budget"]}, **each}


class _Marked:
    """Contains the two fields of a question set that a summary reads.

    The first of three questions is a near-duplicate of a question of set B.
    """

    compared_with, duplicates = "B", np.array([True, False, False])


def _samples(rng, setting):
    """Returns random graded samples of three questions."""
    flag = lambda: rng.random((3, setting.samples)) < 0.5
    count = lambda: rng.integers(1, 8, (3, setting.samples))
    right = flag()
    return Graded(
        budget=setting.budget,
        ids=["a", "b", "c"],
        levels=np.array([1, 2, 2]),
        subjects=["algebra", "algebra", "geometry"],
        correct=right,
        strict=right,
        thinking=count(),
        total=count(),
        forced_tokens=count(),
        answered=count(),
        forced=np.array([[True, False]] * 3),
        finished=flag(),
        timed_out=flag(),
        answers=[["1", "2"]] * 3,
        paths={"number": 6},
    )
