"""What docs/metrics.md says of the numbers that runs write, and what the code can write."""

import ast
import re
from pathlib import Path

import numpy as np

from bacr_grading.grader import ExactGrader
from bacr_jax.evaluation.samples import EvalSetting, Graded
from bacr_jax.evaluation.summary import summarise

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/metrics.md"
ENTRY = "eval.jsonl: one set, mode and budget"
# Rooms that read metrics, and write none.
READERS = ("report",)
NAME = re.compile(r"[a-z]\w*/[\w*]+")


def documented():
    """{heading of a section of the page: its keys}."""
    sections = {}
    for section in PAGE.read_text().split("\n## ")[1:]:
        heading = section.partition("\n")[0]
        sections[heading] = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    return sections


def rows():
    """Cells of every row of the page's tables."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def keys_of(file):
    """Documented keys of metrics.jsonl, eval.jsonl or summary.json; an entry's own aside."""
    found = documented().items()
    return [key for name, keys in found if name.startswith(file) and name != ENTRY for key in keys]


def pattern(key):
    """A documented key as a regular expression: capitals stand for a name, * for what follows."""
    escaped = re.escape(key).replace(r"\*", ".+")
    return re.compile(re.sub(r"(?<![A-Za-z])[A-Z]+(?![A-Za-z])", r"[^./]+", escaped))


def advice(missing, where):
    """What the author of new keys has to do."""
    return f"docs/metrics.md: add a row under '## {where}' for each of {sorted(missing)}"


def undocumented(names, file="metrics.jsonl"):
    """Those of the keys that a run wrote of which the page says nothing."""
    keys = keys_of(file)
    # Where there is nothing to say, a whole object is null.
    keys += [key.rpartition(".")[0] for key in keys if "." in key]
    known = [pattern(key) for key in keys]
    return {name for name in names if not any(one.fullmatch(name) for one in known)}


def leaves(value, prefix=""):
    """Dotted names of the numbers, texts and lists in nested objects.

    Names of sets, levels and subjects are the data's own, and may hold dots.
    """
    if not isinstance(value, dict):
        return {prefix}
    join = lambda key: f"{prefix}.{key.replace('.', '_')}" if prefix else key
    return {leaf for key, inside in value.items() for leaf in leaves(inside, join(key))}


def written_names():
    """Names of metrics in the source: keys `group/name` of dicts; * stands for a computed part."""
    found = set()
    for path in (ROOT / "src/bacr_jax").rglob("*.py"):
        if path.relative_to(ROOT / "src/bacr_jax").parts[0] not in READERS:
            for node in ast.walk(ast.parse(path.read_text())):
                found |= {name for key in _keys(node) if NAME.fullmatch(name := _text(key))}
    return found


def _keys(node):
    """Expressions that `node` uses as keys of something it writes."""
    if isinstance(node, ast.Dict):
        return [key for key in node.keys if key is not None]
    if isinstance(node, ast.DictComp):
        return [node.key]
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        return [node.slice]
    # clock.lap("plan") is the metric time/plan.
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "lap":
        return [ast.Constant(f"time/{_text(one)}") for one in node.args]
    return []


def _text(node):
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(getattr(part, "value", "*") if _fixed(part) else "*" for part in node.values)
    return ""


def _fixed(part):
    return isinstance(part, ast.Constant)


def an_evaluation():
    """A record of eval.jsonl, made of samples with everything that an evaluation can have."""
    rng = np.random.default_rng(0)
    settings = [EvalSetting("sampled", 8, 2), EvalSetting("sampled", 8, 2, cut=4)]
    results = {setting: _samples(rng, setting) for setting in settings}
    with ExactGrader() as grader:
        made = summarise(results, grader, problems=_Marked())
    each = {name: {"A": made[name]} for name in ("anytime", "dense", "near_duplicates")}
    return {"step": 1, "when": "during", "sets": {"A": made["by_budget"]}, **each}


class _Marked:
    """Of the questions of a set, what a summary asks for."""

    compared_with, duplicates = "B", np.array([True, False, False])


def _samples(rng, setting):
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
